"""What may interrupt a run, and what becomes of it: SIGTERM, a full disk, threads of libraries that fail."""

import contextlib
import errno
import logging
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from t2r import processes
from t2r.errors import InputError
from t2r.training.checkpoint import Checkpoints


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Within it SIGTERM does not end the process; the function, called at every step, says whether one has come."""
    if processes.is_distributed():  # jax.distributed catches it, and lets all stop after the same step
        yield processes.stop_requested
        return
    if threading.current_thread() is not threading.main_thread():  # only there can signals be caught
        yield lambda step: False
        return
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield lambda step: came.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def full_disk_explained(workdir: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """Turns what libraries raise when the disk is full into one error; removes the unfinished checkpoint."""
    try:
        yield
    except Exception as error:
        if not _is_full_disk(error):
            raise
        checkpoints.drop_unfinished()
        steps = ", ".join(map(str, checkpoints.steps)) or "none yet"
        raise InputError(
            f"the disk of {workdir} is full ({shutil.disk_usage(workdir).free:,} bytes free): the run has stopped. "
            f"Intact: the checkpoints of steps {steps}. Free some space, or lower config.keep_checkpoints; the same "
            "command goes on from the last"
        ) from error


def _is_full_disk(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    message = str(error)
    return "No space left" in message or ("RESOURCE_EXHAUSTED" in message and "writ" in message)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps orbax from reporting each phase of each save, and a failed save once an array. Undone at the end."""
    levels = {"absl": logging.ERROR, "asyncio": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in levels}
    hook = threading.excepthook

    def report_once(failure: threading.ExceptHookArgs) -> None:
        # What fails in a thread of orbax is raised again where its result is awaited.
        modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(failure.exc_traceback))
        if not any(name.startswith("orbax.") for name in modules):
            hook(failure)

    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    threading.excepthook = report_once
    try:
        yield
    finally:
        threading.excepthook = hook
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
