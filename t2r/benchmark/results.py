"""What a benchmark finds, line by line on disk: a run that was stopped goes on, and nothing is measured twice."""

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from t2r.benchmark.decode import is_out_of_memory
from t2r.console import say

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
