"""Load for a server: many streams at once, each compared with the same request alone."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from t2r.console import Progress, say, table
from t2r.environment import process_bytes
from t2r.errors import InputError

CONNECTING = 128  # connections that are opened at a time: a server's kernel refuses thousands at once
SUBJECTS = (
    "Return a new",
    "The list of",
    "This function",
    "Raise an error if",
    "A string that",
    "Each of the",
    "import",
)
WORDS = [
    "object",
    "value",
    "name",
    "file",
    "the",
    "of",
    "module",
    "when",
    "given",
    "class",
    "method",
    "argument",
    "default",
    "type",
]


@dataclass
class Result:
    """One streamed answer."""

    text: str
    tokens: int
    first: float  # seconds to the first text
    gaps: list[float]  # seconds between its parts: one token each, or several if the machine is overloaded
    seconds: float
    finish: str


class Failed(Exception):
    """An answer that is not one."""


def prompt(number: int, words: int) -> str:
    """The prompt of a request: all numbers up to some thousands have different ones."""
    chosen, rest = [], number // len(SUBJECTS)
    while rest or len(chosen) < words:
        rest, word = divmod(rest, len(WORDS))
        chosen.append(WORDS[(word + len(chosen) * 5) % len(WORDS)])
    return f"{SUBJECTS[number % len(SUBJECTS)]} {' '.join(chosen)}"


class Connection:
    """A connection that is kept for one request after the other."""

    def __init__(self, host: str, port: int):
        self._host, self._port, self._writer = host, port, None

    async def open(self) -> None:
        """Connects, unless it is connected."""
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def stream(self, body: dict[str, Any]) -> Result:
        """Asks for a completion in parts, and waits for its end."""
        began, times, texts, finish, tokens = time.monotonic(), [], [], "", 0
        async for part in self._events(body):
            if "error" in part:
                raise Failed(part["error"]["message"])
            for choice in part["choices"]:
                times.append(time.monotonic())
                texts.append(choice["text"])
                finish = choice["finish_reason"] or finish
            tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
        if not finish:
            raise Failed("the stream ended before the answer")
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Result("".join(texts), tokens, times[0] - began, gaps, time.monotonic() - began, finish)

    async def _events(self, body: dict[str, Any]):
        content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        await self.open()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(content)}\r\n\r\n"
        self._writer.write(head.encode() + content)
        status = int((await self._reader.readuntil(b"\r\n")).split()[1])
        headers = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        if status != 200:
            length = re.search(r"content-length: (\d+)", headers)
            text = (await self._reader.readexactly(int(length[1]))).decode() if length else ""
            raise Failed(f"{status}: {text[:200]}")
        rest = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            rest += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            *whole, rest = rest.split(b"\n\n")
            for event in whole:
                if event != b"data: [DONE]":
                    yield json.loads(event.removeprefix(b"data: "))
        await self._reader.readexactly(2)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def run_streams(
    address: tuple[str, int], bodies: list[dict[str, Any]], streams: int, ramp_up: float = 0
) -> list[Result | str]:
    """The answers to all requests, `streams` at a time; a string says why there is none.

    All streams connect, a few at a time, before the first request; they begin evenly within `ramp_up` seconds.
    """
    results: list[Result | str] = [""] * len(bodies)
    numbers = iter(range(len(bodies)))
    streams = min(streams, len(bodies))
    connecting, connected = asyncio.Semaphore(CONNECTING), asyncio.Barrier(streams)
    with Progress(f"{streams} streams", len(bodies)) as progress:

        async def one_after_the_other(place: int) -> None:
            connection = Connection(*address)
            async with connecting:
                with contextlib.suppress(OSError):  # its first request says so
                    await connection.open()
            await connected.wait()
            await asyncio.sleep(ramp_up * place / streams)
            for number in numbers:
                try:
                    results[number] = await connection.stream(bodies[number])
                except (Failed, OSError, asyncio.IncompleteReadError, ValueError) as error:
                    results[number] = f"{type(error).__name__}: {error}"
                    connection.close()
                    connection = Connection(*address)
                progress.advance()
            connection.close()

        await asyncio.gather(*map(one_after_the_other, range(streams)))
    return results


def measure(
    url: str,
    model: str,
    *,
    streams: int,
    requests: int,
    length: int,
    words: int,
    check: bool,
    ramp_up: float = 0,
    process: int | None = None,
) -> dict[str, Any]:
    """Speed and latency of one model under load, and how many answers differ from the same request alone."""
    parts = urlsplit(url)
    address = parts.hostname, parts.port
    body = lambda i: {"model": model, "prompt": prompt(i, words), "max_tokens": length, "temperature": 0}  # noqa: E731
    bodies = [body(number % streams) for number in range(requests)]
    alone = asyncio.run(run_streams(address, bodies[:streams], 1)) if check else None
    asyncio.run(run_streams(address, bodies[:streams], streams))  # compiles, and leaves arrays of the size needed
    before = resident(process)
    began = time.monotonic()
    results = asyncio.run(run_streams(address, bodies, streams, ramp_up))
    seconds = time.monotonic() - began
    done = [result for result in results if isinstance(result, Result)]
    lost = [result for result in results if isinstance(result, str)]
    for reason in dict.fromkeys(lost):
        say(f"lost: {reason}")
    different = None
    if alone is not None:
        texts = [result.text if isinstance(result, Result) else None for result in alone]
        different = sum(isinstance(r, Result) and r.text != texts[i % streams] for i, r in enumerate(results))
    tokens, gaps = sum(result.tokens for result in done), [gap for result in done for gap in result.gaps]
    return {
        "model": model,
        "streams": streams,
        "requests": requests,
        "lost": len(lost),
        "different": different,
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_50": percentile([r.first for r in done], 50),
        "first_token_99": percentile([r.first for r in done], 99),
        "between_tokens_50": percentile(gaps, 50),
        "between_tokens_99": percentile(gaps, 99),
        "latency_50": percentile([r.seconds for r in done], 50),
        "latency_99": percentile([r.seconds for r in done], 99),
        "server_mib_before": before,
        "server_mib_after": resident(process),
    }


def percentile(values: list[float], share: int) -> float | None:
    """The value below which so many of a hundred are."""
    if not values:
        return None
    return round(
        statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0], 4
    )


def resident(process: int | None) -> float | None:
    """MiB of memory that a process has, on Linux."""
    size = None if process is None else process_bytes(process)
    return None if size is None else round(size / 2**20, 1)


@contextmanager
def started(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """(URL, process) of a server that runs for the body."""
    command = [sys.executable, "-m", "t2r", "serve", "--port=0", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        for line in process.stderr:
            if found := re.search(r"on (http://\S+)", line):
                yield found[1], process.pid
                return
            if line.startswith("error: "):
                raise InputError(line.removeprefix("error: ").strip())
        raise InputError("the server has ended before it listened: try `t2r serve` with the same model")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def models_of(url: str) -> list[str]:
    """The names of the models that a server has."""
    from urllib.request import urlopen

    try:
        with urlopen(f"{url}/v1/models", timeout=30) as response:
            return [model["id"] for model in json.load(response)["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--url={url}: no server with /v1/models answers there ({error})") from None


def show(rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    timed = {"first_token": "first token", "between_tokens": "between tokens", "latency": "answer"}
    shares = [header for title in timed.values() for header in (f"{title} 50%", "99%")]
    headers = ["model", "tokens/s", *shares, "lost", "different"]
    names = ["tokens_per_second", *(f"{name}_{share}" for name in timed for share in (50, 99)), "lost", "different"]
    shown = lambda value: "" if value is None else value  # noqa: E731
    print(table(headers, [[row["model"], *(shown(row[name]) for name in names)] for row in rows]))


def allow_connections(streams: int) -> None:
    """Raises the limit on open files, which the server inherits; refuses more streams than the machine allows."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + 64
    if most != resource.RLIM_INFINITY and needed > most:
        raise InputError(
            f"--streams={streams} needs {needed} open files, and this process may have {most}: use fewer streams, or "
            f"raise the limit, as an administrator: ulimit -Hn {needed}"
        )
    if now != resource.RLIM_INFINITY and now < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if most == resource.RLIM_INFINITY else most, most))
