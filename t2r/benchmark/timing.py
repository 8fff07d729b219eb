"""Seconds of a program on the device: repeated, the median and the spread."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Times(NamedTuple):
    """Of one call, all repetitions together."""

    seconds: float  # the median
    spread: float  # slowest less fastest, over the median
    repetitions: int


def timed(
    run: Callable[[Any], Any],
    *,
    prepare: Callable[[], Any] = lambda: None,
    repeat_for: float = 2.0,
    least: int = 5,
    warm_up: int = 1,
    calls: int = 1,
) -> Times:
    """Runs again and again, until `repeat_for` seconds have passed and `least` repetitions been counted.

    `prepare` makes what `run` is given, outside the clock. With `calls`, so many follow one another in a repetition
    before the device is waited for: a short program's time is then the device's, not the host's.
    """
    times = []
    while len(times) < warm_up + least or calls * sum(times[warm_up:]) < repeat_for:
        given = jax.block_until_ready(prepare())
        began = time.perf_counter()
        for _ in range(calls):
            result = run(given)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / calls)
    counted = times[warm_up:]
    middle = statistics.median(counted)
    return Times(middle, (max(counted) - min(counted)) / middle, len(counted))


def timed_in_a_row(run: Callable[[Any], Any], repeat_for: float) -> Times:
    """The same for a program that may be short: it is called so often in a row that a repetition takes 50 ms."""
    once = timed(run, repeat_for=0, least=1)
    return timed(run, repeat_for=repeat_for, calls=max(1, min(50, int(0.05 / once.seconds))))
