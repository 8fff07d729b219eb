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

    def slot(self, position: Int[Array, "b"]) -> Int[Array, "b"]:
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
    """Quadratic within chunks of queries, recurrent between them: linear in length."""
    batch, length = v.shape[:2]
    # Without a state and a mask positions are known when this is compiled, and S and z are plain sums.
    at_once = state is None and mask is None and jax.eval_shape(window.key_features, k).log_scale is None
    chunk = max(chunk, window.size) if at_once else chunk
    count = -(-length // chunk)
    state = initial_state(k, v, window) if state is None else state
    mask = jnp.ones((batch, length), bool) if mask is None else mask

    def split(x: Array) -> Array:  # (b, n, …) → (b, chunks, chunk, …); padding is zero, and so masked
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, count, chunk, *x.shape[2:])

    if at_once:
        out, state = _parallel_chunks(jax.tree.map(split, q), k, v, window), append(state, k, v, window)
    else:

        def one_chunk(state, inputs):
            q, k, v, mask = inputs
            out, state = quadratic(q, k, v, window, state=state, mask=mask)
            return state, out

        chunks = jax.tree.map(lambda x: jnp.moveaxis(split(x), 1, 0), (q, k, v, mask))
        state, out = jax.lax.scan(one_chunk, state, chunks)
        out = jnp.moveaxis(out, 0, 1)
    return out.reshape(batch, count * chunk, *out.shape[3:])[:, :length], state


def _parallel_chunks(q: Queries, k: Array, v: Array, window: Window) -> Float[Array, "b chunks chunk g r d"]:
    """All chunks of queries as one batch, from the beginning of the sequence.

    The keys of a chunk are the sinks, the `size` tokens before the chunk, and its own. S and z before it are the sums
    over earlier keys, which are distant for all of its queries. Chunks are at least `size` long.
    """
    batch, count, chunk = q.mix.shape[:3]
    size, length = window.size, k.shape[1]
    sinks = min(window.sinks, length)
    into_batch = lambda x: x.reshape(batch * count, *x.shape[2:])  # noqa: E731

    def shifted(x: Array) -> Array:
        """Chunk c has the positions c · chunk − size, …: its first `size` are those before chunk c of the queries."""
        x = jnp.pad(x, [(0, 0), (size, count * chunk - length), (0, 0), (0, 0)])[:, : count * chunk]
        return x.reshape(batch, count, chunk, *x.shape[2:])

    def of_chunks(x: Array) -> Array:
        """What each chunk has of keys, values or features: of sinks, then of the tokens before it, then its own."""
        own = jnp.pad(x, [(0, 0), (0, count * chunk - length), (0, 0), (0, 0)]).reshape(shifted(x).shape)
        first = jnp.broadcast_to(x[:, None, :sinks], (batch, count, sinks, *x.shape[2:]))
        return into_batch(jnp.concatenate([first, shifted(x)[:, :, :size], own], 2))

    features = window.key_features(k).values
    summands = jnp.where((jnp.arange(length) >= sinks)[:, None, None], features, 0)  # sinks are never distant
    summands, values = Features(into_batch(shifted(summands))), into_batch(shifted(v))
    added = linear.update(linear.initial_state(summands, values), summands, values)
    before = lambda x: jnp.cumsum(x, 1) - x  # noqa: E731
    past = jax.tree.map(lambda x: into_batch(before(x.reshape(batch, count, *x.shape[1:]))), added)

    start = jnp.arange(count)[:, None] * chunk
    position = jnp.concatenate(
        [jnp.broadcast_to(jnp.arange(sinks), (count, sinks)), start + jnp.arange(-size, chunk)], 1
    )
    is_sink_column = jnp.arange(position.shape[1]) < sinks
    valid = is_sink_column | ((position >= sinks) & (position < length))
    exact, distant = _near_and_distant(start + jnp.arange(chunk), position, valid, window)
    exact, distant = (into_batch(jnp.broadcast_to(mask, (batch, *mask.shape))) for mask in (exact, distant))
    q = jax.tree.map(into_batch, q)
    out = _attend(q, of_chunks(k), of_chunks(v), exact, past, distant, Features(of_chunks(features)))
    return out.reshape(batch, count, *out.shape[1:])


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
    slots = lambda x: jnp.swapaxes(jnp.take_along_axis(x, source[:, :, None, None], 1), 1, 2)  # noqa: E731
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
    log_mix = jnp.moveaxis(q.mix, 1, 2)
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
        out = mix[..., None] * jnp.einsum("bngrk,bgkd->bgnrd", values, past.S)

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
