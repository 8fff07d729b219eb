"""Interruptions of training: SIGTERM, too little memory or disk, and noisy errors from library threads."""

import contextlib
import errno
import logging
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from t2r import processes
from t2r.environment import is_out_of_memory
from t2r.errors import InputError
from t2r.training.checkpoint import Checkpoints


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Catches SIGTERM. Yields a function of the step, to be called at every step: True once SIGTERM was received."""
    if processes.is_distributed():  # jax.distributed catches the signal and picks one step for all processes
        yield processes.stop_requested
        return
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python allows signal handlers in the main thread only
        yield lambda step: False
        return
    received = threading.Event()
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: received.set())
    try:
        yield lambda step: received.is_set()
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


@contextlib.contextmanager
def shortages_explained(workdir: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """Makes one InputError of any library's error for want of memory or disk; deletes a partly written checkpoint."""
    try:
        yield
    except Exception as error:
        if not _is_full_disk(error):
            if isinstance(error, InputError) or not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            advice = "lower config.data.batch (or batch_tokens) or config.data.length, or choose a smaller model"
            raise InputError(f"training does not fit in memory ({reason}): {advice}") from error
        checkpoints.drop_unfinished()
        steps = ", ".join(map(str, checkpoints.steps)) or "none yet"
        raise InputError(
            f"the disk of {workdir} is full ({shutil.disk_usage(workdir).free:,} bytes free): the run has stopped. "
            f"Intact: the checkpoints of steps {steps}. Free some space, or lower config.keep_checkpoints; then run "
            "the same command to resume from the last of them"
        ) from error


def _is_full_disk(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    message = str(error)
    return "No space left" in message or ("RESOURCE_EXHAUSTED" in message and "writ" in message)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silences orbax's log lines about each phase of a save, and all but one report of a failed save or restore."""
    levels = {"absl": logging.ERROR, "asyncio": logging.CRITICAL}
    previous_levels = {name: logging.getLogger(name).level for name in levels}
    previous_hook, previous_thread_hook = sys.excepthook, threading.excepthook
    previous_unraisable_hook = sys.unraisablehook

    def report_once(failure: threading.ExceptHookArgs) -> None:
        # Orbax raises an error of its threads again in the thread that waits for the result.
        if not _is_of_orbax(failure.exc_traceback):
            previous_thread_hook(failure)

    def report_unraisable(failure: "sys.UnraisableHookArgs") -> None:
        # Python ends the reads that orbax gave up on when it frees them, and orbax turns that into an error.
        if not _is_of_orbax(failure.exc_traceback):
            previous_unraisable_hook(failure)

    def report_results(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _is_late_result(error, trace):
            previous_hook(kind, error, trace)

    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    sys.excepthook, threading.excepthook = report_results, report_once
    sys.unraisablehook = report_unraisable
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook = previous_hook, previous_thread_hook
        sys.unraisablehook = previous_unraisable_hook
        for name, level in previous_levels.items():
            logging.getLogger(name).setLevel(level)


def _is_of_orbax(trace: TracebackType | None) -> bool:
    return any(frame.f_globals.get("__name__", "").startswith("orbax.") for frame, _ in traceback.walk_tb(trace))


def _is_late_result(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether an array of a checkpoint was read after orbax gave up on the checkpoint, because another is damaged.

    Each such array is delivered to an event loop that is closed by then, and tensorstore reports that by itself.
    """
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(trace)]
    return (
        isinstance(error, RuntimeError) and "loop is closed" in str(error) and functions[:1] == ["call_soon_threadsafe"]
    )
