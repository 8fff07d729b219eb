"""The error type for bad input, whose message names the value, the problem and the fix; and checks that all share."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The command line prints only the message; any other exception is a bug and keeps its traceback."""


def raise_all(subject: str, problems: list[str]) -> None:
    """Raises one InputError that lists every problem, so that a user can fix them all at once."""
    if problems:
        raise InputError(subject + "".join(f"\n  - {problem}" for problem in problems))


MANY = 20  # choices: if there is a near one, so many are not listed


def unknown(what: str, name: str, choices: Iterable[str]) -> str:
    """The message for an unknown name: the choice that is spelled nearest to it, and all choices."""
    choices = list(choices)
    problem, close = f"unknown {what} {name!r}", difflib.get_close_matches(str(name), choices, n=1)
    listed = ", ".join(choices)
    if not close:
        return f"{problem}: choose one of {listed}"
    return f"{problem}: did you mean {close[0]!r}?" + (f" (one of {listed})" if len(choices) < MANY else "")


UINT32_MAX = 2**32 - 1


def check_seed(seed: int) -> None:
    """Refuses a seed that JAX does not take."""
    if not 0 <= seed <= UINT32_MAX:
        raise InputError(f"seed={seed} must be at least 0 and at most {UINT32_MAX}")


class Stopped(Exception):
    """The run received SIGTERM and has saved what it needs to resume."""
