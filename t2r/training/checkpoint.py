"""Checkpoints of a run: training state, data iterator, random state. The only file that knows orbax."""

import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from t2r import processes
from t2r.console import say
from t2r.errors import raise_all
from t2r.model.parameters import Arrays
from t2r.training.step import TrainState


class Checkpoints:
    """The last few checkpoints of a run. One is written under another name and renamed when it is whole."""

    def __init__(self, folder: Path, keep: int):
        # On a CPU a background copy would share memory with arrays that the next step donates.
        in_background = jax.default_backend() != "cpu"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=in_background)
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "data"))

    @property
    def latest(self) -> int | None:
        """The newest step there is."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def drop_unfinished(self) -> None:
        """Removes what is left of a checkpoint that could not be written."""
        for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Writes a checkpoint, unless this step has one."""
        if step != self.latest:
            args = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), data=ocp.args.JsonSave(data))
            self._manager.save(step, args=args, force=True)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint that can be read, laid out on the devices as `like` is.

        Newer ones that cannot are put aside, so that the run can write them anew. If none can, nothing is touched.
        """
        args = ocp.args.Composite(state=_restored_like(like), data=ocp.args.JsonRestore())
        damaged = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored, reason = self._manager.restore(step, args=args), ""
            except Exception as error:  # orbax raises many kinds
                reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            if not processes.all_agree(not reason):
                damaged[step] = reason or "another process cannot read its part"
                continue
            processes.on_first_process(lambda: self._put_aside(damaged))
            self._manager.reload()
            return TrainState(**restored.state), restored.data
        raise_all(
            f"no checkpoint in {self.folder} can be read (to start over, move the folder away):",
            [f"step {step}: {reason}" for step, reason in damaged.items()],
        )

    def _put_aside(self, damaged: dict[int, str]) -> None:
        for step, reason in damaged.items():
            aside = self.folder.with_name(f"{self.folder.name}.damaged") / f"{step}-{time.time_ns()}"
            aside.parent.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(aside)
            say(f"warning: the checkpoint of step {step} is damaged ({reason}); put aside as {aside}")

    def average(self, count: int, like: TrainState) -> tuple[Arrays, list[int]]:
        """The mean of the trained parameters of the last `count` checkpoints, and their steps."""
        steps = sorted(self._manager.all_steps())[-count:]
        args = ocp.args.Composite(state=_restored_like(like))
        total = None
        for step in steps:
            part = self._manager.restore(step, args=args).state["trained"]
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return jax.tree.map(lambda x: x / len(steps), total), steps

    def wait(self) -> None:
        """Until what is being written is there."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """The last thing to do, once all is written."""
        self.wait()
        self._manager.close()


def _restored_like(state: TrainState) -> ocp.args.StandardRestore:
    return ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict()))
