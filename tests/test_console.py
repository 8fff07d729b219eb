"""What people see while a command works, and the clock behind the speeds they read."""

import io
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from t2r.console import Progress, short, table
from t2r.environment import running_time


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_values_stay_beside_the_bar_until_new_ones_come(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("train", 4) as progress:
        progress._bar.mininterval = 0  # draw every time
        progress.advance(loss=2.5, learning_rate=1e-3)
        progress.advance()
        progress.advance(loss=1.25, learning_rate=1e-4)
    drawn = [line for line in sys.stderr.getvalue().split("\r") if "train:" in line]
    assert "2/4" in drawn[-3] and "loss=2.500, learning_rate=0.001000" in drawn[-3]
    assert "loss=1.250, learning_rate=0.0001000" in drawn[-1]


def test_the_clock_stands_still_while_jax_compiles():
    @jax.jit
    def inner(x):
        time.sleep(0.2)  # runs when it is traced
        return x + 1

    @jax.jit
    def outer(x):
        time.sleep(0.2)
        return inner(x) * 2

    x = jnp.ones(3)
    began, began_running = time.monotonic(), running_time()
    outer(x).block_until_ready()
    assert time.monotonic() - began > 0.4 and 0 <= running_time() - began_running < 0.2
    began_running = running_time()
    outer(x).block_until_ready()
    time.sleep(0.1)
    assert running_time() - began_running >= 0.1


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"), (1.5, "1.500"), (67.9123, "67.91"), (0.012345, "0.01235"), (1.234e-5, "1.234e-05"),
        (999.96, "1,000"), (249188.4, "249,188"), (1234567.8, "1,234,568"), (-12.5, "-12.50"), (2048, "2,048"),
        (float("nan"), "nan"), (float("inf"), "inf"), (True, "True"), ("98%", "98%"), (None, "None"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits_and_separators(value, text):
    assert short(value) == text


def test_columns_are_aligned():
    lines = table(["model", "tokens/s"], [("t2r", 249188.4), ("transformer", 7370.2)]).splitlines()
    assert lines == ["model        tokens/s", "-----------  --------", "t2r           249,188", "transformer     7,370"]
