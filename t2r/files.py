"""Folders that are there whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from t2r.errors import InputError


@contextlib.contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written, in place of an older one if `replace`."""
    unfinished, old = (path.with_name(f"{path.name}.{os.getpid()}.{what}") for what in ("unfinished", "old"))
    shutil.rmtree(unfinished, ignore_errors=True)  # a process that was killed may have had this number
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
