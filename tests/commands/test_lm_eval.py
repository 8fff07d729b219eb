"""The command that calls lm-evaluation-harness; tests/evaluation/test_harness.py has what its models compute."""

import sys


def test_without_the_harness_the_command_says_what_to_install(call, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # cannot be imported
    status, printed = call("lm_eval", "--model", "t2r", "--tasks", "any")
    assert status == 2 and printed == "error: this needs the package lm_eval: pip install 't2r[lm_eval]'\n"


def test_help_is_this_commands_own(call, capsys):
    from t2r.__main__ import main

    assert main(["lm_eval", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--model_args model=MODEL" in printed and "Flags:" not in printed
