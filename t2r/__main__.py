"""t2r COMMAND, or python -m t2r COMMAND: dispatch, nothing else."""

import ast
import importlib.util
import os
import pkgutil
import signal
import sys

from absl import flags


def main(arguments: list[str]) -> int:
    """Runs a command; bad input is one message and status 2, anything else that goes wrong keeps its traceback."""
    from t2r import commands

    modules = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    names = sorted(name.replace("_", " ") for name in modules if not name.startswith("_"))
    if " ".join(arguments[:2]) in names:  # such as `benchmark compile`
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    if not arguments or arguments[0] not in names:
        asked_for_help = bool(arguments) and arguments[0] in ("help", "--help", "-h")
        if arguments and not asked_for_help:
            print(f"unknown command {arguments[0]!r}", file=sys.stderr)
        lines = (f"  {name:<20} {_summary(name)}" for name in names)
        print("usage: t2r COMMAND ...  (COMMAND --help says more)\n\n" + "\n".join(lines))
        return 0 if asked_for_help else 2
    command = importlib.import_module(_module(arguments[0]))
    if {"--help", "-h", "-help"} & set(arguments):
        print(command.__doc__ + "\n" + flags.FLAGS.module_help(command))
        return 0

    from t2r.console import finish
    from t2r.errors import InputError, Stopped

    try:
        parse_flags(command, arguments)
        result = command.main()
        finish(result, command.report_stream() if hasattr(command, "report_stream") else None)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"{stopped}; the same command goes on from there", file=sys.stderr)
        return 128 + signal.SIGTERM  # what a scheduler expects of a process that it has told to stop
    except KeyboardInterrupt:
        print("stopped; what was saved is intact, and the same command goes on from it", file=sys.stderr)
        return 130
    return 0


def parse_flags(command, arguments: list[str]) -> None:
    """Reads the flags; whatever is wrong with one is bad input."""
    from t2r.errors import InputError

    if hasattr(command, "_CONFIG"):
        from t2r.training.config import check_arguments

        arguments = check_arguments(arguments)
    try:
        rest = flags.FLAGS(arguments)[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise InputError(str(error)) from None
    if rest:
        raise InputError(f"unexpected arguments {' '.join(rest)}: flags are written --name=value")


def _module(name: str) -> str:
    return "t2r.commands." + name.replace(" ", "_")


def _summary(name: str) -> str:
    # Read, not imported: commands define the same flags, and only one may be loaded.
    source = importlib.util.find_spec(_module(name)).loader.get_source(_module(name))
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def run() -> None:
    """The command `t2r`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
