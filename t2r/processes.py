"""Several processes that work on one run, on one machine or many, through jax.distributed.

Each has its own devices and the same arguments; together they have one mesh. All compute, one prints and writes.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from t2r import console
from t2r.errors import InputError, Stopped

LOST = 75  # the status of a process that ended because another did: schedulers know it as "try again"


def join(coordinator: str, processes: int, process: int) -> None:
    """Meets the others at HOST:PORT, which is the first one's; `auto` finds them as TPU slices and schedulers tell."""
    if not coordinator:
        if processes or process >= 0:
            raise InputError("--processes and --process need --coordinator=HOST:PORT, where the first process waits")
        return
    options: dict = {}
    if coordinator != "auto":
        if processes < 1 or not 0 <= process < processes:
            raise InputError(
                f"--coordinator={coordinator} needs --processes=COUNT and --process=NUMBER, from 0 to COUNT - 1; they "
                f"are {processes} and {process}. --coordinator=auto finds them on TPU slices, SLURM and GKE"
            )
        options = dict(coordinator_address=coordinator, num_processes=processes, process_id=process)
    try:
        jax.distributed.initialize(**options, heartbeat_timeout_seconds=60)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--coordinator={coordinator}: the processes did not find each other ({reason})") from None
    if not is_first():
        console.silence()


def is_distributed() -> bool:
    """Whether there are other processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def on_first_process(action: Callable[[], object]) -> None:
    """The first process does it; the others wait until it is done."""
    if is_first():
        action()
    barrier("first_does")


def barrier(name: str) -> None:
    """Until all have come here."""
    if is_distributed():
        multihost_utils.sync_global_devices(name)


def all_agree(value: bool) -> bool:
    """Whether it is true in all of them."""
    return value if not is_distributed() else bool(np.all(multihost_utils.process_allgather(np.array(value))))


def stop_requested(step: int) -> bool:
    """Whether one of them has got SIGTERM, in which case all stop after the same step. To be asked at every step."""
    return multihost_utils.reached_preemption_sync_point(step)


def gather(array: jax.Array) -> np.ndarray:
    """The whole of an array that may be divided among processes."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


@contextlib.contextmanager
def exit_together() -> Iterator[None]:
    """Within it, a process that fails ends at once, so that the others notice, and one that notices says so.

    Left to itself, it would wait at its end for processes that wait for it.
    """
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not is_distributed():
            raise
        name = f"process {jax.process_index()} of {jax.process_count()}"
        if isinstance(error, InputError):
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        if not _is_lost_connection(error):
            traceback.print_exc()
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        print(
            f"{name} has lost another one, and ends ({reason}). What was saved is intact: start the same command in "
            "all processes again, and it goes on from there",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)


def _is_lost_connection(error: BaseException) -> bool:
    words = ("Gloo", "NCCL", "Connection", "connection", "UNAVAILABLE", "coordination", "heartbeat", "DEADLINE")
    return isinstance(error, (RuntimeError, ValueError)) and any(word in str(error) for word in words)
