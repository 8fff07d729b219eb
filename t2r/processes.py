"""Distributed runs: several processes, on one machine or many, through jax.distributed.

Every process has its own devices and gets the same arguments; together they form one mesh. All compute; only the first
prints and writes files.
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

# The exit status of a process that ends because another one did: EX_TEMPFAIL, which schedulers take as "try again".
EXIT_LOST_PEER = 75


def join(coordinator: str, processes: int, process: int) -> None:
    """Connects to the other processes through `coordinator`, the HOST:PORT of the first one.

    `auto` takes the address and the process numbers from the TPU slice or the scheduler. An empty string: one process.
    """
    if not coordinator:
        if processes or process >= 0:
            raise InputError("--processes and --process need --coordinator=HOST:PORT, the address of the first process")
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
    """Whether the run has more than one process."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def on_first_process(action: Callable[[], object]) -> None:
    """Runs the action in the first process; the others wait until it is done."""
    if is_first():
        action()
    barrier("first_does")


def barrier(name: str) -> None:
    """Waits until all processes have reached this call."""
    if is_distributed():
        multihost_utils.sync_global_devices(name)


def all_agree(value: bool) -> bool:
    """Whether the value is true in every process."""
    return value if not is_distributed() else bool(np.all(multihost_utils.process_allgather(np.array(value))))


def stop_requested(step: int) -> bool:
    """Whether any process has received SIGTERM; all get True at the same step. Must be called at every step."""
    return multihost_utils.reached_preemption_sync_point(step)


def gather(array: jax.Array) -> np.ndarray:
    """The whole array, also when it is sharded over processes."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


@contextlib.contextmanager
def exit_together() -> Iterator[None]:
    """In its body, a process that fails exits at once, so that the others notice and exit too, with a message.

    A normal exit would hang: jax.distributed waits at exit for the other processes, which wait for this one.
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
            f"{name} has lost another one and exits ({reason}). Saved checkpoints are intact: start the same command "
            "in all processes again to resume",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_LOST_PEER)


def _is_lost_connection(error: BaseException) -> bool:
    signs = ("Gloo", "NCCL", "Connection", "connection", "UNAVAILABLE", "coordination", "heartbeat", "DEADLINE")
    return isinstance(error, (RuntimeError, ValueError)) and any(sign in str(error) for sign in signs)
