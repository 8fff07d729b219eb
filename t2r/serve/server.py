"""Runs the HTTP server until a signal ends it."""

import asyncio
import contextlib
import errno
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from t2r.console import say
from t2r.errors import InputError
from t2r.extras import require
from t2r.serve.served import Limits, ServedModel
from t2r.store import model_dir


def serve(
    model: str,
    transformer: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits = Limits(),
    template: str | None = None,
    dtype: str = "float32",
    weights: str = "float32",
    kernels: str = "auto",
    body_kib: int = 1024,
    grace: float = 10.0,
) -> dict[str, Any]:
    """Serves a model, and beside it another, by default the transformer that it was made from; returns what was done.

    `transformer` is "none" for no other model.
    """
    uvicorn = require("uvicorn", "serve")
    require("starlette", "serve")
    from t2r.serve.app import Server

    listening = _listen(host, port)
    with contextlib.closing(listening):
        options = dict(template=template, dtype=dtype, weights=weights, kernels=kernels)
        models = [ServedModel(model, _names([model])[0], limits, **options)]
        other = source_of(models[0]) if transformer is None else transformer if transformer != "none" else None
        if other:
            models[0].name, name = _names([model, other])
            models.append(ServedModel(other, name, limits, **options))
        server = Server(models, body_bytes=body_kib * 1024)
        _allow_connections()
        config = uvicorn.Config(
            server.app, log_level="error", access_log=False, backlog=4096, timeout_graceful_shutdown=round(grace) + 5
        )

        class Process(uvicorn.Server):
            """Tells the schedulers of a signal before connections are waited for."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                loop = asyncio.get_running_loop()
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, self._stop)
                yield

            def _stop(self) -> None:
                say("shutting down")
                server.close(0 if self.should_exit else grace)
                self.should_exit = True

            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                say(f"{', '.join(server.models)} on http://{_address(listening)} (Ctrl-C ends the server)")

        asyncio.run(Process(config).serve([listening]))
    counters = {name: asdict(served.scheduler.counters) for name, served in server.models.items()}
    total = lambda field: sum(counter[field] for counter in counters.values())  # noqa: E731
    return {"requests": total("requests"), "tokens": total("tokens"), "failures": total("failures"), "models": counters}


def source_of(served: ServedModel) -> str | None:
    """The transformer that a model was converted from, by its provenance, if it is still there."""
    history = served.provenance["history"]
    converted = any(entry.get("action") == "swap" or _converts(entry) for entry in history)
    for entry in reversed(history) if converted else ():
        source = entry.get("source") or (entry.get("config") or {}).get("init_from") or ""
        if source and source != served.path and _is_transformer(str(source)):
            return str(source)
    return None


def _converts(entry: dict[str, Any]) -> bool:
    return bool(((entry.get("config") or {}).get("convert") or {}).get("feature_map"))


def _is_transformer(name: str) -> bool:
    try:
        config = model_dir.load_config(model_dir.resolve(name))
    except InputError:
        return False
    return not config.encoder_layers and all(spec.kind == "softmax" for spec in config.attention)


def _names(paths: list[str]) -> list[str]:
    """What requests call the models: the last part of each path, or all of it if these are the same."""
    short = [path if path.startswith("builtin:") else Path(path).resolve().name for path in paths]
    names = short if len(set(short)) == len(short) else paths
    if len(set(names)) < len(names):
        raise InputError(f"--model and --transformer are both {names[0]}: give two models, or one")
    return names


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        return listening
    except socket.gaierror:
        raise InputError(f"--host={host} is no address of this machine: use 127.0.0.1 or 0.0.0.0") from None
    except OSError as error:
        free = "choose another --port, or 0 for any" if error.errno == errno.EADDRINUSE else "choose another --host"
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; {free}") from None


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _allow_connections() -> None:
    """As many open connections as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
