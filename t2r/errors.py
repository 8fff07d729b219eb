"""The error type for bad input. Its message names the value, the problem and the fix."""


class InputError(ValueError):
    """Bad input. The command line prints only the message; any other exception is a bug and keeps its traceback."""


def raise_all(subject: str, problems: list[str]) -> None:
    """Raises one InputError that lists every problem, so that a user can fix them all at once."""
    if problems:
        raise InputError(subject + "".join(f"\n  - {problem}" for problem in problems))


class Stopped(Exception):
    """The run received SIGTERM and has saved what it needs to resume."""
