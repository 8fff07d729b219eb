"""Shared by all benchmarks: timing, checks that programs fit in memory, and results on disk."""

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from t2r import environment
from t2r.console import say
from t2r.environment import available_memory
from t2r.errors import InputError
from t2r.files import check_replaceable_json, make_folder, output_folder, read_file, write_json, writing


class Timing(NamedTuple):
    """The time of one call, over all repetitions."""

    seconds: float  # median
    spread: float  # (slowest - fastest) / median
    repetitions: int


def time_calls(
    run: Callable[[Any], Any],
    *,
    prepare: Callable[[], Any] = lambda: None,
    repeat_for: float = 2.0,
    least: int = 5,
    warm_up: int = 1,
    calls: int = 1,
) -> Timing:
    """Repeats `run(prepare())` for at least `repeat_for` seconds and `least` repetitions, after `warm_up` untimed ones.

    `prepare` is not timed. A repetition is `calls` calls of `run` and one wait for the device: with many calls, the
    time of a short program is the device's time and not the host's.
    """
    times = []
    while len(times) < warm_up + least or calls * sum(times[warm_up:]) < repeat_for:
        inputs = jax.block_until_ready(prepare())
        began = time.perf_counter()
        for _ in range(calls):
            result = run(inputs)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / calls)
    counted = times[warm_up:]
    median = statistics.median(counted)
    return Timing(median, (max(counted) - min(counted)) / median, len(counted))


REPETITION_SECONDS, MOST_CALLS = 0.05, 50  # a repetition of a short program: intended time, and maximum calls


def time_short_calls(run: Callable[[Any], Any], repeat_for: float) -> Timing:
    """Times a program that may be short: it is called several times in a row, so that a repetition is long enough."""
    once = time_calls(run, repeat_for=0, least=1)
    return time_calls(run, repeat_for=repeat_for, calls=max(1, min(MOST_CALLS, int(REPETITION_SECONDS / once.seconds))))


USABLE = (
    0.97  # share of the free memory that a program may plan to use; the rest is for what the compiler does not count
)


class DoesNotFit(InputError):
    """A program needs more memory than is available."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error was caused by too little memory."""
    return isinstance(error, DoesNotFit) or environment.is_out_of_memory(error)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """The compiler's memory plan: arguments, outputs that are not donated arguments, and temporaries."""
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def check_fits(compiled: jax.stages.Compiled, already: int) -> None:
    """Raises DoesNotFit if a program plans to use more memory than is free; `already` bytes of it are allocated."""
    free, needed = available_memory(), peak_bytes(compiled) - already
    if free is not None and needed > USABLE * free:
        raise DoesNotFit(f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


MIB = 2**20

# For --device_report: how each figure was obtained, by its JSON key.
MEASURED = "measured on the device"
ESTIMATED = "estimated by the compiler"
COMPUTED = "computed from the model's definition"
PROVENANCE = {
    MEASURED: ("bandwidth", "step_seconds", "tokens_per_second", "spread", "compile_seconds", "prefill", "seconds",
               "first_token_seconds",
               "device_bytes", "device_peak_bytes"),
    ESTIMATED: ("program_state_bytes", "argument_bytes", "temporary_bytes", "program_bytes"),
    COMPUTED: ("weight_bytes", "read_bytes", "written_bytes", "flops", "floor_seconds", "state_bytes", "formula_bytes",
               "predicted_crossover"),
}  # fmt: skip


class Results:
    """The measurements of one benchmark, which are the lines of DIR/NAME.jsonl.

    A line has `asked` (the key: what was measured), `environment` (where), and the figures.
    """

    def __init__(
        self, name: str, output: str | None, environment: dict, *, again: bool = False, budget_seconds: float = 0.0
    ):
        self.name, self.output, self.environment = name, output and Path(output), environment
        self.lines: list[dict[str, Any]] = []  # requested in this run: measured now, or read from DIR/NAME.jsonl
        self.left_out: list[dict[str, Any]] = []  # keys of measurements that the time budget did not allow
        self.notes: list[str] = []
        if self.output:
            make_folder(output_folder(str(self.output)))
            self._check_foreign()
        self._earlier = [] if again or not output else _read_lines(self._path("jsonl"))
        self._deadline = time.monotonic() + budget_seconds if budget_seconds else None

    def get_or_measure(
        self, key: dict[str, Any], measure: Callable[[], dict[str, Any]], *, ignore_budget: bool = False
    ) -> dict[str, Any] | None:
        """The line of this key: an earlier one from the same environment, or a new measurement.

        None if it is new and the time budget is spent.
        """
        key = json.loads(json.dumps(key))  # as it will be read back, with lists for tuples
        same = (old for old in self._earlier if (old["asked"], old["environment"]) == (key, self.environment))
        line = next(same, None)
        if line is None:
            if self._deadline is not None and time.monotonic() > self._deadline and not ignore_budget:
                self.left_out.append(key)
                return None
            line = {"asked": key, **_or_does_not_fit(measure), "environment": self.environment}
            self._append(line)
        self.lines.append(line)
        return line

    def note(self, line: str) -> None:
        """Prints a remark and saves it with the results."""
        say(line)
        self.notes.append(line)

    def fitting_lines(self, what: str) -> list[dict[str, Any]]:
        """The lines of one kind of measurement, without those that did not fit in memory."""
        return [line for line in self.lines_of(what) if "does_not_fit" not in line]

    def lines_of(self, what: str) -> list[dict[str, Any]]:
        """The lines of one kind of measurement."""
        return [line for line in self.lines if line["asked"]["what"] == what]

    def write(self, summary: dict[str, Any]) -> None:
        """Writes DIR/NAME.json: summary, environment and all lines."""
        for line in self.lines:
            if "does_not_fit" in line:
                say(f"{_short(line['asked'])} does not fit: {line['does_not_fit']}")
        for key in self.left_out:
            say(f"{_short(key)} is left out: --budget_seconds is spent")
        if self.output is None:
            return
        lines = [{name: value for name, value in line.items() if name != "environment"} for line in self.lines]
        command = shlex.join(["python", "-m", "t2r", *sys.argv[1:]])
        content = {"command": command, "environment": self.environment, **summary}
        content |= {"left_out": self.left_out, "notes": self.notes}
        write_json(self._path("json"), {**content, "lines": lines})

    def figure(self) -> Path | None:
        """The path of plots without a suffix; None: no plots."""
        return self.output and self.output / self.name

    def _check_foreign(self) -> None:
        """Refuses a folder whose NAME.json is of something else: it would be replaced."""
        keys = {"command", "environment", "lines"}
        check_replaceable_json(self._path("json"), keys, "this benchmark", "choose another --output")

    def _append(self, line: dict[str, Any]) -> None:
        if self.output is not None:
            with writing(self._path("jsonl")), self._path("jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _path(self, ending: str) -> Path:
        return self.output / f"{self.name}.{ending}"


def _or_does_not_fit(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures of a measurement; {"does_not_fit": reason} if memory is too small."""
    try:
        return measure()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), "").removeprefix("it does not fit: ")[:300]
        return {"does_not_fit": reason}


def _short(key: dict[str, Any]) -> str:
    return ", ".join(str(key[name]) for name in ("what", "row", "length") if name in key)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not os.path.lexists(path):
        return []
    lines = []
    for line in read_file(path, "remove it, or choose another --output").splitlines():
        try:
            content = json.loads(line)
        except ValueError:  # cut off when a run was killed
            content = None
        if isinstance(content, dict) and content.keys() >= {"asked", "environment"}:
            lines.append(content)
        else:
            say(f"{path}: an incomplete line is skipped")
    return lines


def device_report(lines: list[dict[str, Any]], device: str) -> str:
    """Which figures of some lines were measured, and on which device, and which were estimated or computed."""
    names = {name for line in lines for name in line}
    estimates = {name for line in lines if line.get("estimate") for name in line}
    report = []
    for kind, figures in PROVENANCE.items():
        shown = [name for name in figures if name in names]
        if kind == MEASURED:
            shown = [name for name in shown if name not in estimates]
            kind = f"{kind} ({device})"
        elif kind == ESTIMATED:
            shown += [name for name in PROVENANCE[MEASURED] if name in estimates and name != "compile_seconds"]
        if shown:
            report.append(f"{kind}: {', '.join(shown)}")
    return "\n".join(report)


def by_model(results: Results, what: str, figure: str) -> dict[str, dict[int, Any]]:
    """model name → length → figure, over the lines of one kind of measurement."""
    values: dict[str, dict[int, Any]] = {}
    for line in results.lines_of(what):
        if line.get(figure) is not None:
            values.setdefault(line["asked"]["row"], {})[line["asked"]["length"]] = line[figure]
    return values


def describe_device(results, devices: int = 1) -> str:
    """The device that figures were measured on, or estimated for; for the titles of plots."""
    environ = results.environment
    if "topology" in environ:
        kind = f"{devices} device{'s' * (devices > 1)} of TPU {environ['topology']}"
        return f"{kind}: compiled, not measured ({environ['compiler']})"
    return environ["device"]


class Output(NamedTuple):
    """Where the results of a benchmark go."""

    folder: str | None = None  # None: results are only printed; measurements in an existing folder are reused
    again: bool = False  # do not reuse measurements
    budget_seconds: float = 0.0  # start no measurement after this time; 0: no limit
    device_report: bool = False  # print how each figure was obtained


def open_results(name: str, output: Output, described: dict[str, Any] | None = None) -> Results:
    """The results of a benchmark on this machine; `described` adds a TPU topology to the environment."""
    environ = {**environment.describe(), **(described or {})}
    return Results(name, output.folder, environ, again=output.again, budget_seconds=output.budget_seconds)


def finish(results: Results, output: Output, summary: dict[str, Any]) -> None:
    """Writes the results with a summary; with `device_report`, prints how each figure was obtained."""
    if output.device_report:
        print(device_report(results.lines, results.environment["device"]))
    results.write(summary)
