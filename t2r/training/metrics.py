"""What a run reports: `metrics.jsonl`, a line per logged step, and the same as TensorBoard scalars."""

import json
import os
import sys
from pathlib import Path

from t2r import processes


class Metrics:
    """Appends to a run's metrics. A continued run first drops what was logged after its checkpoint.

    Of several processes, the first writes.
    """

    def __init__(self, workdir: Path, start: int):
        self._writes = processes.is_first()
        if not self._writes:
            return
        path = workdir / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] <= start]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(unfinished, path)
        self._file = path.open("a")
        board = _summary_writer()
        self._board = board(str(workdir / "tensorboard"), purge_step=start + 1, write_to_disk=True)

    def write(self, step: int, **values: float) -> None:
        """One line, on disk when this returns."""
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if not self._writes:
            return
        self._file.close()
        self._board.close()


def _summary_writer() -> type:
    """tensorboardX's, imported without torch, which it would load where it finds it: two seconds for nothing."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
