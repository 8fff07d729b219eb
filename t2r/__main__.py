"""The command line: `t2r COMMAND`, or `python -m t2r COMMAND`. Finds and runs the command."""

import ast
import difflib
import importlib.util
import math
import os
import pkgutil
import re
import signal
import sys
import textwrap

from absl import flags

USAGE = """t2r converts a pretrained transformer into a recurrent network. To see it work, run: t2r quickstart

usage: t2r COMMAND [--FLAG=VALUE ...]      (t2r COMMAND --help explains a command)

"""

CACHE = """

Compiled programs are kept in ~/.cache/t2r, or below XDG_CACHE_HOME, and may be deleted. JAX_COMPILATION_CACHE_DIR
names another folder; JAX_ENABLE_COMPILATION_CACHE=false keeps none."""


def main(arguments: list[str]) -> int:
    """Runs a command and returns its exit status. Bad input is one message and status 2; other errors propagate."""
    from t2r.errors import InputError, Stopped

    try:
        status = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error can still be explained
        return status
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"{stopped}; run the same command to resume", file=sys.stderr)
        return 128 + signal.SIGTERM  # the status of a process that SIGTERM ended, which schedulers expect
    except BrokenPipeError:  # the reader of a pipe, such as head, has ended
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:  # a file or a disk, where the code that uses it has no better explanation
        if error.errno is None:
            raise
        _discard_output()
        print(f"error: {error.filename or 'cannot write the output'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before a command has begun
        return 128 + signal.SIGINT


def _discard_output() -> None:
    """What is still to be printed is lost: Python would fail to print it, again, when it ends."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    from t2r import commands

    modules = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    names = [name.replace("benchmark_", "benchmark ") for name in modules if not name.startswith("_")]
    names.sort(key=lambda name: (name.startswith("benchmark"), name))
    if " ".join(arguments[:2]) in names:  # two words, such as `benchmark compile`
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    if not arguments or arguments[0] not in names:
        return _list_commands(arguments, names)
    command = importlib.import_module(_module(arguments[0]))
    if {"--help", "-h", "-help"} & set(arguments):
        print(command.__doc__ + ("" if hasattr(command, "ARGUMENTS") else f"\n{_flag_help(command)}"))
        return 0

    from t2r.compilation_cache import use_compilation_cache
    from t2r.console import finish, interruptible

    if not arguments[0].startswith("benchmark"):  # which measure compilation, too
        use_compilation_cache()
    if sys.stdout is None:  # every command's result goes there; Python would drop it in silence
        print("error: standard output is closed: redirect it to a file, or to /dev/null", file=sys.stderr)
        return 2
    try:
        with interruptible():
            parse_flags(command, arguments)
            result = command.main()
            if result is not None:  # another program's command line, which prints its own
                finish(result, command.report_stream() if hasattr(command, "report_stream") else None)
    except KeyboardInterrupt:
        resumes = getattr(command, "RESUMES", False)  # or a function that tells
        resumes = resumes() if callable(resumes) else resumes
        kept = getattr(command, "KEPT_IF_INTERRUPTED", "no file was written")
        after = "run the same command to resume" if resumes else kept
        print(f"\ninterrupted: {after}", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _list_commands(arguments: list[str], names: list[str]) -> int:
    """Lists all commands, or after `benchmark` all benchmarks; the status is 0 if that is what was asked for."""
    wanted = arguments
    if arguments[:1] == ["benchmark"]:
        wanted, names = arguments[1:], [name for name in names if name.startswith("benchmark")]
        if wanted and wanted[0].startswith("--") and wanted[0] != "--help":
            wanted = []  # flags, of no benchmark
    wants_help = bool(wanted) and wanted[0] in ("help", "--help", "-h")
    if arguments and not wants_help:
        both = " ".join(arguments[:2])
        given = both if wanted is not arguments else arguments[0]
        close = difflib.get_close_matches(both, names, n=1) or difflib.get_close_matches(given, names, n=1)
        if wanted and close:
            print(f"error: unknown command {given!r}: did you mean {close[0]!r}? See t2r --help", file=sys.stderr)
            return 2
        print(f"error: unknown command {given!r}" if wanted else "error: name a benchmark", file=sys.stderr)
    lines = (f"  {name:<20} {_summary(name)}" for name in names)
    print(USAGE + "\n".join(lines) + CACHE)
    return 0 if wants_help else 2


def parse_flags(command, arguments: list[str]) -> None:
    """Parses the flags of a command; raises an InputError that names all that are invalid."""
    from t2r.errors import InputError, raise_all

    for argument in arguments:
        if not argument.isprintable() and any("\udc80" <= character <= "\udcff" for character in argument):
            raise InputError(f"{argument!a} is not UTF-8 text")
    if hasattr(command, "ARGUMENTS"):  # those of another program, which parses them itself
        command.ARGUMENTS[:] = arguments[1:]
        return
    if hasattr(command, "_CONFIG"):
        from t2r.training.config import check_arguments

        arguments = check_arguments(arguments)
    problems, rest = _parse(arguments)
    if problems:
        problems = list(dict.fromkeys([*problems, *_problems_of_each(arguments)]))
        if len(problems) == 1:
            raise InputError(f"{problems[0]}: see --help")
        raise_all("flags (see --help):", problems)
    if rest:
        raise InputError(f"unexpected arguments {' '.join(rest)}: write flags as --name=value")


def _parse(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Parses flags; (what is wrong, arguments that are not flags). Only the first flag that is wrong is named, or else
    all that are missing."""
    try:
        rest = flags.FLAGS(arguments)[1:]
        return _not_finite(), rest
    except (flags.Error, TypeError, ValueError) as error:
        missing = re.findall(r"flag --(\w+)=None: Flag --\w+ must have a value other than None", str(error))
        return ([f"--{name} is missing" for name in missing] or [_in_words(str(error))]) + _not_finite(), []


def _not_finite() -> list[str]:
    """What is wrong with flags that were given and are infinite, or no number: no bound of absl's excludes NaN.

    Not fields of a config, which are all checked together.
    """
    given = [flag for flags_of_module in flags.FLAGS.flags_by_module_dict().values() for flag in flags_of_module]
    values = {
        flag.name: flag.value
        for flag in given
        if flag.present and isinstance(flag.value, float) and "." not in flag.name
    }
    return [f"--{name}={value}: write a finite number" for name, value in values.items() if not math.isfinite(value)]


def _problems_of_each(arguments: list[str]) -> list[str]:
    """What is wrong with each flag, each parsed alone, and what is missing. Not of --config, which is parsed once."""
    command, problems, good = arguments[0], [], []
    for group in _with_values(arguments[1:]):
        if group[0].startswith("--config"):
            continue
        found = [problem for problem in _parse([command, *group])[0] if not problem.endswith("is missing")]
        problems += found
        good += [] if found else group
    missing = _parse([command, *good])[0]
    return problems + [problem for problem in missing if problem != "--config is missing"]


def _with_values(arguments: list[str]) -> list[list[str]]:
    """Flags, each with the value after it if that is an argument of its own."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(argument)
    return groups


def _in_words(error: str) -> str:
    """An error of absl's flags, in fewer words, and without Python's for a number that cannot be read."""
    error = re.sub(r"Unknown command line flag '(\S+)'", r"there is no flag --\1", error)
    error = re.sub(r"^flag --(\w+)=\[(.*)\]: ", lambda match: f"--{match[1]}={_joined(match[2])}: ", error)
    error = re.sub(r"\. Did you mean: (.*?) \?", r" (did you mean --\1?)", error)
    error = error.replace("is not number", "is not a number").replace("is not integer", "is not an integer")
    error = re.sub(r"invalid literal for int\(\) with base \d+: .*", "write a whole number", error)
    return re.sub(r"could not convert string to float: .*", "write a number", error)


def _joined(items: str) -> str:
    """A list as absl's errors show it, as it was given."""
    return ",".join(ast.literal_eval(f"[{items}]"))


def _flag_help(command) -> str:
    """The flags of a command, each with its default if it has one; those that must be given come first."""
    texts = []
    for flag in flags.FLAGS.get_key_flags_for_module(command):
        required = flag.name == "config" or any("other than None" in check.message for check in flag.validators)
        values = "|".join(getattr(flag.parser, "enum_values", None) or ["VALUE"])
        form = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}={values}"
        shows_default = not flag.boolean and flag.default not in (None, "", [], -1)
        default = f" (default: {flag.default_as_str[1:-1]})" if shows_default else ""
        # absl puts the values before the help, and after it that a flag may be repeated
        text = ("Required. " if required else "") + flag.help.removeprefix(f"<{values}>: ").split(";\n")[0] + default
        paragraph = textwrap.fill(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        texts.append((not required, flag.name, f"  {form}\n{paragraph}"))
    return "\n".join(["Flags:", *(text for _, _, text in sorted(texts))])


def _module(name: str) -> str:
    return "t2r.commands." + name.replace(" ", "_")


def _summary(name: str) -> str:
    # The source is parsed, not imported: commands define flags of the same names, so only one can be imported.
    source = importlib.util.find_spec(_module(name)).loader.get_source(_module(name))
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def run() -> None:
    """The command `t2r`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
