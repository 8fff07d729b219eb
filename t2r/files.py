"""Files and directories: read with one clear error, written completely or not at all, or used by one process alone."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from t2r.errors import InputError


def read_file(path: Path, purpose: str) -> str:
    """The text of a UTF-8 file; `purpose` says in the error what should have been given."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: {purpose}") from None
    except NotADirectoryError:
        raise InputError(f"{path} does not exist, because {path.parent} is a file, not a folder: {purpose}") from None
    except OSError as error:  # a folder, a loop of links, no permission
        raise InputError(f"cannot read {path}: {error.strerror}; {purpose}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: byte {error.start} is not UTF-8 text; {purpose}") from None


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """The object in a JSON file."""
    text = read_file(path, purpose)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise InputError(f"{path} is not JSON ({error}): {purpose}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} has a {type(content).__name__} where a JSON object is needed: {purpose}")
    return content


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file."""
    try:
        with np.load(path) as stored:
            return dict(stored)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or 'it is damaged'}; give a .npz file") from None
    except Exception:  # numpy raises many kinds, with advice to run the code that a file may contain
        raise InputError(f"{path} holds no arrays, or is damaged: write it with numpy.savez") from None


def check_free(path: Path) -> None:
    """Refuses an output directory that exists or cannot be created, before anything is computed for it."""
    if path == Path():
        raise InputError("the output is the current folder, or empty: name a new folder")
    if os.path.lexists(path):
        raise InputError(f"{path} exists already: choose another output or remove it")
    _check_folder(path, _ancestor(path))


def output_folder(name: str) -> Path:
    """An output directory, which may exist. One that cannot be written is refused before anything is computed."""
    if not name:
        raise InputError("the name of the output is empty: give a directory, such as --output=runs/output")
    path = Path(name)
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            raise InputError(f"cannot write {path}: no permission, or its disk is read-only")
        if (path / "provenance.json").exists():
            raise InputError(f"{path} holds a model, among whose files others would be written: choose another folder")
        return path
    if os.path.lexists(path):
        raise InputError(f"cannot write {path}: it is a file, not a folder; choose another output")
    _check_folder(path, _ancestor(path))
    return path


def _ancestor(path: Path) -> Path:
    """The nearest folder above a path, or what stands in its place."""
    return next(folder for folder in path.absolute().parents if os.path.lexists(folder))


def check_output_file(path: Path) -> None:
    """Refuses an output file that cannot be written, before anything is computed for it."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file")
    _check_folder(path, path.absolute().parent)


def digest_of(path: Path) -> str:
    """Tells the content of a file from others."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def is_same_file(path: str | Path, other: str | Path) -> bool:
    """Whether two names are of one file, through links, too; it need not exist."""
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return os.path.realpath(path) == os.path.realpath(other)


def _check_folder(path: Path, folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: {folder} is not a folder that exists")
    if not os.access(folder, os.W_OK) and not path.exists():
        raise InputError(f"cannot write {path}: no permission to write in {folder}, or its disk is read-only")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, an error of the file system, such as a full disk, is an InputError that names `path`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno is None:  # not of the file system
            raise
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def make_folder(path: Path) -> None:
    """Creates a folder and those above it, unless they exist."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `path` at the end.

    A link is followed, so that it stays one. Devices and pipes, such as /dev/stdout, are written to directly.
    """
    target = Path(os.path.realpath(path))
    with writing(path):
        if target.exists() and not target.is_file():
            yield target
            return
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
        try:
            yield unfinished
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)


def check_replaceable_json(path: Path, keys: set[str], writer: str, advice: str) -> None:
    """Refuses a JSON file that something else wrote, as it lacks `keys`, which `writer` always writes."""
    if os.path.lexists(path) and not read_json(path, advice).keys() >= keys:
        raise InputError(f"{path} was not written by {writer}, and would be replaced: {advice}")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file atomically; its folder is created if it does not exist."""
    make_folder(path.parent)
    with atomic_file(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n")


def recover(path: Path) -> None:
    """Repairs what killed processes left: restores a directory that was being replaced, removes unfinished ones."""
    for left in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
        process, _, suffix = left.name.removeprefix(f"{path.name}.").partition(".")
        if suffix not in ("unfinished", "old") or not process.isdigit():
            continue
        if int(process) != os.getpid() and _is_running(int(process)):
            continue
        if suffix == "old" and not os.path.lexists(path):
            left.rename(path)
        else:
            _remove(left)


def _remove(path: Path) -> None:
    """Removes a directory, or a link or a file that stood where a directory should be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
    with writing(path):
        recover(path)
        unfinished, old = (path.with_name(f"{path.name}.{os.getpid()}.{suffix}") for suffix in ("unfinished", "old"))
        try:
            unfinished.mkdir(parents=True)
            yield unfinished
            if replace and os.path.lexists(path):
                path.rename(old)
            unfinished.rename(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        _remove(old)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Within it, other processes that enter with the same folder wait. It is created if it does not exist."""
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Within it, no other process may enter with the same folder, which is created if it does not exist."""
    if folder.is_file():
        raise InputError(f"cannot write {folder}: it is a file, not a folder; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another run is using {folder}: wait for it to end, or choose another folder") from None
        except OSError:
            pass  # a file system without locks
        yield
