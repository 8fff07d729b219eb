"""The states of all sequences that are decoded together, and the four compiled programs that change them.

The slots are a batch for the model. Each holds one sequence, at its own length and with its own sampling options. A
recurrent state has one size, so a slot is ready for any sequence. The caches of softmax layers have `space` for as many
tokens as the longest sequence needs. Both the number of slots and the space grow and shrink in few sizes, for each of
which the programs are compiled once.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from t2r.attention.softmax import KVCache
from t2r.decode.generate import decoder, packed_weights
from t2r.decode.sampling import Sampling, choose_each
from t2r.environment import require_memory, total_bytes
from t2r.model.transformer import DecodeState, LanguageModel

LEAST_SPACE = 256  # tokens
CHUNKS = (32, 256)  # tokens of a prompt that are read at once: the last of it, or more
PATIENCE = 64  # steps for which arrays may be larger than needed
SIZES = (1, 8, 64, 512, 4096, 32_768)  # slots of the arrays, besides all
KERNEL_SIZES = (16, 32)  # in place of smaller ones where there are decoding kernels, which are as fast as for one
ALTERNATIVES = 5  # likeliest tokens that come with log-probabilities


class Sequences(NamedTuple):
    """All slots; each array has one entry per slot."""

    state: DecodeState  # of one sequence in each slot
    last: Int[Array, "slots"]  # the last token, not yet read by the model
    key: UInt32[Array, "slots 2"]  # jax.random.key_data of the random keys
    temperature: Float[Array, "slots"]
    top_k: Int[Array, "slots"]
    top_p: Float[Array, "slots"]


class Beginning(NamedTuple):
    """A sequence that begins in a slot: the token that its first step reads, and how its tokens are chosen."""

    slot: int
    last: int
    sampling: Sampling
    seed: int = 0
    choice: int = 0  # each choice of a request has its own random key


class LogProbs(NamedTuple):
    """The log-probability of each slot's new token, and the likeliest tokens with theirs."""

    chosen: Float[Any, "slots"]
    likeliest: Float[Any, "slots alternatives"]
    tokens: Int[Any, "slots alternatives"]


class Slots:
    """At most `count` sequences of at most `capacity` tokens. Arrays are as large as those that are there need."""

    def __init__(self, model: LanguageModel, count: int, capacity: int):
        self.count, self.capacity = count, capacity
        self._model = model
        graph, arrays = nnx.split(model)
        # As a list, and bound to the programs: to flatten Flax's containers at each call would take as long as a step.
        self._weights, structure = jax.tree.flatten(arrays)
        merged = lambda weights: nnx.merge(graph, jax.tree.unflatten(structure, weights))  # noqa: E731
        self._step = jax.jit(functools.partial(_step, merged), static_argnums=4, donate_argnums=2)
        self._read = jax.jit(functools.partial(_read, merged), donate_argnums=1)
        self._has_caches = any(block.attention.kind == "softmax" for block in model.blocks)
        needed = count * self.bytes_of(capacity)
        advice = lambda free: "reduce --slots, or --capacity if the model has softmax layers"  # noqa: E731
        require_memory(needed, f"the state of {count} slots of {capacity:,} tokens", advice)
        # Prompts that are read in one call: one for a single request, more when many begin together.
        many = max(count // 8, min(count, 4))
        self._rows = {CHUNKS[0]: sorted({1, many}), CHUNKS[1]: sorted({1, max(many // 8, 1)})}
        kernel_sizes = sorted({min(size, count) for size in KERNEL_SIZES})
        packed = {size: packed_weights(model, size) for size in kernel_sizes}
        self._packed = {size: weights for size, weights in packed.items() if weights is not None}
        sizes = [size for size in SIZES if size > self.most_by_kernels] + [*self._packed]
        self._sizes = sorted({min(size, count) for size in (*sizes, count)})
        self.clear()

    @property
    def most_by_kernels(self) -> int:
        """How many sequences the decoding kernels take at once; 0: XLA alone decodes this model."""
        return max(self._packed, default=0)

    def clear(self) -> None:
        """All slots are empty, in new arrays."""
        self._sequences = self._empty = None  # the old ones may fill the memory
        self._size, self._too_large = self._size_for(1, 1), 0
        slots, space = self._size
        zeros = lambda dtype, *shape: jnp.zeros((slots, *shape), dtype)  # noqa: E731
        options = zeros(jnp.float32), zeros(jnp.int32), zeros(jnp.float32)
        self._empty = self._initial(1, space)
        self._sequences = Sequences(self._initial(slots, space), zeros(jnp.int32), zeros(jnp.uint32, 2), *options)

    def _initial(self, slots: int, space: int) -> DecodeState:
        """The state of sequences without tokens, of which each has its own place in the caches."""
        return _without_padding(self._model.init_state(slots, space))

    def bytes_of(self, length: int) -> int:
        """Bytes of the state of one sequence of this length."""
        return total_bytes(jax.eval_shape(lambda: self._model.init_state(1, length).layers))

    def fit(self, slots: int, longest: int) -> None:
        """Makes the arrays as large as the first `slots` slots with sequences of up to `longest` tokens need.

        They grow at once, and shrink when they were too large for a while.
        """
        wanted = self._size_for(slots, longest)
        self._too_large = self._too_large + 1 if wanted != self._size else 0
        if any(need > have for need, have in zip(wanted, self._size)):
            wanted = tuple(map(max, wanted, self._size))
        elif self._too_large <= PATIENCE:
            return
        self._sequences = _resize(self._sequences, *wanted)
        self._size, self._too_large = wanted, 0
        self._empty = self._initial(1, wanted[1])

    def _size_for(self, slots: int, longest: int) -> tuple[int, int]:
        """(slots, space) of the arrays."""
        return next(size for size in self._sizes if size >= slots), self._space_for(longest)

    def _space_for(self, longest: int) -> int:
        return max(LEAST_SPACE, 1 << (longest - 1).bit_length()) if self._has_caches else 1

    def begin(self, beginnings: Sequence[Beginning]) -> None:
        """Puts new sequences into their slots, all in one call."""
        rows = 1 if len(beginnings) == 1 else self._size[0]
        columns = zip(*((b.slot, b.last, b.seed, b.choice, *_options(b.sampling)) for b in beginnings))
        dtypes = (np.int32, np.int32, np.uint32, np.uint32, np.float32, np.int32, np.float32)
        padding = (0, rows - len(beginnings))
        arrays = [np.pad(np.array(column, dtype), padding) for column, dtype in zip(columns, dtypes)]
        arrays[0][len(beginnings) :] = self.count  # rows without a slot are not written anywhere
        self._sequences = _begin(self._sequences, self._empty, *arrays)

    def load(self, slot: int, state: DecodeState) -> None:
        """The sequence in a slot continues from this state, a copy of another's."""
        self._sequences = _load(self._sequences, slot, state)

    def chunk_of(self, remaining: int) -> int:
        """How many tokens of a prompt, of which so many remain, are read at once. It depends on nothing else: other
        requests do not change where a prompt is divided."""
        return next((chunk for chunk in CHUNKS if remaining <= chunk), CHUNKS[-1])

    def rows_of(self, chunk: int) -> int:
        """How many prompts are read at once, at most."""
        return self._rows[chunk][-1]

    def read(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], chunk: int) -> None:
        """The sequences in some slots read some tokens each, at most `chunk`."""
        rows = next(rows for rows in self._rows[chunk] if len(slots) <= rows)
        padded, counts = np.zeros((rows, chunk), np.int32), np.zeros(rows, np.int32)
        numbers = np.full(rows, self.count, np.int32)  # rows without a slot are computed, and not written anywhere
        for row, (slot, ids) in enumerate(zip(slots, tokens)):
            padded[row, : len(ids)], counts[row], numbers[row] = ids, len(ids), slot
        self._sequences = self._read(self._weights, self._sequences, numbers, padded, counts)

    def step(self, active: Int[np.ndarray, "n"], log_probs: bool) -> tuple[Int[Array, "slots"], LogProbs | None]:
        """One decoding step of the active slots: their new tokens; those of other slots mean nothing."""
        mask = np.zeros(self._size[0], bool)
        mask[active] = True
        packed = self._packed.get(self._size[0])
        self._sequences, tokens, extra = self._step(self._weights, packed, self._sequences, mask, log_probs)
        return tokens, extra

    def warm_up(self, *, everything: bool) -> None:
        """Compiles the programs for one short sequence, or with `everything` those for all numbers and lengths."""
        spaces = [self._space_for(1)]
        while everything and spaces[-1] < self._space_for(self.capacity):
            spaces.append(2 * spaces[-1])
        chunks = CHUNKS if everything else CHUNKS[:1]
        for count, space in itertools.product(self._sizes if everything else self._sizes[:1], spaces):
            self.fit(count, space)
            for number in {1, count}:
                self.begin([Beginning(slot, 0, Sampling()) for slot in range(number)])
            for chunk in chunks:
                for rows in self._rows[chunk]:
                    self.read(range(min(rows, count)), [[0]] * min(rows, count), chunk)
            self.load(0, self.copy(0, 1))
            self.step(np.array([0]), False)[0].block_until_ready()
        self.clear()

    def copy(self, slot: int, length: int) -> DecodeState:
        """A copy of the state in a slot, which has read `length` tokens."""
        return _copy(self._sequences.state, slot, self._space_for(length))


def _step(merged: Callable, weights: list[Array], packed: Any, sequences: Sequences, active: Array, log_probs: bool):
    model = decoder(merged(weights), packed)
    hidden, state = model(sequences.last[:, None], state=sequences.state, mask=active[:, None])
    scores = model.logits(hidden[:, 0])
    tokens, key = choose_each(scores, sequences.temperature, sequences.top_k, sequences.top_p, sequences.key)
    extra = None
    if log_probs:
        normalised = jax.nn.log_softmax(scores)
        chosen = jnp.take_along_axis(normalised, tokens[:, None], 1)[:, 0]
        extra = LogProbs(chosen, *jax.lax.top_k(normalised, min(ALTERNATIVES, scores.shape[1])))
    last = jnp.where(active, tokens, sequences.last)
    return sequences._replace(state=_without_padding(state), last=last, key=key), tokens, extra


def _read(merged: Callable, weights: list[Array], sequences: Sequences, slots, tokens, counts) -> Sequences:
    mask = jnp.arange(tokens.shape[1]) < counts[:, None]
    some = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), sequences.state)
    _, new = merged(weights)(tokens, state=some, mask=mask)
    write = lambda x, y: x.at[slots].set(y, mode="drop")  # noqa: E731
    return sequences._replace(state=jax.tree.map(write, sequences.state, _without_padding(new)))


def _without_padding(state: DecodeState) -> DecodeState:
    """The state with caches that continue after the last token of each sequence, not after the padding behind it."""
    # + 0: a copy, since both are donated
    layers = (x._replace(index=state.position + 0) if isinstance(x, KVCache) else x for x in state.layers)
    return state._replace(layers=tuple(layers))


def _options(sampling: Sampling) -> tuple[float, int, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p


@functools.partial(jax.jit, donate_argnums=0)
def _begin(sequences: Sequences, empty: DecodeState, slots, last, seed, choice, temperature, top_k, top_p) -> Sequences:
    keys = jax.vmap(_key)(seed, choice)
    write = lambda x, y: x.at[slots].set(y, mode="drop")  # noqa: E731
    state = jax.tree.map(write, sequences.state, empty)
    options = sequences.last, sequences.key, sequences.temperature, sequences.top_k, sequences.top_p
    return Sequences(state, *map(write, options, (last, keys, temperature, top_k, top_p)))


def _key(seed: Array, choice: Array) -> Array:
    """The random key of a choice; the first one's is that of `t2r generate` with the same seed."""
    key = jax.random.key(seed)
    return jnp.where(choice == 0, jax.random.key_data(key), jax.random.key_data(jax.random.fold_in(key, choice)))


@functools.partial(jax.jit, donate_argnums=0)
def _load(sequences: Sequences, slot, state: DecodeState) -> Sequences:
    space = next((layer.capacity for layer in sequences.state.layers if isinstance(layer, KVCache)), 1)
    write = lambda x, y: x.at[slot].set(y[0])  # noqa: E731
    return sequences._replace(state=jax.tree.map(write, sequences.state, _with_space(state, space)))


@functools.partial(jax.jit, static_argnums=2)
def _copy(state: DecodeState, slot, space: int) -> DecodeState:
    return _with_space(jax.tree.map(lambda x: x[slot][None], state), space)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _resize(sequences: Sequences, slots: int, space: int) -> Sequences:
    sequences = jax.tree.map(lambda x: _resized(x, 0, slots), sequences)
    return sequences._replace(state=_with_space(sequences.state, space))


def _resized(x: Array, axis: int, size: int) -> Array:
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


def _with_space(state: DecodeState, space: int) -> DecodeState:
    """The state with caches for this many tokens; it must not have more."""

    def of_layer(layer: Any) -> Any:
        if not isinstance(layer, KVCache):
            return layer
        k, v, valid = _resized(layer.k, 2, space), _resized(layer.v, 2, space), _resized(layer.valid, 1, space)
        return KVCache(k, v, valid, layer.index)

    return state._replace(layers=tuple(map(of_layer, state.layers)))
