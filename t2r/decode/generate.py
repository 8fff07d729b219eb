"""Generation with any mixture of softmax and linear layers: the same code, whatever the state is made of."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from t2r.attention.module import State
from t2r.decode.sampling import Sampling, choose
from t2r.environment import available_memory, total_bytes
from t2r.errors import InputError
from t2r.kernels import load as load_kernels
from t2r.kernels.decoding import support as kernel_support
from t2r.model.loss import source_states
from t2r.model.transformer import DecodeState, LanguageModel, Seq2Seq, check_length, grow

PREFILL_CHUNK = 256


StopIds = int | tuple[int, ...]


class Generation(NamedTuple):
    """A batch of texts being written. A plain value: scan it, save it, fork it, go on with it."""

    state: DecodeState  # of all tokens but the last
    last: Int[Array, "b"]  # the last token of each text, not yet seen by the model
    done: Bool[Array, "b"]  # texts that have reached their end
    key: Array  # the data of a random key


def prefill(
    model: LanguageModel, prompts: Sequence[Sequence[int]], length: int, *, seed: int = 0, chunk: int = PREFILL_CHUNK
) -> Generation:
    """Reads prompts, of any lengths, with room to generate `length` tokens."""
    if not prompts or min(map(len, prompts)) < 1:
        raise InputError("a prompt needs at least one token: begin with the end-of-text token if you have none")
    longest = max(map(len, prompts))
    check_length(model.config, longest + length)
    check_memory(model, len(prompts), longest + length)
    state = _prefill_in_chunks(model, model.init_state(len(prompts), longest + length), prompts, chunk)
    return Generation(state, _last(prompts), jnp.zeros(len(prompts), bool), jax.random.key_data(jax.random.key(seed)))


def prefill_translation(
    model: Seq2Seq, sources: Int[np.ndarray, "b m"], length: int, *, start: int | Sequence[int], seed: int = 0
) -> Generation:
    """Reads sources, rows of ids ended by PADDING, with room to translate each into `length` tokens after `start`."""
    begun = [[start] if isinstance(start, int) else list(start)] * len(sources)
    room = length + len(begun[0])
    check_length(model.config, max(sources.shape[1], room))
    check_memory(model, len(sources), room)
    graph, arrays = nnx.split(model)
    state = model.init_state(len(sources), room, _remember(graph, arrays, np.asarray(sources, np.int32)))
    state = _prefill_in_chunks(model, state, begun, PREFILL_CHUNK)
    done = jnp.zeros(len(sources), bool)
    return Generation(state, _last(begun), done, jax.random.key_data(jax.random.key(seed)))


@functools.partial(jax.jit, static_argnums=0)
def _remember(graph, arrays, sources: Array) -> tuple[State, ...]:
    return source_states(nnx.merge(graph, arrays), sources)


def append_prompts(
    model: LanguageModel, generation: Generation, prompts: Sequence[Sequence[int]], *, chunk: int = PREFILL_CHUNK
) -> Generation:
    """Adds tokens to each text as if they had been generated."""
    rows = [[int(last), *prompt] for last, prompt in zip(generation.last, prompts)]
    state = grow(generation.state, max(map(len, rows)))
    state = _prefill_in_chunks(model, state, rows, chunk)
    return generation._replace(state=state, last=_last(rows), done=jnp.zeros_like(generation.done))


def _prefill_in_chunks(
    model: LanguageModel, state: DecodeState, rows: Sequence[Sequence[int]], chunk: int
) -> DecodeState:
    """Puts all but the last token of each row into the state: that one waits for the first step."""
    # Padding on the left, so that all texts end together; it takes no position and enters no state.
    width = max(len(row) for row in rows) - 1
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for index, row in enumerate(rows):
        if len(row) > 1:
            tokens[index, width - len(row) + 1 :] = row[:-1]
            mask[index, width - len(row) + 1 :] = True
    graph, arrays = nnx.split(model)
    for first in range(0, width, chunk):
        part = slice(first, first + chunk)
        state = _prefill(graph, arrays, state, tokens[:, part], mask[:, part])
    return state


def _last(rows: Sequence[Sequence[int]]) -> Int[Array, "b"]:
    return jnp.asarray([row[-1] for row in rows], jnp.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(graph, arrays, state: DecodeState, tokens: Array, mask: Array) -> DecodeState:
    return nnx.merge(graph, arrays)(tokens, state=state, mask=mask)[1]


def step(model: Any, generation: Generation, sampling: Sampling, end: StopIds) -> Generation:
    """One more token for each text; texts that are done repeat their end, and their state stays."""
    ends = stop_tuple(end)
    hidden, state = model(generation.last[:, None], state=generation.state, mask=~generation.done[:, None])
    key = jax.random.wrap_key_data(generation.key)
    if sampling.temperature:
        key, draw = jax.random.split(key)
        token = choose(model.logits(hidden[:, -1]), sampling, draw)
    else:
        token = model.greedy_token(hidden[:, -1])
    token = jnp.where(generation.done, ends[0], token)
    ended = functools.reduce(jnp.logical_or, [token == one for one in ends])
    return Generation(state, token, generation.done | ended, jax.random.key_data(key))


def packed_weights(model: LanguageModel, batch: int) -> Any:
    """The weights as decoding kernels read them, for `scan_steps`; None where no kernel, or not enough memory, is."""
    if not kernel_support.available(model, batch) or load_kernels("decoding.fused_model") is None:
        return None
    free, given = available_memory(), (*nnx.split(model), kernel_support.one_kernel_available(model, batch))
    needed = total_bytes(jax.eval_shape(lambda: _pack(*given)))
    return _pack(*given) if free is None or 2 * needed < free else None  # twice: it is made of another copy


@functools.partial(jax.jit, static_argnums=(0, 2))
def _pack(graph, arrays, as_one: bool) -> Any:
    return load_kernels("decoding.fused_model").pack_model(nnx.merge(graph, arrays), as_one=as_one)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), donate_argnums=2)
def scan_steps(
    graph,
    arrays,
    generation: Generation,
    count: int,
    sampling: Sampling,
    end: StopIds,
    packed: Any = None,
) -> tuple[Generation, Int[Array, "count b"]]:
    """`count` steps in one compiled loop, of the model itself or by the kernels for what is `packed`."""
    model = nnx.merge(graph, arrays)
    form = load_kernels("decoding.fused_model").FusedModel(model, packed) if packed else model

    def one(generation, _):
        generation = step(form, generation, sampling, end)
        return generation, generation.last

    return jax.lax.scan(one, generation, length=count)


def generate_tokens(
    model: LanguageModel,
    generation: Generation,
    length: int,
    *,
    end: StopIds,
    sampling: Sampling = Sampling(),
    on_tokens: Callable[[np.ndarray], None] | None = None,
    segment: int = 64,
) -> tuple[Generation, list[list[int]]]:
    """Generates up to `length` tokens for each text, each up to its end; `on_tokens` sees them (b, n) as they come.

    The generation given is used up; to go on from it twice, `fork` it first.
    """
    check_length(model.config, int(generation.state.position.max()) + length)
    check_memory(model, len(generation.done), int(generation.state.position.max()) + length)
    generation = generation._replace(state=grow(generation.state, length))
    graph, arrays = nnx.split(model)
    matrices, pieces = packed_weights(model, len(generation.done)), []
    for first in range(0, length, segment):
        count = min(segment, length - first)
        generation, tokens = scan_steps(graph, arrays, generation, count, sampling, end, matrices)
        pieces.append(np.asarray(tokens).T)
        if on_tokens is not None:
            on_tokens(pieces[-1])
        if bool(generation.done.all()):
            break
    rows = np.concatenate(pieces, 1) if pieces else np.zeros((len(generation.done), 0), int)
    return generation, [truncate_at_stop(row, end) for row in rows.tolist()]


def fork(generation: Generation, copies: int) -> Generation:
    """Each text `copies` times, side by side, each free to go its own way; shares nothing with the original."""
    key = jnp.array(generation.key, copy=True)
    repeated = jax.tree.map(
        lambda x: jnp.repeat(x, copies, 0) if x.ndim else jnp.array(x, copy=True), generation._replace(key=None)
    )
    return repeated._replace(key=key)


def check_memory(model: LanguageModel, batch: int, length: int) -> None:
    """Refuses, before anything is computed, lengths whose state does not fit beside the model."""
    free = available_memory()
    needed = state_bytes(model, batch, length)
    if free is not None and needed > free:
        growth = needed - state_bytes(model, batch, 1)
        fits = int((free - (needed - growth)) / growth * length) if growth else 0
        raise InputError(
            f"the state of {batch} texts of {length:,} tokens takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB "
            f"are free: generate at most {max(fits, 0):,} tokens, fewer texts at once, or convert the softmax layers"
        )


def state_bytes(model: LanguageModel, batch: int, length: int) -> int:
    """Bytes of attention state for texts of this length, counted on the state itself."""
    return total_bytes(jax.eval_shape(lambda: model.init_state(batch, length).layers))


def truncate_at_stop(row: list[int], end: StopIds) -> list[int]:
    """The tokens before the first that ends a text."""
    ends = stop_tuple(end)
    return row[: next((place for place, token in enumerate(row) if token in ends), len(row))]


def stop_tuple(end: StopIds) -> tuple[int, ...]:
    """One id that ends texts, or several."""
    return (end,) if isinstance(end, int) else end
