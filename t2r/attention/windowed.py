"""Exact attention to the neighbourhood, linear attention to all that is further away, under one normaliser.

For query i the *exact* keys E(i) are those of the last `size` tokens, its own included, and of the first `sinks` tokens
of the sequence. All earlier ones, L(i), are *distant*. With scores a_ij = q_i·k_j/√d:

    weight_ij = exp(a_ij)                      for j in E(i)
              = exp(mix_i) · φ(q_i)·φ(k_j)     for j in L(i)
    x_out_i = Σ_j weight_ij v_j / Σ_j weight_ij

mix_i is learned (see `t2r.attention.module.Mixture`): it sets how much a query reads from afar. All exponents are taken
relative to the largest exact score of the query, and mix_i may exceed that by `LARGEST` at most.

The state has one size at any length: S and z over the distant keys, and a buffer of the exact keys and values. A key
enters S and z when it leaves the window, never before; a sink never does. The forms are those of `linear.py`, with the
same axes and the same meaning of `state` and `mask`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention import linear
from t2r.attention.causal import drop_weights
from t2r.attention.feature_map import Features
from t2r.attention.linear import LOWEST, QUADRATIC_LENGTH, LinearState
from t2r.attention.products import weighted_sums

LARGEST = 30.0  # of mix_i above the largest exact score; e^30 leaves a sum of exact weights that float32 can hold
CHUNK = 64  # queries that share a state in the chunked form


class Window(NamedTuple):
    """Which keys are exact, and φ for those that no longer are."""

    size: int
    sinks: int
    key_features: Callable[[Float[Array, "b m g d"]], Features]

    @property
    def slots(self) -> int:
        """The number of exact keys that a state holds."""
        return self.sinks + self.size

    def slot(self, position: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """The slot of a position's key: sinks have their own, later keys take turns in the others."""
        in_turn = self.sinks + (position - self.sinks) % self.size
        return jnp.where(position < self.sinks, position, in_turn)

    def positions(self, count: Int[Array, "b"]) -> Int[Array, "b slots"]:
        """The position of the key in each slot after `count` tokens. It is count or more in slots not yet written."""
        slot, latest = jnp.arange(self.slots), count[:, None] - 1
        in_turn = latest - (latest - slot) % self.size
        return jnp.where((slot < self.sinks) | (slot > latest), slot, in_turn)


class WindowedState(NamedTuple):
    """S and z over the distant keys, and the exact keys and values in the slots of a `Window`."""

    S: Float[Array, "b g k d"]
    z: Float[Array, "b g k"]
    log_scale: Float[Array, "b g"] | None
    k: Float[Array, "b g slots d"]
    v: Float[Array, "b g slots d"]
    count: Int[Array, "b"]  # tokens of each sequence so far

    @property
    def distant(self) -> LinearState:
        """The state of linear attention to the distant keys."""
        return LinearState(self.S, self.z, self.log_scale)


class Queries(NamedTuple):
    """What attention needs of each query."""

    scaled: Float[Array, "b n g r d"]  # q/√d
    features: Features  # φ(q)
    mix: Float[Array, "b n g r"]  # log of the weight of distant keys, in float32


class Keys(NamedTuple):
    """Keys and values, and where they are in their sequence."""

    k: Float[Array, "b m g d"]
    v: Float[Array, "b m g d"]
    position: Int[Array, "b m"]
    valid: Bool[Array, "b m"]  # False for padding and for empty slots


def initial_state(k: Array, v: Array, window: Window) -> WindowedState:
    """The state before the first token, for keys and values of these shapes."""
    batch, _, groups, head_dim = k.shape
    empty = linear.initial_state(jax.eval_shape(window.key_features, k), v)
    buffer = lambda dtype: jnp.zeros((batch, groups, window.slots, head_dim), dtype)  # noqa: E731
    return WindowedState(*empty, buffer(k.dtype), buffer(v.dtype), jnp.zeros(batch, jnp.int32))


def append(state: WindowedState, k: Array, v: Array, window: Window, mask: Array | None = None) -> WindowedState:
    """The state after the tokens of these keys and values."""
    return _append(state, _with_buffer(state, k, v, window, mask), window)


def quadratic(
    q: Queries,
    k: Float[Array, "b n g d"],
    v: Float[Array, "b n g d"],
    window: Window,
    *,
    state: WindowedState | None = None,
    mask: Bool[Array, "b n"] | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "b n g r d"], WindowedState]:
    """The definition, over all pairs of query and key; the only form with dropout, on the normalised weights."""
    past = None if state is None else state.distant
    state = initial_state(k, v, window) if state is None else state
    keys = _with_buffer(state, k, v, window, mask)
    exact, distant = _near_and_distant(keys.position[:, window.slots :], keys.position, keys.valid, window)
    features = window.key_features(keys.k)
    out = _attend(q, keys.k, keys.v, exact, past, distant, features, dropout=dropout, key=key)
    return out, _append(state, keys, window)


def chunked(
    q: Queries,
    k: Float[Array, "b n g d"],
    v: Float[Array, "b n g d"],
    window: Window,
    *,
    state: WindowedState | None = None,
    mask: Bool[Array, "b n"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "b n g r d"], WindowedState]:
    """Quadratic within chunks of queries, recurrent between them: linear in length.

    All chunks are computed at once where S and z are plain sums; else, with feature maps that have scales, in turn.
    """
    batch, length = v.shape[:2]
    if jax.eval_shape(window.key_features, k).log_scale is None:
        return _chunks_at_once(q, k, v, window, state, mask, max(chunk, window.size))
    state = initial_state(k, v, window) if state is None else state
    mask = jnp.ones((batch, length), bool) if mask is None else mask

    def one_chunk(state, inputs):
        q, k, v, mask = inputs
        out, state = quadratic(q, k, v, window, state=state, mask=mask)
        return state, out

    chunks = jax.tree.map(lambda x: jnp.moveaxis(_split(x, chunk), 1, 0), (q, k, v, mask))
    state, out = jax.lax.scan(one_chunk, state, chunks)
    return _joined(jnp.moveaxis(out, 0, 1), length), state


def _split(x: Array, chunk: int) -> Array:
    """(b, n, …) → (b, chunks, chunk, …); padding is zero, and so masked."""
    batch, length = x.shape[:2]
    count = -(-length // chunk)
    x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(batch, count, chunk, *x.shape[2:])


def _joined(chunks: Array, length: int) -> Array:
    return chunks.reshape(len(chunks), -1, *chunks.shape[3:])[:, :length]


def _chunks_at_once(
    q: Queries,
    k: Array,
    v: Array,
    window: Window,
    state: WindowedState | None,
    mask: Bool[Array, "b n"] | None,
    chunk: int,
) -> tuple[Float[Array, "b n g r d"], WindowedState]:
    """All chunks of queries as one batch: see `_parallel_chunks`, which knows no padding but at the end."""
    new_state = append(initial_state(k, v, window) if state is None else state, k, v, window, mask)
    if mask is None:
        return _parallel_chunks(q, k, v, window, state, chunk), new_state
    # Real tokens first, so that neighbours in the sequence are neighbours in the array.
    order = jnp.argsort(~mask, axis=1, stable=True)
    q, k, v = jax.tree.map(lambda x: _take(x, order), (q, k, v))
    out = _parallel_chunks(q, k, v, window, state, chunk)
    return _take(out, jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)), new_state


def _take(x: Array, index: Int[Array, "b some"]) -> Array:
    """What is at these places of each sequence."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), 1)


def _parallel_chunks(
    q: Queries, k: Array, v: Array, window: Window, state: WindowedState | None, chunk: int
) -> Float[Array, "b n g r d"]:
    """All chunks of queries as one batch, from the beginning of the sequence or after a state.

    The keys of a chunk are the sinks, the `size` tokens before the chunk, and its own. S and z before it are the sums
    over earlier keys, which are distant for all of its queries. Chunks are at least `size` long. Keys of padding, which
    is last, are later than all queries that matter.
    """
    length, size = k.shape[1], window.size
    q = jax.tree.map(lambda x: _split(x, chunk), q)
    batch, count = q.mix.shape[:2]
    before = jnp.zeros(1, jnp.int32) if state is None else state.count  # tokens; the same for all, or of each sequence
    (sink_k, sink_v), (near_k, near_v) = _kept(state, k, v, window)
    sinks = sink_k.shape[1]
    into_batch = lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])).reshape(batch * count, *x.shape[2:])  # noqa: E731

    def of_chunks(x: Array) -> Array:
        """(b, size + n, …) → for each chunk, the `size` before it and its own."""
        x = jnp.pad(x, [(0, 0), (0, size + count * chunk - x.shape[1]), (0, 0), (0, 0)])
        first, own = x[:, : count * chunk], x[:, size:]
        first, own = (part.reshape(batch, count, chunk, *x.shape[2:]) for part in (first, own))
        return jnp.concatenate([first[:, :, :size], own], 2)

    def with_sinks(sink: Array, x: Array) -> Array:
        sink = jnp.broadcast_to(sink[:, None], (batch, count, *sink.shape[1:]))
        return into_batch(jnp.concatenate([sink, of_chunks(x)], 2))

    keys, values = jnp.concatenate([near_k, k], 1), jnp.concatenate([near_v, v], 1)
    features = window.key_features(k).values
    sink_features, near_features = features[:, :sinks], jnp.zeros((batch, size, *features.shape[2:]), features.dtype)
    if state is not None:
        sink_features, near_features = (window.key_features(x).values for x in (sink_k, near_k))
    features = jnp.concatenate([near_features, features], 1)
    position = before[:, None] - size + jnp.arange(keys.shape[1])
    # Sinks are never distant. What is in no chunk before any other is not summed.
    summands = jnp.where((position >= sinks)[:, :, None, None], features, 0)
    cut = lambda x: _split(x[:, : count * chunk], chunk).reshape(batch * count, chunk, *x.shape[2:])  # noqa: E731
    summands, earlier_values = Features(cut(summands)), cut(values)
    added = linear.update(linear.initial_state(summands, earlier_values), summands, earlier_values)

    def sums_before(added: Array, past: Array | None) -> Array:
        added = added.reshape(batch, count, *added.shape[1:])
        sums = jnp.cumsum(added, 1) - added
        return into_batch(sums if past is None else sums + past[:, None])

    S, z = (None, None) if state is None else (state.S, state.z)
    past = LinearState(sums_before(added.S, S), sums_before(added.z, z), None)

    start = before[:, None, None] + jnp.arange(count)[:, None] * chunk  # (b or 1, chunks, 1)
    positions = start + jnp.arange(-size, chunk)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(sinks), (*positions.shape[:2], sinks)), positions], 2)
    is_sink_column = jnp.arange(positions.shape[2]) < sinks
    valid = is_sink_column | (positions >= sinks)
    masks = _near_and_distant(
        *(x.reshape(-1, x.shape[2]) for x in (start + jnp.arange(chunk), positions, valid)), window
    )
    exact, distant = (into_batch(x.reshape(len(before), count, *x.shape[1:])) for x in masks)
    out = _attend(
        jax.tree.map(into_batch, q),
        with_sinks(sink_k, keys),
        with_sinks(sink_v, values),
        exact,
        past,
        distant,
        Features(with_sinks(sink_features, features)),
    )
    return _joined(out.reshape(batch, count, *out.shape[1:]), length)


def _kept(state: WindowedState | None, k: Array, v: Array, window: Window) -> tuple[tuple[Array, Array], ...]:
    """Keys and values of the sinks, and of the `size` tokens before these; some of the latter may not be there."""
    if state is None:
        near = jnp.zeros((len(k), window.size, *k.shape[2:]), k.dtype)
        sinks = min(window.sinks, k.shape[1])
        return (k[:, :sinks], v[:, :sinks]), (near, near.astype(v.dtype))
    count = state.count[:, None]
    sink = jnp.arange(window.sinks)  # in its slot, or among the new ones
    sink = jnp.where(sink < count, sink, window.slots + jnp.minimum(sink - count, k.shape[1] - 1))
    near = window.slot(jnp.maximum(count - window.size + jnp.arange(window.size), 0))
    buffer = lambda slots, new: jnp.concatenate([jnp.swapaxes(slots, 1, 2), new.astype(slots.dtype)], 1)  # noqa: E731
    every = buffer(state.k, k), buffer(state.v, v)
    return tuple(tuple(_take(x, index) for x in every) for index in (sink, near))


def recurrent(
    q: Queries,
    k: Float[Array, "b n g d"],
    v: Float[Array, "b n g d"],
    window: Window,
    *,
    state: WindowedState | None = None,
    mask: Bool[Array, "b n"] | None = None,
) -> tuple[Float[Array, "b n g r d"], WindowedState]:
    """The RNN: the key that leaves the window enters S and z, the new one takes its slot, then the query reads all."""
    state = initial_state(k, v, window) if state is None else state
    mask = jnp.ones(v.shape[:2], bool) if mask is None else mask

    def step(state: WindowedState, inputs):
        q, k, v, is_real = inputs
        sequences, slot = jnp.arange(is_real.shape[0]), window.slot(state.count)
        old_k, old_v = state.k[sequences, :, slot], state.v[sequences, :, slot]
        leaves = is_real & (state.count >= window.slots)
        distant = linear.update(state.distant, window.key_features(old_k[:, None]), old_v[:, None], leaves[:, None])

        def written(buffer: Array, new: Array, old: Array) -> Array:
            return buffer.at[sequences, :, slot].set(jnp.where(is_real[:, None, None], new.astype(old.dtype), old))

        count = state.count + is_real
        state = WindowedState(*distant, written(state.k, k, old_k), written(state.v, v, old_v), count)
        filled = jnp.arange(window.slots) < count[:, None]
        keys, values = jnp.swapaxes(state.k, 1, 2), jnp.swapaxes(state.v, 1, 2)
        return state, _attend(jax.tree.map(lambda x: x[:, None], q), keys, values, filled[:, None], distant)[:, 0]

    per_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, mask))
    state, out = jax.lax.scan(step, state, per_token, unroll=v.shape[1] == 1)
    return jnp.moveaxis(out, 0, 1), state


def causal_attention(
    q: Queries,
    k: Array,
    v: Array,
    window: Window,
    *,
    state: WindowedState | None = None,
    mask: Bool[Array, "b n"] | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> tuple[Array, WindowedState]:
    """Causal attention in the form that suits the length; the only code that chooses."""
    if dropout and key is not None:
        return quadratic(q, k, v, window, state=state, mask=mask, dropout=dropout, key=key)
    length = v.shape[1]
    form = recurrent if length == 1 else quadratic if length <= QUADRATIC_LENGTH else chunked
    return form(q, k, v, window, state=state, mask=mask)


def weights(q: Queries, k: Float[Array, "b n g d"], window: Window) -> Float[Array, "b g n r n"]:
    """The attention weights of a whole sequence, for analysis."""
    batch, length, groups, _ = k.shape
    position = jnp.broadcast_to(jnp.arange(length), (batch, length))
    exact, distant = _near_and_distant(position, position, jnp.ones((batch, length), bool), window)
    # Each key's value is its own unit vector, so that the output has what each value is multiplied by.
    units = jnp.broadcast_to(jnp.eye(length)[:, None], (batch, length, groups, length))
    return jnp.moveaxis(_attend(q, k, units, exact, None, distant, window.key_features(k)), 1, 2)


def _with_buffer(state: WindowedState, k: Array, v: Array, window: Window, mask: Array | None) -> Keys:
    """The keys in the slots of a state, then those of a call."""
    mask = jnp.ones(k.shape[:2], bool) if mask is None else mask
    count = state.count[:, None]
    in_slots, own = window.positions(state.count), count + jnp.cumsum(mask, 1) - 1
    return Keys(
        jnp.concatenate([jnp.swapaxes(state.k, 1, 2), k.astype(state.k.dtype)], 1),
        jnp.concatenate([jnp.swapaxes(state.v, 1, 2), v.astype(state.v.dtype)], 1),
        jnp.concatenate([in_slots, own], 1),
        jnp.concatenate([in_slots < count, mask], 1),
    )


def _append(state: WindowedState, keys: Keys, window: Window) -> WindowedState:
    """The state after the tokens of a call; `keys` are those of `_with_buffer`."""
    is_new = keys.valid[:, window.slots :]
    count = state.count + is_new.sum(1)
    left = keys.valid & (keys.position >= window.sinks) & (keys.position < (count - window.size)[:, None])
    distant = linear.update(state.distant, window.key_features(keys.k), keys.v, left)
    # Each slot keeps its key, or takes the new one that has its position: the nth that is not padding.
    wanted, order = window.positions(count), jnp.argsort(~is_new, axis=1, stable=True)
    nth = wanted - state.count[:, None]
    new_index = window.slots + jnp.take_along_axis(order, jnp.clip(nth, 0, is_new.shape[1] - 1), 1)
    takes_new = (nth >= 0) & (wanted < count[:, None])
    source = jnp.where(takes_new, new_index, jnp.arange(window.slots))
    slots = lambda x: jnp.swapaxes(_take(x, source), 1, 2)  # noqa: E731
    return WindowedState(*distant, slots(keys.k), slots(keys.v), count)


def _near_and_distant(
    query_position: Int[Array, "b n"], key_position: Int[Array, "b m"], valid: Bool[Array, "b m"], window: Window
) -> tuple[Bool[Array, "b n m"], Bool[Array, "b n m"]]:
    """Which keys are exact for each query, and which are distant; later keys and those not valid are neither."""
    distance = query_position[:, :, None] - key_position[:, None, :]
    seen = valid[:, None, :] & (distance >= 0)
    near = (distance < window.size) | (key_position < window.sinks)[:, None, :]
    return seen & near, seen & ~near


def _attend(
    q: Queries,
    k: Float[Array, "b m g d"],
    v: Float[Array, "b m g e"],
    exact: Bool[Array, "b #n m"],
    past: LinearState | None,
    distant: Bool[Array, "b n m"] | None = None,
    features: Features | None = None,
    *,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "b n g r e"]:
    """The module's equation for given sets of keys; `past` has further distant keys of all queries."""
    scores = jnp.einsum("bngrd,bmgd->bgnrm", q.scaled, k, preferred_element_type=jnp.float32)
    exact = exact[:, None, :, None, :]
    scores = jnp.where(exact, scores, LOWEST)
    # The output does not depend on this maximum, so no gradient has to flow through it.
    largest = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.where(exact, jnp.exp(scores - largest[..., None]), 0)
    near, far, out = weights.sum(-1), 0.0, 0.0

    scale = _distant_scale(past, distant, features)
    log_mix = q.mix if q.features.log_scale is None else q.mix + q.features.log_scale
    log_mix = jnp.moveaxis(log_mix, 1, 2)
    log_mix = log_mix if scale is None else log_mix + scale[..., None]
    mix = jnp.exp(jnp.minimum(log_mix - largest, LARGEST))
    if distant is not None:
        similarity = _similarity(q.features, features, scale)
        similarity = jnp.where(distant[:, None, :, None, :], similarity, 0)
        weights += mix[..., None] * similarity
        far += similarity.sum(-1)
    if past is not None:
        values = q.features.values.astype(jnp.float32)
        if scale is not None:
            values *= jnp.exp(past.log_scale[:, None] - jnp.moveaxis(scale, 1, 2))[..., None, None]
        far += jnp.einsum("bngrk,bgk->bgnr", values, past.z)
        out = mix[..., None] * jnp.moveaxis(weighted_sums(jnp.moveaxis(values, 1, 2), past.S), 1, 2)

    # Random features may be negative: their sum must not reduce the normaliser.
    total = near + mix * jnp.where(far < 0, 0, far)
    total = jnp.where(total > 0, total, 1)  # padding may see no key
    weights = drop_weights(weights, dropout, key, first=0, length=None)
    out += jnp.einsum("bgnrm,bmgd->bgnrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out / total[..., None], 1, 2).astype(v.dtype)


def _similarity(q: Features, k: Features, scale: Float[Array, "b g n"] | None) -> Float[Array, "b g n r m"]:
    """φ(q)·φ(k) for all pairs, divided by exp(scale)."""
    similarity = jnp.einsum("bngrk,bmgk->bgnrm", q.values, k.values, preferred_element_type=jnp.float32)
    if scale is None:
        return similarity
    log_factor = k.log_scale.mT[:, :, None, :] - scale[..., None]
    # Positive only for keys that are not distant, which are masked; the minimum prevents an overflow there.
    return similarity * jnp.exp(jnp.minimum(log_factor, 0))[:, :, :, None]


def _distant_scale(
    past: LinearState | None, distant: Bool[Array, "b n m"] | None, features: Features | None
) -> Float[Array, "b g n"] | None:
    """The largest log_scale of the distant keys of each query; None if the feature map has none."""
    scales = []
    if past is not None and past.log_scale is not None:
        scales.append(past.log_scale[:, :, None])
    if features is not None and features.log_scale is not None:
        scales.append(jnp.where(distant[:, None], features.log_scale.mT[:, :, None, :], LOWEST).max(-1))
    return None if not scales else scales[0] if len(scales) == 1 else jnp.maximum(*scales)
