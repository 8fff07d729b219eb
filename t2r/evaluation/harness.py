"""Models as those of lm-evaluation-harness, under the name `t2r`: importing this module registers them there."""

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval.models  # noqa: F401 - the harness's own models, which it registers only if there are no others
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from t2r.console import Progress, say
from t2r.data.chat_template import ChatTemplate, Message, find_template
from t2r.data.tokenizer import stop_ids
from t2r.decode.generate import generate_tokens, prefill
from t2r.decode.sampling import Sampling
from t2r.decode.text import check_language_model
from t2r.errors import InputError, check_seed
from t2r.importers import by_name

MAX_LENGTH = 2048  # tokens of a model without a limit, unless max_length says otherwise; the harness's own default
MAX_GENERATED = 256  # tokens, unless a task says otherwise; the harness's own default
BLOCK = 64  # positions whose logits are computed at once
SEGMENT = 32  # tokens between two looks at whether a stop sequence was generated
WIDTHS = 64  # batches are padded to a multiple of so many tokens, so that few programs are compiled
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names for one number
Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # a request, the tokens of its context and continuation


@register_model("t2r")
class HarnessModel(TemplateLM):
    """A language model; the harness calls the public methods."""

    def __init__(
        self,
        model: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        seed: int | str = 0,
        max_batch_size: int | str | None = None,
        **unknown: Any,
    ):
        super().__init__()
        known = "model=DIR, batch_size, max_length, dtype, device and seed"
        if unknown:
            raise InputError(f"--model_args has {', '.join(unknown)}: model t2r takes {known}")
        if model is None:
            raise InputError(f"--model_args=model=DIR is missing: model t2r takes {known}")
        if dtype not in ("float32", "bfloat16"):
            raise InputError(f"dtype={dtype}: choose float32 or bfloat16")
        self.batch_size = 8 if batch_size in (None, "auto") else _positive("batch_size", batch_size)
        check_seed(_positive("seed", seed, least=0))
        self._seed, self._name = int(seed), Path(str(model)).name
        jax.config.update("jax_default_device", _device(device))
        loaded = by_name.load(str(model), dtype=dtype)
        check_language_model(loaded)
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._warn = functools.cache(say)  # each warning once
        limit = self._model.config.max_positions
        self.max_length = limit or MAX_LENGTH if max_length is None else _positive("max_length", max_length)
        if limit and self.max_length > limit:
            raise InputError(f"max_length={max_length}: this model has {limit} positions; give at most so many")

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None):
        """From --model_args, which go before flags of the same names."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**flags | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None):
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.stop if self._tokenizer.stop >= 0 else self._tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self._tokenizer.end

    @property
    def tokenizer_name(self) -> str:
        """Under which the harness keeps requests: models of one name may have several templates."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        digest = hashlib.sha256(template.encode()).hexdigest()[:8]
        return f"{self._name}-{digest}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a string, after the one that must precede every text, if the model needs one."""
        ids, begin = self._tokenizer.encode(string), self._tokenizer.end
        begins = self._tokenizer.begins and add_special_tokens is not False
        return [begin, *ids] if begins and ids[:1] != [begin] else ids  # a chat template may have written it

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The program of --apply_chat_template, for the harness's records."""
        if isinstance(chat_template, str):
            raise InputError(f"--apply_chat_template={chat_template}: leave out the name, a model has one template")
        return self._template.source

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to where an answer begins, or to the end of a message that is continued."""
        write = self._template.text if add_generation_prompt else self._template.text_to_continue
        try:
            return write(chat_history)
        except InputError as error:  # some templates know no system message; the harness leaves it out, too
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            self._warn(f"{error}: system messages are left out")
            return write(without)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        template = find_template(self._tokenizer)
        if template is None:
            raise InputError("this model has no chat template: leave out --apply_chat_template")
        return template

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether greedy decoding would give it; (0, True) if it is empty."""
        scored = {i: request for i, request in enumerate(requests) if request.args[1]}
        found = super().loglikelihood(list(scored.values()), disable_tqdm=True) if scored else []
        answers = dict(zip(scored, found, strict=True))
        return [answers.get(i, (0.0, True)) for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, each token predicted once, in windows of max_length tokens."""
        windows: list[list[Scored]] = []
        for request in requests:
            options = dict(prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            pairs = get_rolling_token_windows(token_list=self.tok_encode(request.args[0]), **options)
            windows.append([(None, *make_disjoint_window(pair)) for pair in pairs])
        answers = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        totals = [sum(next(answers)[0] for _ in text) for text in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """Contexts that are too long lose their beginning."""
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise InputError(
                f"a continuation has {longest} tokens, more than max_length={self.max_length}: set max_length in "
                "--model_args, up to the model's positions"
            )
        inputs = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        graph, arrays = nnx.split(self._model)
        with Progress("loglikelihood", len(requests)) as progress:
            for chosen in self._batches([len(ids) for ids in inputs]):
                tokens, mask = self._padded([inputs[i] for i in chosen])
                log_probs, greedy = map(np.asarray, _score(graph, arrays, tokens, mask))
                for row, i in enumerate(chosen):
                    request, _, continuation = requests[i]
                    last = len(inputs[i]) - 1  # the nth position predicts token n + 1
                    part = slice(last - len(continuation), last)
                    answers[i] = float(log_probs[row, part].sum(dtype=np.float64)), bool(greedy[row, part].all())
                    if request is not None:
                        self.cache_hook.add_partial("loglikelihood", request, answers[i])
                progress.advance(len(chosen))
        return answers

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The numbers of sequences of similar length, the longest first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for first in range(0, len(order), self.batch_size):
            yield order[first : first + self.batch_size]

    def _padded(self, sequences: Sequence[list[int]]) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
        """Full batches of tokens, padded at the end, and where they are tokens."""
        width = 1 + _multiple(max(map(len, sequences)) - 1)
        tokens = np.zeros((self.batch_size, width), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
        return tokens, mask

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the request's stop sequences."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}  # requests with the same options
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        with Progress("generate", len(requests)) as progress:
            for group in groups.values():
                given = requests[group[0]].args[1]
                limit, stops, sampling = options_of(given)
                room = self.max_length - limit
                if room < 1:
                    raise InputError(
                        f"max_gen_toks={limit} leaves no room for a context in max_length={self.max_length}: "
                        "set a larger max_length in --model_args, or a smaller max_gen_toks in --gen_kwargs"
                    )
                prompts = [self._prompt(requests[i].args[0], room) for i in group]
                for chosen in self._batches([len(ids) for ids in prompts]):
                    written = self._generate([prompts[j] for j in chosen], limit, stops, sampling)
                    for j, text in zip(chosen, written, strict=True):
                        texts[group[j]] = text
                        self.cache_hook.add_partial("generate_until", requests[group[j]].args, text)
                    progress.advance(len(chosen))
        return texts

    def _prompt(self, context: str, room: int) -> list[int]:
        return (self.tok_encode(context) or [self.prefix_token_id])[-room:]

    def _generate(
        self, prompts: Sequence[list[int]], limit: int, stops: Sequence[str], sampling: Sampling
    ) -> list[str]:
        filled = [*prompts, *[[self.prefix_token_id]] * (self.batch_size - len(prompts))]
        width = min(_multiple(max(map(len, prompts))), self.max_length - limit)
        generation = prefill(self._model, filled, limit, seed=self._seed, width=width)
        end = stop_ids(self._tokenizer)
        sequences: list[list[int]] = [[] for _ in filled]
        for first in range(0, limit, SEGMENT):
            count = min(SEGMENT, limit - first)
            generation, tokens = generate_tokens(self._model, generation, count, end=end, sampling=sampling)
            for ids, new in zip(sequences, tokens):
                ids += new
            texts = [self._tokenizer.decode(ids) for ids in sequences[: len(prompts)]]
            if all(done or is_stopped(text, stops) for done, text in zip(np.asarray(generation.done), texts)):
                break
        return [until(text, stops) for text in texts]


def options_of(given: dict[str, Any]) -> tuple[int, list[str], Sampling]:
    """The most tokens, the stop sequences and the sampling that a request of the harness asks for."""
    given = dict(given)
    limits = [given.pop(name) for name in LIMITS if name in given]
    stops = given.pop("until", None) or []
    samples, temperature = given.pop("do_sample", None), given.pop("temperature", None)
    if samples is None:
        samples = bool(temperature)
    sampling = Sampling(
        (1.0 if temperature is None else float(temperature)) if samples else 0.0,
        int(given.pop("top_k", None) or 0),
        float(given.pop("top_p", None) or 1.0),
    )
    if given:
        raise InputError(
            f"generation with {', '.join(given)} is not supported: leave it out of the task or --gen_kwargs"
        )
    stops = [stops] if isinstance(stops, str) else list(stops)
    limit = next((limit for limit in limits if limit is not None), MAX_GENERATED)
    return _positive("max_gen_toks", limit), [stop for stop in stops if stop], sampling


def is_stopped(text: str, stops: Iterable[str]) -> bool:
    """Whether a text has one of the stop sequences."""
    return any(stop in text for stop in stops)


def until(text: str, stops: Iterable[str]) -> str:
    """The text before the first stop sequence."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


@functools.partial(jax.jit, static_argnums=0)
def _score(
    graph, arrays, tokens: Int[Array, "b n"], mask: Bool[Array, "b n"]
) -> tuple[Float[Array, "b m"], Bool[Array, "b m"]]:
    """The log-probability of each token but the first, and whether it is the likeliest.

    The logits of a few positions at a time are in memory, not those of all.
    """
    model = nnx.merge(graph, arrays)
    hidden, _ = model(tokens[:, :-1], mask=mask[:, :-1])
    targets = tokens[:, 1:]
    batch, length = targets.shape
    blocks = lambda x: jnp.moveaxis(x.reshape(batch, length // BLOCK, BLOCK, *x.shape[2:]), 1, 0)  # noqa: E731

    def block(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, target = inputs
        log_probs = model.log_probs(x)
        return jnp.take_along_axis(log_probs, target[..., None], -1)[..., 0], jnp.argmax(log_probs, -1) == target

    scores = jax.lax.map(block, (blocks(hidden), blocks(targets)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(batch, length) for x in scores)


def _multiple(length: int) -> int:
    return -(-length // WIDTHS) * WIDTHS


def _positive(name: str, value: Any, least: int = 1) -> int:
    if not re.fullmatch(r"\d+", str(value)) or int(value) < least:
        raise InputError(f"{name}={value}: give a whole number of at least {least}")
    return int(value)


def _device(name: str | None) -> jax.Device | None:
    """The device of this name, such as cpu or cuda:1; None: JAX chooses."""
    if name in (None, "cuda:0"):  # the harness gives cuda:0 where the user gives nothing
        return None
    kind, _, number = str(name).partition(":")
    try:
        return jax.devices("gpu" if kind == "cuda" else kind)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError):
        there = ", ".join(sorted({device.platform for device in jax.devices()} | {"cpu"}))
        raise InputError(f"device={name}: JAX has no such device here; choose from {there}, or leave it out") from None
