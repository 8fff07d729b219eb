"""OpenAI's HTTP protocol: the JSON of a request to what is asked, and what was answered to JSON."""

import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from t2r.data.chat_template import content_text
from t2r.data.tokenizer import continuation_prefix, decode_after, prompt_ids
from t2r.decode.sampling import Sampling
from t2r.errors import InputError
from t2r.serve.problem import Problem
from t2r.serve.scheduler import Request, TokenLogProbs
from t2r.serve.slots import ALTERNATIVES

MOST_CHOICES = 128  # of one request, all prompts together
MOST_STOPS = 4
LONGEST_STOP = 256  # characters
CHAT_TOKENS = 1024  # of an answer in a chat, if the request has no limit and the capacity is larger
COMPLETION_TOKENS = 16  # of a completion, if the request has no limit: OpenAI's

COMMON = {
    "model", "stream", "stream_options", "temperature", "top_p", "top_k", "n", "seed", "stop", "max_tokens", "logprobs",
}  # fmt: skip
OWN = {"completion": {"prompt", "echo"}, "chat": {"messages", "max_completion_tokens", "top_logprobs"}}
# What clients send and what does not change an answer; and what is accepted only where it changes nothing.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
NEUTRAL = {
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "logit_bias": ({}, None), "suffix": ("", None),
    "best_of": (1, None), "tools": ([], None), "tool_choice": ("none", None), "functions": ([], None),
    "response_format": ({"type": "text"}, None), "modalities": (["text"], None),
}  # fmt: skip


@dataclass
class Asked:
    """A valid request: one `Request` for each prompt, and how the answer is wanted."""

    kind: str  # "completion" or "chat"
    model: str
    requests: list[Request]
    stream: bool
    usage_at_end: bool  # of a stream
    usage_in_parts: bool
    stop: tuple[str, ...]
    log_probs: int | None  # likeliest tokens to show with each; None: no log-probabilities
    echo: list[str]  # each prompt's text, if it is to be repeated
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def choices(self) -> int:
        return sum(request.choices for request in self.requests)


class _Fields:
    """The fields of a JSON object; collects what is wrong with them."""

    def __init__(self, body: dict[str, Any]):
        self._body, self.problems, self.first = body, [], None

    def wrong(self, name: str, message: str) -> None:
        self.first = self.first or name
        self.problems.append(message)

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def number(
        self, name: str, default: Any, low: float, high: float, *, whole: bool = False, above: bool = False
    ) -> Any:
        """A number from low (with `above`, from the next one) to high."""
        value = self._body.get(name)
        if value is None:
            return default
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if not (is_whole if whole else is_whole or (type(value) is float and math.isfinite(value))):
            self.wrong(name, f"{name}={_shown(value)} is not a {'whole ' if whole else ''}number")
            return default
        if not low <= value <= high or (above and value == low):
            least = f"{'above' if above else 'at least'} {low:,}"
            self.wrong(name, f"{name}={_shown(value)} must be {least} and at most {high:,}")
            return default
        return int(value) if whole else float(value)

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            self.wrong(name, f"{name}={_shown(value)} is neither true nor false")
        return value is True

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._body.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
            self.wrong(
                name, f"{name}={_shown(value)} is neither a string nor a list of strings with characters in them"
            )
            return ()
        if len(values) > MOST_STOPS or max(map(len, values), default=0) > LONGEST_STOP:
            long = max(map(len, values))
            message = f"{len(values)} strings of up to {long} characters: at most {MOST_STOPS} of {LONGEST_STOP}"
            self.wrong(name, f"{name} has {message}")
            return ()
        return tuple(values)

    def check(self) -> None:
        if self.problems:
            raise Problem(400, "; ".join(self.problems), self.first)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse(kind: str, body: Any, served: Any) -> Asked:
    """What a request body asks of a served model; raises a Problem that lists all that is wrong."""
    fields = _Fields(body)
    unknown = [n for n in body if n not in COMMON | OWN[kind] | IGNORED and body[n] not in NEUTRAL.get(n, (None,))]
    for name in unknown:
        supported = "is not supported here: leave it out" if name in NEUTRAL else "is not a parameter of this endpoint"
        fields.wrong(name, f"{_shown(name)[1:-1]} {supported}")
    temperature = fields.number("temperature", 1.0, 0, 100)
    top_p, top_k = fields.number("top_p", 1.0, 0, 1, above=True), fields.number("top_k", 0, 0, 2**31 - 1, whole=True)
    choices = fields.number("n", 1, 1, MOST_CHOICES, whole=True)
    seed = fields.number("seed", None, -(2**63), 2**63 - 1, whole=True)
    stream, stop = fields.flag("stream"), fields.texts("stop")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        fields.wrong("stream_options", f"stream_options={_shown(options)} is not an object")
        options = {}
    shown = _log_probs(kind, fields)
    prompts, echo = _chat_prompts(fields, served) if kind == "chat" else _prompts(fields, served)
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    most = fields.number(limit, None, 1, 2**31 - 1, whole=True)
    if not fields.problems and len(prompts) * choices > MOST_CHOICES:
        fields.wrong("n", f"{len(prompts)} prompts with n={choices} are more than {MOST_CHOICES} answers")
    fields.check()
    sampling = Sampling(temperature, top_k, top_p)
    seed = secrets.randbits(32) if seed is None else seed % 2**32
    requests = []
    for ids in prompts:
        allowed = _length(ids, most, limit, CHAT_TOKENS if kind == "chat" else COMPLETION_TOKENS, served.capacity)
        requests.append(Request(ids, allowed, sampling, seed, choices, shown is not None))
    usages = (options.get(name) is True for name in ("include_usage", "continuous_usage_stats"))
    return Asked(kind, served.name, requests, stream, *usages, stop, shown, echo)


def _log_probs(kind: str, fields: _Fields) -> int | None:
    if kind == "completion":
        if isinstance(fields.get("logprobs"), bool):
            fields.wrong("logprobs", f"logprobs={fields.get('logprobs')} is not a whole number")
            return None
        shown = fields.number("logprobs", None, 0, ALTERNATIVES, whole=True)
        if shown is not None and fields.get("echo"):
            fields.wrong("logprobs", "logprobs with echo are not supported here: prompts get no log-probabilities")
        return shown
    wanted, shown = fields.flag("logprobs"), fields.number("top_logprobs", 0, 0, ALTERNATIVES, whole=True)
    if shown and not wanted:
        fields.wrong("top_logprobs", f"top_logprobs={shown} needs logprobs=true")
    return shown if wanted else None


def _length(ids: list[int], most: int | None, limit: str, default: int, capacity: int) -> int:
    left = capacity - len(ids)
    if left < 1:
        raise Problem(
            400, f"the prompt has {len(ids):,} tokens: at most {capacity - 1:,} fit, with one of answer", "prompt"
        )
    if most is not None and most > left:
        raise Problem(
            400,
            f"{limit}={most:,} after {len(ids):,} tokens of prompt are more than the {capacity:,} tokens that this "
            f"server allows: ask for at most {left:,}",
            limit,
        )
    return most or min(default, left)


def _prompts(fields: _Fields, served: Any) -> tuple[list[list[int]], list[str]]:
    """The tokens of each prompt, and their texts if `echo` wants them."""
    given = fields.get("prompt")
    is_ids = lambda x: isinstance(x, list) and x and all(type(i) is int for i in x)  # noqa: E731
    prompts = [given] if isinstance(given, str) or is_ids(given) else given
    if given is None:
        fields.wrong("prompt", "prompt is missing: a string, or a list of strings or of token ids")
        return [], []
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or is_ids(p) for p in prompts):
        fields.wrong("prompt", f"prompt={_shown(given)} is neither a string nor a list of strings or of token ids")
        return [], []
    tokenizer, vocabulary = served.tokenizer, served.vocabulary
    wrong = [i for p in prompts if not isinstance(p, str) for i in p if not 0 <= i < vocabulary]
    if wrong:
        fields.wrong("prompt", f"prompt has the token {wrong[0]}: this model's are 0 to {vocabulary - 1:,}")
        return [], []
    if any(isinstance(p, str) and not _is_unicode(p) for p in prompts):
        fields.wrong("prompt", "prompt has half of a surrogate pair: send Unicode text")
        return [], []
    encoded = [prompt_ids(tokenizer, tokenizer.encode(p)) if isinstance(p, str) else p for p in prompts]
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    return encoded, [text + tokenizer.separator for text in texts] if fields.flag("echo") else []


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _chat_prompts(fields: _Fields, served: Any) -> tuple[list[list[int]], list[str]]:
    messages = fields.get("messages")
    if served.template is None:
        raise Problem(400, f"the model {served.name} has no chat template: use /v1/completions", "model")
    if not isinstance(messages, list) or not messages:
        fields.wrong("messages", f"messages={_shown(messages)} is not a list of messages with role and content")
        return [], []
    conversation = []
    for number, message in enumerate(messages):
        role, text = (
            (message.get("role"), content_text(message.get("content"))) if isinstance(message, dict) else (0, 0)
        )
        if not isinstance(role, str) or not isinstance(text, str) or not _is_unicode(role + text):
            wrong = f"messages[{number}]={_shown(message)} needs a role and a content, both text (no images)"
            fields.wrong("messages", wrong)
        else:
            conversation.append({"role": role, "content": text})
    if len(conversation) < len(messages):
        return [], []
    try:
        return [served.template.ids(conversation)], []
    except InputError as error:
        fields.wrong("messages", str(error))
        return [], []


@dataclass
class Choice:
    """One answer so far."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    finish: str | None = None


class Writer:
    """Answers as JSON."""

    def __init__(self, asked: Asked, tokenizer: Any):
        self._asked, self._tokenizer = asked, tokenizer
        chat = asked.kind == "chat"
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{asked.id}"
        self._names = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion", "text_completion")

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self._asked
        return {"id": self._id, "object": name, "created": asked.created, "model": asked.model, "choices": choices}

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The response with all answers."""
        content = []
        for choice in choices:
            text = {"message": {"role": "assistant", "content": choice.text}, "logprobs": self._log_probs(choice)}
            if self._asked.kind == "completion":
                text = {"text": choice.text, "logprobs": self._log_probs(choice)}
            content.append({"index": choice.index, **text, "finish_reason": choice.finish})
        return self._envelope(self._names[0], content) | {"usage": usage}

    def chunk(self, choice: Choice, first: bool) -> dict[str, Any]:
        """A part of an answer, for a stream."""
        delta = {"role": "assistant", "content": choice.text} if first else {"content": choice.text}
        text = {"delta": delta} if self._asked.kind == "chat" else {"text": choice.text}
        log_probs = self._log_probs(choice) if choice.tokens else None
        content = {"index": choice.index, **text, "logprobs": log_probs, "finish_reason": choice.finish}
        return self._envelope(self._names[1], [content])

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The part of a stream that has the numbers of tokens."""
        return self._envelope(self._names[1], []) | {"usage": usage}

    def _log_probs(self, choice: Choice) -> dict[str, Any] | None:
        shown = self._asked.log_probs
        if shown is None:
            return None
        prefix = continuation_prefix(self._tokenizer)
        text_of = lambda ids: decode_after(self._tokenizer, prefix, ids)  # noqa: E731
        text = lambda token: text_of([token])  # noqa: E731
        if self._asked.kind == "completion":
            tops = [{text(t): p for t, p in entry.likeliest[:shown]} for entry in choice.log_probs]
            offsets = [len(text_of(choice.tokens[:i])) for i in range(len(choice.tokens))]
            return {
                "tokens": [text(token) for token in choice.tokens],
                "token_logprobs": [entry.chosen for entry in choice.log_probs],
                "top_logprobs": tops if shown else None,
                "text_offset": offsets,
            }
        entry = lambda token, p: {"token": text(token), "logprob": p, "bytes": list(text(token).encode())}  # noqa: E731
        return {
            "content": [
                entry(token, item.chosen) | {"top_logprobs": [entry(t, p) for t, p in item.likeliest[:shown]]}
                for token, item in zip(choice.tokens, choice.log_probs)
            ]
        }


def usage_of(asked: Asked, tokens: int) -> dict[str, Any]:
    """The numbers of tokens that a response reports."""
    prompt = sum(len(request.ids) for request in asked.requests)
    cached = sum(request.cached for request in asked.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
