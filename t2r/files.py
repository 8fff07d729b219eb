"""Directories that are written atomically: complete or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from t2r.errors import InputError


@contextlib.contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary directory to write into, and renames it to `path` at the end.

    With `replace`, an existing directory is replaced. If the body raises, the temporary directory is removed.
    """
    unfinished, old = (path.with_name(f"{path.name}.{os.getpid()}.{suffix}") for suffix in ("unfinished", "old"))
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process with the same id
    try:
        unfinished.mkdir(parents=True)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    try:
        yield unfinished
        if replace and path.exists():
            path.rename(old)
        unfinished.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
