"""Wrong flags of `serve`, `chat` and `benchmark serve`: one clear line each, before anything is computed."""

import socket

import pytest

SERVE = [
    ((), "--model is missing: see --help"),
    (("--model=nowhere",), "nowhere/config.json does not exist: give a t2r model directory, builtin:NAME, or ORG/NAME"),
    (("--model=builtin:x",), "no model 'builtin:x' ships with t2r"),
    (("--model=builtin:tiny_lm", "--port=70000"), "flag --port=70000: 70000 is not an integer in the range [0, 65535]"),
    (("--model=builtin:tiny_lm", "--port=-1"), "--port=-1"),
    (("--model=builtin:tiny_lm", "--slots=0"), "--slots=0"),
    (("--model=builtin:tiny_lm", "--slots=many"), "--slots=many"),
    (("--model=builtin:tiny_lm", "--capacity=-5"), "--capacity=-5"),
    (("--model=builtin:tiny_lm", "--timeout=0"), "--timeout=0"),
    (("--model=builtin:tiny_lm", "--grace=-1"), "--grace=-1"),
    (("--model=builtin:tiny_lm", "--body_kib=0"), "--body_kib=0"),
    (("--model=builtin:tiny_lm", "--dtype=int4"), "--dtype=int4"),
    (
        ("--model=builtin:tiny_lm", "--host=no.such.host.invalid", "--port=0"),
        "--host=no.such.host.invalid is no address",
    ),
    (("--model=builtin:tiny_lm", "--host=8.8.8.8", "--port=0"), "cannot listen on 8.8.8.8:0: "),
    (("--model=builtin:tiny_lm", "--transformer=builtin:tiny_lm", "--port=0"), "both builtin:tiny_lm: give two"),
    (("--model=builtin:tiny_lm", "--transformer=nowhere", "--port=0"), "nowhere/config.json does not exist"),
    (("--model=builtin:tiny_lm", "--chat_template=nowhere", "--port=0"), "nowhere does not exist: give a file with a"),
    (
        ("--model=builtin:tiny_lm", "--slots=65536", "--capacity=1000000", "--port=0"),
        "of 65536 slots of 1,000,000 tokens",
    ),
    (
        ("--model=builtin:tiny_lm", "--states=/dev/null/states", "--port=0"),
        "cannot write /dev/null/states/builtin:tiny_lm",
    ),
    (("--model=builtin:tiny_lm", "8000"), "unexpected arguments 8000"),
]
CHAT = [
    (("--model=builtin:tiny_lm", "--temperature=-1"), "--temperature=-1"),
    (("--model=builtin:tiny_lm", "--seed=4294967296"), "seed=4294967296 must be at least 0 and at most"),
    (("--model=builtin:tiny_lm", "--length=0"), "--length=0"),
]
LOAD = [
    ((), "give --model, to start a server, or --url"),
    (("--url=http://127.0.0.1:1",), "--url=http://127.0.0.1:1: no server with /v1/models answers there"),
    (("--url=nonsense",), "--url=nonsense: no server"),
    (("--model=builtin:tiny_lm", "--url=http://127.0.0.1:1"), "give --model, to start a server, or --url"),
    (
        ("--model=builtin:tiny_lm", "--streams=999999999"),
        "--streams=999999999 needs 1000000063 open files",
    ),
]
CASES = [("serve", *case) for case in SERVE] + [("chat", *case) for case in CHAT]
CASES += [(("benchmark", "serve"), *case) for case in LOAD]


@pytest.mark.parametrize("command, flags, message", CASES, ids=range(len(CASES)))
def test_a_wrong_flag_is_one_clear_error(command, flags, message, call):
    status, error = call(*([command] if isinstance(command, str) else command), *flags)
    assert status == 2 and message in error, error
    assert error.count("error: ") == 1 and "Traceback" not in error


def test_a_port_in_use_is_one_clear_error(call):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        status, error = call("serve", "--model=builtin:tiny_lm", f"--port={port}")
    assert status == 2 and f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in error


def test_a_translation_model_is_refused(call, saved_translator):
    for command in ("serve", "chat"):
        status, error = call(command, f"--model={saved_translator}", *(["--port=0"] if command == "serve" else []))
        assert status == 2 and "this is a translation model: use `t2r translate`" in error
