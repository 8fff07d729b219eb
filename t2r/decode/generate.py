"""Generation with any mixture of softmax and linear layers: the code does not depend on the kind of state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from t2r.attention.module import State
from t2r.attention.softmax import KVCache
from t2r.batch import PADDING
from t2r.console import raise_if_interrupted
from t2r.decode.sampling import Sampling, choose
from t2r.environment import available_memory, require_memory, total_bytes
from t2r.errors import InputError
from t2r.kernels import load as load_kernels
from t2r.kernels.decoding import support as kernel_support
from t2r.model.loss import source_states
from t2r.model.transformer import DecodeState, LanguageModel, Seq2Seq, check_length, grow

StopIds = int | tuple[int, ...]


class Generation(NamedTuple):
    """A batch of sequences being generated. A pytree without side effects: scan it, save it, fork it, resume it."""

    state: DecodeState  # after all tokens but the last
    last: Int[Array, "b"]  # the last token of each sequence, not yet read by the model
    done: Bool[Array, "b"]  # sequences that have reached a stop token
    key: Array  # jax.random.key_data of the random key


def default_chunk(batch: int) -> int:
    """Tokens of each prompt per forward pass: 256 on CPUs; up to 4,096 on GPUs and TPUs, which few leave idle."""
    least, most, together = 256, 4096, 16_384
    return least if jax.default_backend() == "cpu" else min(most, max(least, together // batch))


def prefill(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    seed: int = 0,
    chunk: int | None = None,
    width: int = 1,
) -> Generation:
    """Reads prompts of any lengths into a state with space for `length` more tokens.

    They are padded to at least `width` tokens: batches of one width share compiled programs.
    """
    if not prompts or min(map(len, prompts)) < 1:
        raise InputError("a prompt needs at least one token: use the end-of-text token for an empty one")
    longest = max(map(len, prompts))
    check_length(model.config, longest + length)
    capacity = max(longest, width) + length
    check_memory(model, len(prompts), capacity)
    state = _prefill_in_chunks(model, model.init_state(len(prompts), capacity), prompts, chunk, width)
    return Generation(state, _last(prompts), jnp.zeros(len(prompts), bool), jax.random.key_data(jax.random.key(seed)))


def prefill_translation(
    model: Seq2Seq, sources: Int[np.ndarray, "b m"], length: int, *, start: int | Sequence[int], seed: int = 0
) -> Generation:
    """Encodes sources, padded with PADDING at the end; the state has space for `start` and `length` more tokens."""
    prefixes = [[start] if isinstance(start, int) else list(start)] * len(sources)
    capacity = length + len(prefixes[0])
    check_length(model.config, max(int((sources != PADDING).sum(1).max()), capacity))
    check_memory(model, len(sources), capacity)
    graph, arrays = nnx.split(model)
    state = model.init_state(len(sources), capacity, _source_states(graph, arrays, np.asarray(sources, np.int32)))
    state = _prefill_in_chunks(model, state, prefixes)
    done = jnp.zeros(len(sources), bool)
    return Generation(state, _last(prefixes), done, jax.random.key_data(jax.random.key(seed)))


@functools.partial(jax.jit, static_argnums=0)
def _source_states(graph, arrays, sources: Array) -> tuple[State, ...]:
    return source_states(nnx.merge(graph, arrays), sources)


def append_prompts(
    model: LanguageModel, generation: Generation, prompts: Sequence[Sequence[int]], *, chunk: int | None = None
) -> Generation:
    """Appends a prompt to each sequence, as if its tokens had been generated."""
    sequences = [[int(last), *prompt] for last, prompt in zip(generation.last, prompts)]
    state = grow_checked(generation.state, max(map(len, sequences)))
    state = _prefill_in_chunks(model, state, sequences, chunk)
    return generation._replace(state=state, last=_last(sequences), done=jnp.zeros_like(generation.done))


def _prefill_in_chunks(
    model: LanguageModel,
    state: DecodeState,
    sequences: Sequence[Sequence[int]],
    chunk: int | None = None,
    width: int = 1,
) -> DecodeState:
    """The state after all but the last token of each sequence; the first decoding step reads that one."""
    # Padding on the left aligns the ends of all sequences. It is masked: it takes no position and enters no state.
    width = max(width, *map(len, sequences)) - 1
    tokens, mask = np.zeros((len(sequences), width), np.int32), np.zeros((len(sequences), width), bool)
    for index, ids in enumerate(sequences):
        if len(ids) > 1:
            tokens[index, width - len(ids) + 1 :] = ids[:-1]
            mask[index, width - len(ids) + 1 :] = True
    graph, arrays = nnx.split(model)
    chunk = chunk or default_chunk(len(sequences))
    for first in range(0, width, chunk):
        part = slice(first, first + chunk)
        state = read_chunk(graph, arrays, state, tokens[:, part], mask[:, part])
    return state


def _last(sequences: Sequence[Sequence[int]]) -> Int[Array, "b"]:
    return jnp.asarray([ids[-1] for ids in sequences], jnp.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def read_chunk(graph, arrays, state: DecodeState, tokens: Array, mask: Array) -> DecodeState:
    """The state after some more tokens of each sequence; those where `mask` is False are padding."""
    return nnx.merge(graph, arrays)(tokens, state=state, mask=mask)[1]


def step(model: Any, generation: Generation, sampling: Sampling, end: StopIds) -> Generation:
    """One decoding step. Sequences that are done repeat their stop token, and their state does not change.

    Nor does the random key, once all are done: then nothing depends on how many more steps there were.
    """
    stops = stop_tuple(end)
    hidden, state = model(generation.last[:, None], state=generation.state, mask=~generation.done[:, None])
    key = jax.random.wrap_key_data(generation.key)
    if sampling.temperature or sampling.never:
        next_key, step_key = jax.random.split(key)
        token = choose(model.logits(hidden[:, -1]), sampling, step_key)
        key = jnp.where(generation.done.all(), key, next_key)
    else:
        token = model.greedy_token(hidden[:, -1])
    token = jnp.where(generation.done, generation.last, token)
    stopped = functools.reduce(jnp.logical_or, [token == stop for stop in stops])
    return Generation(state, token, generation.done | stopped, jax.random.key_data(key))


def packed_weights(model: LanguageModel, batch: int) -> Any:
    """The weights in the decoding kernels' layout, for `decoder`; None without a kernel or enough free memory."""
    kernels = kernel_support.choice(model, batch)
    if kernels is None or load_kernels("decoding.fused_model") is None:
        return None
    if kernels == "all" and not load_kernels("decoding.all_layers").fits(model, batch):
        return None
    free, arguments = available_memory(), (*nnx.split(model), kernels, batch)
    needed = total_bytes(jax.eval_shape(lambda: _pack(*arguments)))
    # Twice: packing needs a temporary copy.
    return _pack(*arguments) if free is None or 2 * needed < free else None


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _pack(graph, arrays, kernels: str, batch: int) -> Any:
    return load_kernels("decoding.fused_model").pack_model(nnx.merge(graph, arrays), kernels, batch)


def decoder(model: LanguageModel, packed: Any = None) -> Any:
    """What computes decoding steps: the kernels, with weights `packed` for them, or the model itself."""
    return load_kernels("decoding.fused_model").FusedModel(model, packed) if packed else model


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
    """`count` decoding steps in one compiled loop; with `packed` weights they run in the decoding kernels."""
    model = decoder(nnx.merge(graph, arrays), packed)

    def body(generation, _):
        generation = step(model, generation, sampling, end)
        return generation, generation.last

    return jax.lax.scan(body, generation, length=count)


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
    """Generates up to `length` tokens for each sequence, and returns those before its first stop token.

    Steps run `segment` at a time; `on_tokens` is called with the tokens (b, n) of each segment. The buffers of
    `generation` are donated: to continue from it twice, `fork` it first.
    """
    check_length(model.config, int(generation.state.position.max()) + length)
    generation = generation._replace(state=grow_checked(generation.state, length))
    graph, arrays = nnx.split(model)
    packed, segments = packed_weights(model, len(generation.done)), []
    for first in range(0, length, segment):
        count = min(segment, length - first)
        generation, tokens = scan_steps(graph, arrays, generation, count, sampling, end, packed)
        segments.append(np.asarray(tokens).T)
        raise_if_interrupted()
        if on_tokens is not None:
            on_tokens(segments[-1])
        if bool(generation.done.all()):
            break
    sequences = np.concatenate(segments, 1) if segments else np.zeros((len(generation.done), 0), int)
    return generation, [truncate_at_stop(ids, end) for ids in sequences.tolist()]


def fork(generation: Generation, copies: int) -> Generation:
    """A generation with `copies` adjacent copies of each sequence; it shares no buffers with the original."""
    key = jnp.array(generation.key, copy=True)
    repeated = jax.tree.map(
        lambda x: jnp.repeat(x, copies, 0) if x.ndim else jnp.array(x, copy=True), generation._replace(key=None)
    )
    return repeated._replace(key=key)


def check_memory(model: LanguageModel, batch: int, length: int) -> None:
    """Raises an error, before anything is computed, if a state of this size does not fit into free memory."""
    needed = state_bytes(model, batch, length)

    def advice(free: int) -> str:
        growth = needed - state_bytes(model, batch, 1)
        return _advice(int((free - (needed - growth)) / growth * length) if growth else 0)

    require_memory(needed, f"the state of {batch} sequences of {length:,} tokens", advice)


def grow_checked(state: DecodeState, extra: int) -> DecodeState:
    """`grow`, after the check that the larger caches fit; those that they replace exist until they are filled."""
    small = [layer for layer in state.layers if isinstance(layer, KVCache) and layer.capacity < layer.index + extra]
    if small:
        used, capacity = int(small[0].index), small[0].capacity
        token_bytes = total_bytes(small) / capacity
        what = f"the state of {len(small[0].valid)} sequences of {used + extra:,} tokens"
        require_memory(round(token_bytes * (used + extra)), what, lambda free: _advice(int(free / token_bytes) - used))
    return grow(state, extra)


def _advice(tokens: int) -> str:
    return f"generate at most {max(tokens, 0):,} tokens, reduce the batch, or convert the softmax layers"


def state_bytes(model: LanguageModel, batch: int, length: int) -> int:
    """Bytes of the attention state of `batch` sequences of this length."""
    return total_bytes(jax.eval_shape(lambda: model.init_state(batch, length).layers))


def truncate_at_stop(ids: list[int], end: StopIds) -> list[int]:
    """The tokens before the first stop token."""
    stops = stop_tuple(end)
    return ids[: next((index for index, token in enumerate(ids) if token in stops), len(ids))]


def stop_tuple(end: StopIds) -> tuple[int, ...]:
    """The stop tokens as a tuple."""
    return (end,) if isinstance(end, int) else end
