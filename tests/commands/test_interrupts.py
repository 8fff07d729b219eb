"""Ctrl-C, and standard output that is closed: in real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import make_model, micro
from t2r.console import Progress, interruptible
from t2r.decode.generate import generate_tokens, prefill
from tests.training.runs import ROOT, environment


def start(*arguments, shell=()):
    streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*shell, sys.executable, "-m", "t2r", *arguments], env=environment(), cwd=ROOT, **streams)


@pytest.mark.slow
def test_ctrl_c_ends_a_long_generation(tmp_path):
    state = tmp_path / "state"
    process = start("generate", "--model=builtin:tiny_lm", "--prompt=The", "--length=20000", f"--save_state={state}")
    assert process.stdout.read(20).startswith("The")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "interrupted: no file was written" and "Traceback" not in errors
    assert not state.exists()


def swallow_ctrl_c(*_):
    """What a library does that calls Python and ignores its errors."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:
        pass


def test_ctrl_c_that_is_swallowed_ends_within_a_chunk():
    model, chunks = make_model(micro(layers=1, adaptive_cutoffs=())), []
    generation = prefill(model, [[1, 2]], 100)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        on_tokens = lambda tokens: chunks.append(tokens) or swallow_ctrl_c()  # noqa: E731
        generate_tokens(model, generation, 100, end=-1, segment=4, on_tokens=on_tokens)
    assert len(chunks) == 1
    with pytest.raises(KeyboardInterrupt), interruptible(), Progress("work", 2, quiet=True) as progress:
        progress.advance()
        swallow_ctrl_c()
        progress.advance()
    assert signal.getsignal(signal.SIGINT) is handler
    Progress("more work", 2, quiet=True).advance()


def test_a_closed_output_is_an_error():
    """Python drops what is printed to it."""
    closed = start("translate", "--model=MODEL", shell=["sh", "-c", 'exec "$@" >&-', "sh"])
    _, errors = closed.communicate("one line", timeout=60)
    assert closed.returncode == 2 and errors.startswith("error: standard output is closed"), errors
