"""A model that is served: its scheduler's thread on one side, the event loop of the HTTP server on the other."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from t2r.console import say
from t2r.data.chat_template import ChatTemplate, find_template
from t2r.data.tokenizer import Tokenizer, continuation_prefix, stop_ids
from t2r.decode.text import check_language_model
from t2r.errors import InputError
from t2r.files import make_folder
from t2r.importers import by_name
from t2r.model.rows import for_decoding
from t2r.serve.prefixes import load_prefixes, save_prefixes
from t2r.serve.protocol import Asked, Choice, Writer, usage_of
from t2r.serve.scheduler import Event, Request, Scheduler
from t2r.serve.slots import Slots
from t2r.serve.text import AnswerText

CACHE_CAPACITY = 2048  # tokens of a sequence, by default, in models whose state grows with it
STATE_CAPACITY = 131_072  # by default, in models whose state does not grow


@dataclass(frozen=True)
class Limits:
    """How much one server takes."""

    slots: int = 64
    capacity: int = 0  # tokens of a prompt and its answer; 0: the model's
    queue: int = 1024
    cache_mib: int = 256
    seconds: float = 600.0  # of one request
    states: str | None = None  # folder that keeps the states of prompts when the server ends
    warm_up: bool = False  # all programs are compiled before the first request, not when they are needed


class Inbox:
    """Events of one HTTP request, taken together by the task that waits for them."""

    def __init__(self):
        self._events, self._arrived = [], asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[Event]:
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


class ServedModel:
    """A model with a name, its scheduler, and what its answers need."""

    def __init__(
        self,
        path: str,
        name: str,
        limits: Limits,
        *,
        template: str | None = None,
        dtype: str = "float32",
        weights: str = "float32",
        kernels: str = "auto",
    ):
        """`template` is a file with a chat template, for a model that has none; `weights` the type of the matrices."""
        say(f"{name}: loading {path}" if name != path else f"loading {path}")
        loaded = by_name.load(path, dtype=dtype, kernels=kernels)
        check_language_model(loaded)
        loaded = loaded._replace(model=for_decoding(loaded.model, weights))
        self.name, self.path, self.limits = name, path, limits
        self.provenance = loaded.provenance
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.vocabulary = loaded.model.config.vocab_size
        self.template: ChatTemplate | None = find_template(loaded.tokenizer, template)
        softmax = [spec.kind == "softmax" for spec in loaded.model.config.attention]
        self.kind = "transformer" if all(softmax) else "hybrid" if any(softmax) else "RNN"
        self.capacity = capacity_of(loaded.model.config, limits.capacity)
        self.stops = stop_ids(self.tokenizer)
        self.created = int(time.time())
        try:
            slots = Slots(loaded.model, limits.slots, self.capacity)
        except InputError as error:  # which of the models, such as the transformer beside an RNN
            raise InputError(f"{name}, {'an' if self.kind == 'RNN' else 'a'} {self.kind}: {error}") from None
        if (most := slots.most_by_kernels) or jax.default_backend() != "cpu":
            say(f"{name}: {f'kernels decode up to {most} answers together, XLA more' if most else 'XLA decodes'}")
        say(f"{name}: compiling")
        slots.warm_up(everything=limits.warm_up)
        options = dict(queue=limits.queue, cache_bytes=limits.cache_mib * 2**20)
        self.scheduler = Scheduler(slots, self.stops, self._deliver, **options)
        self._model = loaded.model
        self._states = Path(limits.states) / name.replace("/", "_") if limits.states else None
        if self._states:
            make_folder(self._states)
            load_prefixes(self._states, self.scheduler.prefixes, loaded.model)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inboxes: dict[Request, Inbox] = {}

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of the state of one sequence before its first token, and what each token adds."""
        sizes = [self.scheduler.slots.bytes_of(length) for length in (1, 1001)]
        growth = (sizes[1] - sizes[0]) // 1000
        return sizes[0] - growth, growth

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.scheduler.start()

    def close(self) -> None:
        """Waits for the scheduler's end, and writes the states that it has kept."""
        self.scheduler.join(10)
        if self._states:
            try:
                save_prefixes(self._states, self.scheduler.prefixes, self._model)
            except InputError as error:  # such as a full disk: the server ends all the same
                say(f"the states of prompts were not kept: {error}")

    def _deliver(self, events: list[Event]) -> None:
        """Takes events from the scheduler's thread to the event loop's."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everyone who waited
            self._loop.call_soon_threadsafe(self._distribute, events)

    def _distribute(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.request)
            if inbox is not None:
                inbox.put(event)

    async def answer(self, asked: Asked) -> AsyncIterator[Choice]:
        """The answers piece by piece; whoever stops iterating cancels what is left."""
        inbox = Inbox()
        answering = _Answering(asked, self.tokenizer, self.stops)
        self._inboxes |= dict.fromkeys(asked.requests, inbox)
        try:
            for request in asked.requests:
                self.scheduler.submit(request)
            while not answering.complete:
                for choice in answering.pieces(await inbox.take(), self.scheduler):
                    yield choice
        finally:
            for request in asked.requests:
                del self._inboxes[request]
                if not answering.complete:
                    self.scheduler.cancel(request)

    def writer(self, asked: Asked) -> Writer:
        return Writer(asked, self.tokenizer)


class _Answering:
    """Turns the events of a request's sequences into pieces of text."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, stops: tuple[int, ...]):
        self._asked, self._stops, self._open = asked, stops, {}
        for request in asked.requests:
            # The answer in a conversation is a text of its own.
            prefix = [] if asked.kind == "chat" else continuation_prefix(tokenizer, request.ids[-1])
            for choice in range(request.choices):
                self._open[request, choice] = len(self._open), AnswerText(tokenizer, stops, asked.stop, prefix)
        self._echo = dict(enumerate(text for text, r in zip(asked.echo, asked.requests) for _ in range(r.choices)))

    @property
    def complete(self) -> bool:
        return not self._open

    def pieces(self, events: list[Event], scheduler: Scheduler) -> list[Choice]:
        """One piece for each sequence that has new text or has ended."""
        together: dict[tuple[Request, int], list[Event]] = {}
        for event in events:
            if event.problem is not None:
                raise event.problem
            together.setdefault((event.request, event.choice), []).append(event)
        return [self._piece(place, own, scheduler) for place, own in together.items() if place in self._open]

    def _piece(self, place: tuple[Request, int], events: list[Event], scheduler: Scheduler) -> Choice:
        index, text = self._open[place]
        piece = Choice(index, self._echo.pop(index, ""))
        # Tokens that came together become text together; one by one where a stop string may end it between two.
        for some in [[event] for event in events] if self._asked.stop else [events]:
            shown = [event for event in some if event.token not in self._stops]
            piece.tokens += [event.token for event in shown]
            piece.text += text.add([event.token for event in shown])
            piece.log_probs += [event.log_probs for event in shown if event.log_probs is not None]
            if text.stopped:
                break
        if text.stopped and not some[-1].finish:
            scheduler.cancel(*place)
        if some[-1].finish or text.stopped:
            piece.text += text.close()
            piece.finish = "stop" if text.stopped else some[-1].finish
            del self._open[place]
        return piece


async def collect(served: ServedModel, asked: Asked) -> dict[str, Any]:
    """The whole response."""
    choices = [Choice(index) for index in range(asked.choices)]
    async with contextlib.aclosing(served.answer(asked)) as pieces:
        async for piece in pieces:
            choice = choices[piece.index]
            choice.text += piece.text
            choice.tokens += piece.tokens
            choice.log_probs += piece.log_probs
            choice.finish = piece.finish or choice.finish
    return served.writer(asked).whole(choices, usage_of(asked, sum(len(choice.tokens) for choice in choices)))


async def stream(served: ServedModel, asked: Asked) -> AsyncIterator[dict[str, Any]]:
    """The response in parts."""
    writer, tokens, begun = served.writer(asked), 0, set()
    async with contextlib.aclosing(served.answer(asked)) as pieces:
        async for piece in pieces:
            tokens += len(piece.tokens)
            if piece.text or piece.finish or piece.log_probs:
                part = writer.chunk(piece, first=piece.index not in begun)
                yield part | {"usage": usage_of(asked, tokens)} if asked.usage_in_parts else part
                begun.add(piece.index)
    if asked.usage_at_end:
        yield writer.last(usage_of(asked, tokens))


def capacity_of(config: Any, given: int) -> int:
    """Tokens that a sequence may have."""
    if given and config.max_positions and given > config.max_positions:
        raise InputError(f"--capacity={given}: this model has positions for {config.max_positions} tokens")
    if given:
        return given
    grows = any(spec.kind == "softmax" for spec in config.attention)
    most = CACHE_CAPACITY if grows else STATE_CAPACITY
    return min(most, config.max_positions or most)
