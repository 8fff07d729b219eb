"""The metrics of a run: `metrics.jsonl`, one line per logged step, and the same values as TensorBoard scalars."""

import json
import os
import sys
from pathlib import Path

from t2r import processes
from t2r.errors import InputError
from t2r.files import atomic_file, read_file


class Metrics:
    """Appends to a run's metrics. Lines after step `start`, the checkpoint that a run resumes from, are deleted first.

    With several processes, only the first one writes.
    """

    def __init__(self, workdir: Path, start: int):
        self._writes = processes.is_first()
        if not self._writes:
            return
        path = workdir / "metrics.jsonl"
        lines = [line for line in read_metrics(path) if line["step"] <= start]
        with atomic_file(path) as unfinished:
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._file = path.open("a")
        self._board = _summary_writer()(str(workdir / "tensorboard"), purge_step=start + 1, write_to_disk=True)

    def write(self, step: int, **values: float) -> None:
        """Writes one line and flushes it to disk."""
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes both files."""
        if not self._writes:
            return
        self._file.close()
        self._board.close()


def _summary_writer() -> type:
    """tensorboardX's SummaryWriter, imported with torch hidden: tensorboardX would import torch, which takes 2 s."""
    hide_torch = "torch" not in sys.modules
    if hide_torch:
        sys.modules["torch"] = None
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide_torch:
            del sys.modules["torch"]
    return SummaryWriter


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The complete lines of a metrics file; a last line that a crash cut off is skipped."""
    if not os.path.lexists(path):
        return []
    fix = "move it away: the run then logs into a new one"
    text, lines = read_file(path, fix), []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("step"), int):
            raise InputError(f"line {number} of {path} is damaged: {fix}")
        lines.append(values)
    return lines
