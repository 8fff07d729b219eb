"""What a run reports: `metrics.jsonl`, a line per logged step, and the same as TensorBoard scalars."""

import json
import os
import sys
from pathlib import Path

from t2r import processes

# tensorboardX loads torch where it finds it, for two seconds, and here for nothing.
_hidden = "torch" not in sys.modules
if _hidden:
    sys.modules["torch"] = None
from tensorboardX import SummaryWriter  # noqa: E402

if _hidden:
    del sys.modules["torch"]


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
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1, write_to_disk=True)

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


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
