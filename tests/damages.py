"""Ways to damage a file, and a picture of a folder that shows whether a command has changed anything in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def every(kinds: tuple[type, ...], value: Any) -> Callable[[Path], None]:
    """Replaces every value of these types in a JSON file by `value`; other files are overwritten with it."""

    def replaced(content: Any) -> Any:
        if isinstance(content, dict):
            return {name: item if name in ("format", "family") else replaced(item) for name, item in content.items()}
        if isinstance(content, list):
            return [replaced(item) for item in content]
        return value if type(content) in kinds else content

    def damage(path: Path) -> None:
        is_json = path.suffix in (".json", ".jsonl")
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()] if is_json else ["0"]
        path.write_text("\n".join(json.dumps(replaced(json.loads(line))) for line in lines) + "\n")

    return damage


def newer(path: Path) -> None:
    """Gives a JSON file the format of a later version; other files begin with bytes that they never began with."""
    if path.suffix != ".json":
        return path.write_bytes(b"version 9\n" + path.read_bytes())
    return path.write_text(json.dumps({**json.loads(path.read_text()), "format": "t2r/9", "new": 1}))


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "a list": lambda path: path.write_text('["config"]\n'),
    "random bytes": lambda path: path.write_bytes(np.random.default_rng(0).bytes(200)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "strings for numbers": every((int, float), "7"),
    "numbers for strings": every((str,), 7),
    "lists for everything": every((int, float, str, bool, type(None)), []),
    "not a number": every((int, float), float("nan")),
    "huge": every((int, float), 10**30),
    "negative": every((int, float), -1),
    "newer": newer,
}


def snapshot(folder: Path) -> dict[str, Any]:
    """What each path below a folder is: bytes, the target of a link, or None for a folder."""

    def content(path: Path) -> Any:
        return path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.name != ".lock"}
