"""Steps whose results are kept in a file, so that a step that is finished is not done again."""

import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from t2r.console import say
from t2r.errors import InputError, raise_all
from t2r.files import read_json, write_json


class Steps:
    """The finished steps of one piece of work, `request`, which is all that their results depend on."""

    def __init__(self, path: Path, request: dict[str, Any], total: int):
        self._path, self._total, self._number = path, total, 0
        request = as_json(request)
        if not os.path.lexists(path):
            self._content = {"request": request, "steps": {}}
            self._write()
            return
        advice = "move it away: all steps are then done again"
        self._content = read_json(path, advice)
        if self._content.pop("checksum", None) != _checksum(self._content):
            raise InputError(f"{path} is damaged, or of another version: {advice}")
        before = self._content["request"]
        if not self._content["steps"]:  # nothing is finished that another request could spoil
            self._content["request"] = before = request
        problems = [
            f"{name} was {before.get(name)}, is {request.get(name)}"
            for name in sorted({*before, *request})
            if before.get(name) != request.get(name)
        ]
        raise_all(f"{path.parent} holds another conversion (choose another --workdir, or remove it):", problems)

    def run(
        self, name: str, title: str, work: Callable[[], dict[str, Any]], asked: Any = None, *, again: bool = False
    ) -> dict[str, Any]:
        """What `work` returns, or returned before; it is done anew if `asked`, its own settings, have changed."""
        self._number += 1
        finished, asked = self._content["steps"].get(name), as_json(asked)
        kept = finished is not None and finished["asked"] == asked and not again
        say(f"{self._number}/{self._total}  {title}{' (finished before)' if kept else ''}")
        if not kept:
            began = time.monotonic()
            result = as_json(work())
            finished = {"asked": asked, "seconds": round(time.monotonic() - began, 1), "result": result}
            self._content["steps"][name] = finished
            self._write()
        return finished["result"]

    def _write(self) -> None:
        write_json(self._path, {**self._content, "checksum": _checksum(self._content)})

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by step; of a step that was interrupted, only since it was last started."""
        return {name: step["seconds"] for name, step in self._content["steps"].items()}


def _checksum(content: dict[str, Any]) -> int:
    """Of all that the file has, in the order in which it has it."""
    return zlib.crc32(json.dumps(content).encode())


def as_json(value: Any) -> Any:
    """A value as it is after it was written as JSON and read again."""
    return json.loads(json.dumps(value))
