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
EXIT_FAILED = 1  # of a process that ends by an error of its own

# Status codes of JAX's runtime: of a process that is gone, and of faults in this one.
_LOST_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
_OWN_CODES = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "OUT_OF_RANGE")
_LOST_SIGNS = ("Gloo ", "NCCL operation", "coordination service", "Connection closed by peer", "heartbeat")


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
    console.keep_output_for_results()  # Gloo, which connects processes, prints a line for each connection
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

    A normal exit would hang: jax.distributed waits at exit for the other processes, which wait for this one. The status
    tells whose fault it was: EXIT_LOST_PEER if the connection to another process was lost; otherwise this process's
    own, 2 for bad input and 1, with a traceback, for all else.
    """
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not is_distributed():
            raise
        status, message = _explain(error)
        if status == EXIT_FAILED:
            traceback.print_exc()
        name = f"process {jax.process_index()} of {jax.process_count()}"
        print(f"{name}{message}", file=sys.stderr, flush=True)
        os._exit(status)


def _explain(error: BaseException) -> tuple[int, str]:
    """(the exit status of a process that this error ends, the message that follows the process's name)."""
    if isinstance(error, InputError):
        return 2, f": error: {error}"
    reason = next(iter(str(error).splitlines()), "")[:300] or type(error).__name__
    intact = "Saved checkpoints are intact"
    if is_lost_connection(error):
        again = "start the same command in all processes again to resume"
        return EXIT_LOST_PEER, f" has lost another one and exits ({reason}). {intact}: {again}"
    return EXIT_FAILED, f" has failed ({type(error).__name__}: {reason}) and ends the run. {intact}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of JAX's runtime says that another process has gone or does not answer.

    The runtime's messages begin with a status code or name the library that moves the data. Errors of other types, and
    of this process's own device, may have the same words in their text.
    """
    if type(error) not in (RuntimeError, ValueError, jax.errors.JaxRuntimeError):
        return False
    message = str(error)
    code = message.partition(":")[0]
    if code in _LOST_CODES:
        return True
    return code not in _OWN_CODES and any(sign in message for sign in _LOST_SIGNS)
