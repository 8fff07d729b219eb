"""What all benchmarks share: timing, whether programs fit in memory, results on disk."""

import json
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


class Timing(NamedTuple):
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
) -> Timing:
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
    return Timing(middle, (max(counted) - min(counted)) / middle, len(counted))


def timed_in_a_row(run: Callable[[Any], Any], repeat_for: float) -> Timing:
    """The same for a program that may be short: it is called so often in a row that a repetition takes 50 ms."""
    once = timed(run, repeat_for=0, least=1)
    return timed(run, repeat_for=repeat_for, calls=max(1, min(50, int(0.05 / once.seconds))))


SPARE = 0.97  # of the memory that is free; programs need some that nobody counts


class DoesNotFit(InputError):
    """A program needs more memory than there is."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory was too small."""
    return isinstance(error, DoesNotFit) or "RESOURCE_EXHAUSTED" in str(error) or "ut of memory" in str(error)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments, outputs that share no memory with them, and temporaries, as the compiler has planned them."""
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def check_fits(compiled: jax.stages.Compiled, already: int) -> None:
    """Refuses to run what the compiler has planned more memory for than is free; so many bytes are there already."""
    free, needed = available_memory(), peak_bytes(compiled) - already
    if free is not None and needed > SPARE * free:
        raise DoesNotFit(f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


MIB = 2**20

# For --device_report: where figures come from, by their names in JSON.
MEASURED = "measured on the device"
ESTIMATED = "estimated by the compiler"
COMPUTED = "computed from the model's definition"
PROVENANCE = {
    MEASURED: ("bandwidth", "step_seconds", "tokens_per_second", "spread", "compile_seconds", "prefill", "seconds",
               "device_bytes", "device_peak_bytes"),
    ESTIMATED: ("program_state_bytes", "argument_bytes", "temporary_bytes", "program_bytes"),
    COMPUTED: ("weight_bytes", "read_bytes", "written_bytes", "flops", "floor_seconds", "state_bytes", "formula_bytes",
               "predicted_crossover"),
}  # fmt: skip


class Results:
    """Lines of DIR/NAME.jsonl: what was asked for, on what machine, and what was found."""

    def __init__(
        self, name: str, output: str | None, environment: dict, *, again: bool = False, budget_seconds: float = 0.0
    ):
        self.name, self.output, self.environment = name, output and Path(output), environment
        self.lines: list[dict[str, Any]] = []  # of this run, found now or before
        self.left_out: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._earlier = [] if again or not output else _read_lines(self._path("jsonl"))
        self._until = time.monotonic() + budget_seconds if budget_seconds else None

    def find(
        self, asked: dict[str, Any], measure: Callable[[], dict[str, Any]], *, always: bool = False
    ) -> dict[str, Any] | None:
        """The line of what is asked for: an earlier one from this environment, or a new one. None once time is up."""
        asked = json.loads(json.dumps(asked))  # as it is read back
        same = (old for old in self._earlier if (old["asked"], old["environment"]) == (asked, self.environment))
        line = next(same, None)
        if line is None:
            if self._until is not None and time.monotonic() > self._until and not always:
                self.left_out.append(asked)
                return None
            line = {"asked": asked, **_unless_too_large(measure), "environment": self.environment}
            self._append(line)
        self.lines.append(line)
        return line

    def note(self, line: str) -> None:
        """Something to be said, and kept."""
        say(line)
        self.notes.append(line)

    def of(self, what: str) -> list[dict[str, Any]]:
        """The lines of one kind, of what fits."""
        return [line for line in self.all_of(what) if "does_not_fit" not in line]

    def all_of(self, what: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line["asked"]["what"] == what]

    def write(self, summary: dict[str, Any]) -> None:
        """DIR/NAME.json: everything in one file."""
        for line in self.lines:
            if "does_not_fit" in line:
                say(f"{_short(line['asked'])} does not fit: {line['does_not_fit']}")
        for asked in self.left_out:
            say(f"{_short(asked)} is left out: no time")
        if self.output is None:
            return
        lines = [{key: value for key, value in line.items() if key != "environment"} for line in self.lines]
        command = shlex.join(["python", "-m", "t2r", *sys.argv[1:]])
        whole = {"command": command, "environment": self.environment, **summary}
        whole |= {"left_out": self.left_out, "notes": self.notes}
        self.output.mkdir(parents=True, exist_ok=True)
        self._path("json").write_text(json.dumps({**whole, "lines": lines}, indent=1) + "\n")

    def figure(self) -> Path | None:
        """Where plots go, without an ending; None: nowhere."""
        return self.output and self.output / self.name

    def _append(self, line: dict[str, Any]) -> None:
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)
            with self._path("jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _path(self, ending: str) -> Path:
        return self.output / f"{self.name}.{ending}"


def _unless_too_large(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), "").removeprefix("it does not fit: ")[:300]
        return {"does_not_fit": reason}


def _short(asked: dict[str, Any]) -> str:
    return ", ".join(str(asked[name]) for name in ("what", "row", "length") if name in asked)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off when a run was killed
            say(f"{path}: a broken line is left out")
    return found


def device_report(lines: list[dict[str, Any]], device: str) -> str:
    """Which of the figures in some lines were measured, and on what, and which were not."""
    names = {name for line in lines for name in line}
    estimates = {name for line in lines if line.get("estimate") for name in line}
    found = []
    for kind, known in PROVENANCE.items():
        shown = [name for name in known if name in names]
        if kind == MEASURED:
            shown = [name for name in shown if name not in estimates]
            kind = f"{kind} ({device})"
        elif kind == ESTIMATED:
            shown += [name for name in PROVENANCE[MEASURED] if name in estimates and name != "compile_seconds"]
        if shown:
            found.append(f"{kind}: {', '.join(shown)}")
    return "\n".join(found)


def by_row(results: Results, what: str, figure: str) -> dict[str, dict[int, Any]]:
    """row → length → figure."""
    found: dict[str, dict[int, Any]] = {}
    for line in results.all_of(what):
        if line.get(figure) is not None:
            found.setdefault(line["asked"]["row"], {})[line["asked"]["length"]] = line[figure]
    return found


def where(results, devices: int = 1) -> str:
    """What figures were measured on, or estimated for."""
    found = results.environment
    if "topology" in found:
        kind = f"{devices} device{'s' * (devices > 1)} of TPU {found['topology']}"
        return f"{kind}: compiled, not measured ({found['compiler']})"
    return found["device"]


class Output(NamedTuple):
    """Where the results of a benchmark go."""

    folder: str | None = None  # None: nowhere; else a stopped run goes on from what is there
    again: bool = False  # measure again what the folder already has
    budget_seconds: float = 0.0  # start no measurement after so long; 0: no limit
    device_report: bool = False  # say which figures were measured, and on what


def open_results(name: str, output: Output, described: dict[str, Any] | None = None) -> Results:
    """The results of one benchmark, for this machine, or for the TPU that `described` tells of."""
    environ = {**environment.describe(), **(described or {})}
    return Results(name, output.folder, environ, again=output.again, budget_seconds=output.budget_seconds)


def finish(results: Results, output: Output, summary: dict[str, Any]) -> None:
    """Writes the summary; with `device_report`, prints where the figures come from."""
    if output.device_report:
        print(device_report(results.lines, results.environment["device"]))
    results.write(summary)
