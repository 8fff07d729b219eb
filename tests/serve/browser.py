"""A real browser that tests control: Chromium, by the protocol of its developer tools."""

import base64
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest


class Page:
    """An open page, and what went wrong in it."""

    def __init__(self, read: int, write: int):
        self._read, self._write, self._rest, self._number, self.errors = read, write, b"", 0, []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    _session = None

    def _call(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._read, 2**20)
                assert part, "the browser has ended"
                self._rest += part
            text, _, self._rest = self._rest.partition(b"\0")
            reply = json.loads(text)
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(reply["params"])
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]

    def open(self, url: str, width: int, height: int = 1000, *, dark: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)

    def value(self, expression: str):
        """The value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 120) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, (expression, self.errors)
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextlib.contextmanager
def browser(folder: Path):
    """A page of a new browser."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    line = shlex.join([program, *options, "--remote-debugging-pipe"])
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line} 3<&{to_read} 4>&{from_write}"],
        pass_fds=(to_read, from_write),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(from_read, to_write)
    finally:
        os.close(to_write)  # Chromium ends when its pipe is closed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(from_read)
