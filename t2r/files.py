"""Files and directories: read with one clear error, written completely or not at all, or used by one process alone."""

import contextlib
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t2r.errors import InputError


def read_file(path: Path, purpose: str) -> str:
    """The text of a UTF-8 file; `purpose` says in the error what should have been given."""
    try:
        return path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not exist: {purpose}") from None
    except OSError as error:  # a folder, a loop of links, no permission
        raise InputError(f"cannot read {path}: {error.strerror}; {purpose}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: byte {error.start} is not UTF-8 text; {purpose}") from None


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(read_file(path, purpose))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}): {purpose}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} has a {type(content).__name__} where a JSON object is needed: {purpose}")
    return content


def recover(path: Path) -> None:
    """Repairs what killed processes left: restores a directory that was being replaced, removes unfinished ones."""
    for left in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
        process, _, suffix = left.name.removeprefix(f"{path.name}.").partition(".")
        if suffix not in ("unfinished", "old") or not process.isdigit():
            continue
        if int(process) != os.getpid() and _is_running(int(process)):
            continue
        if suffix == "old" and not path.exists():
            left.rename(path)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary directory to write into, and renames it to `path` at the end.

    With `replace`, an existing directory is replaced. If the body raises, the temporary directory is removed.
    """
    recover(path)
    unfinished, old = (path.with_name(f"{path.name}.{os.getpid()}.{suffix}") for suffix in ("unfinished", "old"))
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


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Within it, no other process may enter with the same folder, which is created if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another run is using {folder}: wait for it to end, or choose another workdir") from None
        except OSError:
            pass  # a file system without locks
        yield
