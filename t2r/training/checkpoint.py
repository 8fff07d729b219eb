"""Checkpoints of a run: training state, random key and position of the data iterator. All use of orbax is here."""

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
    """The newest `keep` checkpoints of a run. Orbax writes each under a temporary name and renames it when complete."""

    def __init__(self, folder: Path, keep: int):
        # On CPU an asynchronous save would read memory that the next step donates and overwrites.
        asynchronous = jax.default_backend() != "cpu"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=asynchronous)
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "data"))

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def drop_unfinished(self) -> None:
        """Deletes partly written checkpoints."""
        for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Writes a checkpoint of this step, unless it is the newest one already."""
        if step != self.latest:
            args = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), data=ocp.args.JsonSave(data))
            self._manager.save(step, args=args, force=True)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Loads the newest readable checkpoint: the state, sharded like `like`, and the data iterator's state.

        Newer, unreadable checkpoints are moved to `checkpoints.damaged`, so that the run can write those steps again.
        If no checkpoint is readable, nothing is moved and an InputError is raised.
        """
        args = ocp.args.Composite(state=_restored_like(like), data=ocp.args.JsonRestore())
        damaged = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored, reason = self._manager.restore(step, args=args), ""
            except Exception as error:  # orbax raises many kinds
                reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            if not processes.all_agree(not reason):
                damaged[step] = reason or "another process cannot read its shard"
                continue
            processes.on_first_process(lambda: self._move_damaged(damaged))
            self._manager.reload()
            return TrainState(**restored.state), restored.data
        raise_all(
            f"no checkpoint in {self.folder} can be read (to start the run again from step 0, move this folder away):",
            [f"step {step}: {reason}" for step, reason in damaged.items()],
        )

    def _move_damaged(self, damaged: dict[int, str]) -> None:
        for step, reason in damaged.items():
            target = self.folder.with_name(f"{self.folder.name}.damaged") / f"{step}-{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(target)
            say(f"warning: the checkpoint of step {step} is damaged ({reason}); moved to {target}")

    def average(self, count: int, like: TrainState) -> tuple[Arrays, list[int]]:
        """The mean of the trained parameters over the last `count` checkpoints, and the steps of those checkpoints."""
        steps = sorted(self._manager.all_steps())[-count:]
        args = ocp.args.Composite(state=_restored_like(like))
        total = None
        for step in steps:
            part = self._manager.restore(step, args=args).state["trained"]
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return jax.tree.map(lambda x: x / len(steps), total), steps

    def wait(self) -> None:
        """Blocks until asynchronous saves have finished."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for pending saves and releases orbax's resources."""
        self.wait()
        self._manager.close()


def _restored_like(state: TrainState) -> ocp.args.StandardRestore:
    return ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict()))
