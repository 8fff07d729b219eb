"""A conversation in the terminal, over a scheduler with one slot: each turn begins with the state after the last."""

import queue
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from t2r.data.chat_template import ChatTemplate, Message, find_template
from t2r.data.tokenizer import Hub, Tokenizer, stop_ids
from t2r.decode.sampling import Sampling
from t2r.decode.text import check_language_model
from t2r.errors import InputError
from t2r.importers import by_name
from t2r.model.rows import for_decoding
from t2r.serve.problem import Problem
from t2r.serve.scheduler import Request, Scheduler
from t2r.serve.served import capacity_of
from t2r.serve.slots import Slots
from t2r.serve.text import AnswerText


class Conversation:
    """The messages so far, and the tokens that the model has read of them."""

    def __init__(
        self,
        model: str,
        *,
        sampling: Sampling = Sampling(),
        template: str | None = None,
        system: str | None = None,
        dtype: str = "float32",
        weights: str = "float32",
    ):
        loaded = by_name.load(model, dtype=dtype)
        check_language_model(loaded)
        if weights == "int8":
            loaded = loaded._replace(model=for_decoding(loaded.model, "int8"))
        self._template = _required(find_template(loaded.tokenizer, template), model, loaded.tokenizer)
        self._tokenizer, self._stops = loaded.tokenizer, stop_ids(loaded.tokenizer)
        self._sampling, self._system, self._events = sampling, system, queue.Queue()
        slots = Slots(loaded.model, 1, capacity_of(loaded.model.config, 0))
        deliver = lambda events: [self._events.put(event) for event in events]  # noqa: E731
        # Two states: after the last prompt, and after its answer.
        cache_bytes = 4 * slots.bytes_of(slots.capacity) + 2**20
        self._scheduler = Scheduler(slots, self._stops, deliver, cache_bytes=cache_bytes)
        self._scheduler.start()
        self.turns = self.tokens = self.read = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all that was said."""
        self._messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        self._text, self._ids = "", []  # of the conversation so far, as the model has read and written it

    def answer(self, text: str, most: int, stopped: threading.Event, seed: int | None = None) -> Iterator[str]:
        """The model's answer in pieces, until it ends or `stopped` is set."""
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._template.text(messages)
        ids = self._continued(prompt)
        left = self._scheduler.slots.capacity - len(ids)
        if left < 1:
            limit = self._scheduler.slots.capacity
            raise InputError(
                f"the conversation has {len(ids):,} tokens, the limit is {limit:,}: begin again with /reset"
            )
        seed = secrets.randbits(32) if seed is None else seed
        request = Request(ids, min(most, left), self._sampling, seed)
        self._scheduler.submit(request)
        shown, written, tokens, finish = AnswerText(self._tokenizer, self._stops), "", [], None
        while not finish and not stopped.is_set():
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                continue
            if event.request is not request:  # the rest of an answer that was stopped
                continue
            if event.problem is not None:
                raise InputError(event.problem.message)
            tokens.append(event.token)
            finish = event.finish
            piece = shown.add([event.token])
            written += piece
            yield piece
        if not finish:
            self._scheduler.cancel(request)
        piece = shown.close()
        yield piece
        written += piece
        self._messages = [*messages, {"role": "assistant", "content": written}]
        self._text, self._ids = prompt + written, ids + tokens
        self.turns += 1
        self.tokens += len(tokens)
        self.read += len(ids) - request.cached

    def _continued(self, prompt: str) -> list[int]:
        """The tokens of a prompt: those that the model has seen, then the new ones; all anew if the template has
        changed what was said."""
        if not self._ids or not prompt.startswith(self._text):
            return self._tokenizer.encode(prompt) or [self._tokenizer.end]
        new = self._tokenizer.encode(prompt[len(self._text) :])
        has_stopped = self._ids[-1] in self._stops  # the template writes the stop token, too
        return self._ids + (new[1:] if has_stopped and new[:1] == self._ids[-1:] else new)

    def close(self) -> None:
        self._scheduler.close(0)
        self._scheduler.join(10)


def _required(template: ChatTemplate | None, model: str, tokenizer: Tokenizer) -> ChatTemplate:
    if template is None:
        other = ", or give the template of its family with --chat_template=FILE" if isinstance(tokenizer, Hub) else ""
        raise InputError(f"{model} has no chat template: use `t2r generate`{other}")
    return template


def converse(
    conversation: Conversation, lines: Iterable[str], write: Callable[[str], Any], *, most: int, seed: int | None = None
) -> None:
    """Answers each line; /reset begins again, Ctrl-C stops an answer, the end of the lines ends it."""
    for line in lines:
        text = line.strip()
        if text == "/reset":
            conversation.reset()
            write("(a new conversation)\n")
        elif text.startswith("/"):
            write(f"(there is no {text.split()[0]}: /reset begins again, Ctrl-D ends)\n")
        elif text:
            stopped = threading.Event()
            with _ctrl_c(stopped):
                try:
                    for piece in conversation.answer(text, most, stopped, seed):
                        write(piece)
                except (InputError, Problem) as error:
                    write(f"({error})")
            write(" (stopped)\n" if stopped.is_set() else "\n")


@contextmanager
def _ctrl_c(stopped: threading.Event) -> Iterator[None]:
    """In its body, Ctrl-C sets `stopped` and nothing else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
