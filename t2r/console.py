"""What commands print: progress while they work, a table for people, one line of JSON for programs."""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

_silent = False
_interrupted = False  # Ctrl-C was pressed


def silence() -> None:
    """Hides all further output of this process except errors: in a distributed run, only the first process prints."""
    global _silent
    _silent = True
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process ends


def keep_output_for_results() -> None:
    """From now on, what libraries written in C++ print on standard output goes to standard error.

    They write to file descriptor 1, past Python: a program that reads our JSON would read their messages, too.
    """
    if sys.stdout is not sys.__stdout__:
        return  # a notebook or a test has redirected it
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)  # noqa: SIM115


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In its body, Ctrl-C ends the work for certain: `raise_if_interrupted` raises what a library has swallowed."""
    global _interrupted
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers there only
        yield
        return
    previous = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        _interrupted = False
        signal.signal(signal.SIGINT, previous)


def _interrupt(*_: Any) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt after Ctrl-C. Long work calls it between its parts."""
    if _interrupted:
        raise KeyboardInterrupt


class Progress:
    """Progress on standard error: a bar with an ETA on a terminal, elsewhere a plain line every few seconds."""

    seconds_between_lines = 10.0

    def __init__(self, name: str, total: int, done: int = 0, *, quiet: bool = False):
        self._name, self._total, self._done, self._first = name, total, done, done
        self._start = self._last_line = time.monotonic()
        self._quiet, self._shown = quiet or _silent, {}
        terminal = sys.stderr.isatty() and not self._quiet
        self._bar = tqdm(total=total, initial=done, desc=name, dynamic_ncols=True) if terminal else None

    def advance(self, count: int = 1, **shown: Any) -> None:
        """Counts `count` more items as done; `shown` holds values to print beside the progress until new ones come."""
        raise_if_interrupted()
        self._done += count
        self._shown = shown or self._shown
        if self._bar is not None:
            self._bar.set_postfix({name: short(value) for name, value in self._shown.items()}, refresh=False)
            self._bar.update(count)
            return
        now = time.monotonic()
        if self._quiet:
            return
        if now - self._last_line >= self.seconds_between_lines or self._done >= self._total:
            self._last_line = now
            left = (now - self._start) / max(self._done - self._first, 1) * (self._total - self._done)
            values = "".join(f", {name} {short(value)}" for name, value in self._shown.items())
            self.say(f"{self._name} {self._done}/{self._total}{values}, {left:.0f} s left")

    def forget(self) -> None:
        """Shows no values beside the progress until new ones come."""
        self._shown = {}

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            say(line)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def say(line: str) -> None:
    """Prints a message for people to standard error."""
    if not _silent:
        print(line, file=sys.stderr, flush=True)


def table(headers: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table with aligned columns: the first to the left, the others to the right."""
    cells = [[short(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [headers, *cells]) for column in range(len(headers))]

    def line(row: list[str]) -> str:
        aligned = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, cells)])


def short(value: Any) -> str:
    """A value as text; numbers have thousands separators, and those that are not whole have four digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not 1e-4 <= abs(value) < 1e15:  # zero, NaN and infinity too
        return f"{value:.4g}"
    rounded = float(f"{abs(value):.4g}")  # 999.96 is 1,000
    decimals = max(0, 3 - math.floor(math.log10(rounded)))
    return f"{value:,.{decimals}f}"


def finish(result: dict[str, Any], stream: Any = None) -> None:
    """Prints the result as one line of JSON: the last line of every command."""
    print(json.dumps(finite(result), allow_nan=False), file=stream or sys.stdout, flush=True)


def finite(value: Any) -> Any:
    """The value with null in place of numbers that JSON does not have: NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
