"""The one error type for bad input: what a user gave, what is wrong with it, how to mend it."""


class InputError(ValueError):
    """Bad input. The command line prints its message alone; anything else is a bug and keeps its traceback."""


def raise_all(subject: str, problems: list[str]) -> None:
    """Raises one InputError that lists every problem, so that a user mends them in one go."""
    if problems:
        raise InputError(subject + "".join(f"\n  - {problem}" for problem in problems))


class Stopped(Exception):
    """The run was asked to stop (SIGTERM), and has saved what it needs to go on."""
