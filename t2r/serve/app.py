"""The HTTP endpoints: OpenAI's, health, metrics and the race page."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from t2r.serve.problem import Problem
from t2r.serve.protocol import Asked, parse
from t2r.serve.served import ServedModel, collect, stream

PAGE = Path(__file__).parent / "race.html"
BODY_SECONDS = 30  # for a request's body to arrive
METRICS = {
    "requests": "Requests taken.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts whose state was there already.",
    "tokens": "Tokens generated.",
    "steps": "Decoding steps.",
    "failures": "Failures of the worker.",
}


class Server:
    """The endpoints over some models; the first is the one that a request without `model` means."""

    def __init__(self, models: list[ServedModel], *, body_bytes: int):
        self.models, self._body_bytes, self._closing = {model.name: model for model in models}, body_bytes, False
        self._statuses, self._seconds = Counter(), Counter()
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/race.json", self._race),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={HTTPException: self._http_error, Problem: self._problem, Exception: self._bug},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for model in self.models.values():
            model.start(asyncio.get_running_loop())
        yield
        self.close(0)
        for model in self.models.values():
            await asyncio.to_thread(model.close)

    def close(self, grace: float) -> None:
        """Refuses what waits, and gives what runs some seconds to end."""
        self._closing = True
        for model in self.models.values():
            model.scheduler.close(grace)

    # Errors, each as OpenAI's clients read them.

    def _error(self, problem: Problem) -> Response:
        self._statuses[problem.status] += 1
        headers = {"Retry-After": "1"} if problem.status in (429, 503) else None
        return JSONResponse(problem.body(), problem.status, headers)

    async def _problem(self, request: HttpRequest, problem: Problem) -> Response:
        return self._error(problem)

    async def _http_error(self, request: HttpRequest, error: HTTPException) -> Response:
        if error.status_code == 404:
            return self._error(
                Problem(
                    404,
                    f"there is no {request.url.path}: see /v1/models, /v1/completions, /v1/chat/completions, /health",
                )
            )
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            return self._error(Problem(405, f"{request.url.path} does not take {request.method}: use {allowed}"))
        return self._error(Problem(error.status_code, str(error.detail)))

    async def _bug(self, request: HttpRequest, error: Exception) -> Response:
        return self._error(Problem(500, f"this is a fault of the server ({type(error).__name__}: {error})"))

    # What there is.

    async def _page(self, request: HttpRequest) -> Response:
        return HTMLResponse(PAGE.read_text("utf-8"))

    async def _race(self, request: HttpRequest) -> Response:
        def described(model: ServedModel) -> dict[str, Any]:
            before, per_token = model.state_bytes
            sizes = {"state": before, "state_per_token": per_token, "capacity": model.capacity}
            return {"name": model.name, "kind": model.kind, **sizes}

        return JSONResponse([described(model) for model in self.models.values()])

    async def _health(self, request: HttpRequest) -> Response:
        models = {name: model.scheduler.status() for name, model in self.models.items()}
        well = all(status["alive"] for status in models.values()) and not self._closing
        status = "ok" if well else "shutting down" if self._closing else "a worker has ended"
        return JSONResponse({"status": status, "models": models}, 200 if well else 503)

    async def _metrics(self, request: HttpRequest) -> Response:
        lines = []
        for field, text in METRICS.items():
            lines += [f"# HELP t2r_{field}_total {text}", f"# TYPE t2r_{field}_total counter"]
            for name, model in self.models.items():
                lines.append(f"t2r_{field}_total{_label(name)} {asdict(model.scheduler.counters)[field]}")
        gauges = {
            "running": ("Answers in slots.", lambda m: m.scheduler.status()["running"]),
            "waiting": ("Answers that wait for a slot.", lambda m: m.scheduler.status()["waiting"]),
            "slots": ("Slots.", lambda m: m.scheduler.slots.count),
            "prefixes": ("States kept.", lambda m: len(m.scheduler.prefixes)),
            "prefix_bytes": ("Bytes of states kept.", lambda m: m.scheduler.prefixes.bytes),
        }
        for gauge, (text, value) in gauges.items():
            lines += [f"# HELP t2r_{gauge} {text}", f"# TYPE t2r_{gauge} gauge"]
            lines += [f"t2r_{gauge}{_label(name)} {value(model)}" for name, model in self.models.items()]
        lines += ["# HELP t2r_responses_total Responses by status.", "# TYPE t2r_responses_total counter"]
        lines += [f't2r_responses_total{{status="{status}"}} {n}' for status, n in sorted(self._statuses.items())]
        for part, text in (("request", "Seconds of answered requests."), ("first_token", "Seconds to the first text.")):
            lines += [f"# HELP t2r_{part}_seconds {text}", f"# TYPE t2r_{part}_seconds summary"]
            lines += [f"t2r_{part}_seconds_sum {self._seconds[part]:.6f}"]
            lines += [f"t2r_{part}_seconds_count {self._seconds[part + ' count']}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_description(model) for model in self.models.values()]})

    async def _model(self, request: HttpRequest) -> Response:
        return JSONResponse(_description(self._find(request.path_params["name"])))

    def _find(self, name: Any) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if not isinstance(name, str) or name not in self.models:
            raise Problem(404, f"there is no model {str(name)[:60]!r}: choose {' or '.join(self.models)}", "model")
        return self.models[name]

    # What is asked.

    async def _completions(self, request: HttpRequest) -> Response:
        return await self._answer("completion", request)

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._answer("chat", request)

    async def _answer(self, kind: str, request: HttpRequest) -> Response:
        body = await self._body(request)
        served = self._find(body.get("model"))
        return Answer(self, served, parse(kind, body, served))

    async def _body(self, request: HttpRequest) -> dict[str, Any]:
        """The JSON object of a request; refuses a larger body before all of it is there."""
        limit, content = self._body_bytes, bytearray()
        stated = request.headers.get("content-length", "0")
        if stated.isdigit() and int(stated) > limit:
            raise Problem(413, f"the body has {int(stated):,} bytes: at most {limit:,} are allowed")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    content += part
                    if len(content) > limit:
                        raise Problem(413, f"the body has more than {limit:,} bytes, the limit of this server")
        except TimeoutError:
            raise Problem(408, f"the body was not complete after {BODY_SECONDS} s") from None
        try:
            body = json.loads(content)
        except RecursionError:
            raise Problem(400, "the body is nested too deeply") from None
        except ValueError as error:  # also bytes that are not UTF-8, and endless digits
            raise Problem(400, f"the body is not JSON: {str(error)[:100]}") from None
        if not isinstance(body, dict):
            raise Problem(400, f"the body is a JSON {type(body).__name__}: send an object")
        return body

    def count(self, status: int) -> None:
        self._statuses[status] += 1

    def time(self, part: str, seconds: float) -> None:
        self._seconds[part] += seconds
        self._seconds[part + " count"] += 1


class Answer(Response):
    """The response to a valid request. A client that hangs up cancels it, also while it waits."""

    def __init__(self, server: Server, served: ServedModel, asked: Asked):
        self._server, self._served, self._asked = server, served, asked
        self.background = None

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        work = asyncio.create_task(self._respond(scope, receive, send))
        listening = asyncio.create_task(_hang_up(receive))
        try:
            await asyncio.wait((work, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, listening):
                task.cancel()
            results = await asyncio.gather(work, listening, return_exceptions=True)
        errors = [r for r in results if isinstance(r, Exception) and not isinstance(r, OSError)]
        if errors:
            raise errors[0]

    async def _respond(self, scope: Any, receive: Callable, send: Callable) -> None:
        began, seconds = time.monotonic(), self._served.limits.seconds
        respond = self._stream if self._asked.stream else self._whole
        try:
            async with asyncio.timeout(seconds):
                await respond(scope, receive, send, began)
            self._server.time("request", time.monotonic() - began)
        except TimeoutError:
            problem = Problem(504, f"the answer was not complete after {seconds:g} s, the limit of this server")
            await self._fail(problem, scope, receive, send)
        except Problem as problem:
            await self._fail(problem, scope, receive, send)

    _started = False

    async def _fail(self, problem: Problem, scope: Any, receive: Callable, send: Callable) -> None:
        """As a response, or as the last part of a stream that has begun."""
        if not self._started:
            return await self._server._error(problem)(scope, receive, send)
        self._server.count(problem.status)
        await send({"type": "http.response.body", "body": _event(problem.body()), "more_body": False})

    async def _whole(self, scope: Any, receive: Callable, send: Callable, began: float) -> None:
        content = await collect(self._served, self._asked)
        self._server.count(200)
        await JSONResponse(content)(scope, receive, send)

    async def _stream(self, scope: Any, receive: Callable, send: Callable, began: float) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        async with contextlib.aclosing(stream(self._served, self._asked)) as parts:
            async for part in parts:
                if not self._started:
                    self._started = True
                    self._server.time("first_token", time.monotonic() - began)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": _event(part), "more_body": True})
        self._server.count(200)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _hang_up(receive: Callable[[], Coroutine]) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def _description(model: ServedModel) -> dict[str, Any]:
    description = {"id": model.name, "object": "model", "created": model.created, "owned_by": "t2r"}
    return description | {"capacity": model.capacity, "chat": model.template is not None}


def _label(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{model="{escaped}"}}'
