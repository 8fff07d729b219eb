"""Linear attention as pure functions: quadratic, chunked, recurrent. One signature, one function of the inputs.

With S = Σ φ(k_j) ⊗ v_j and z = Σ φ(k_j) over the keys a query may see (those of `state`, then those of
this call), the output is φ(q)·S / normalizer(φ(q)·z). Queries φ(q): (b, n, g, r, k), keys φ(k):
(b, m, g, k), values: (b, m, g, d); dimensions as in `feature_map.py`. `mask` (b, m) is False where a key
is padding: it then enters neither S nor z. Each form returns the output (b, n, g, r, d), in the values'
type, and the state after the last key, in float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from t2r.attention.causal import drop_weights, query_blocks
from t2r.attention.feature_map import Features
from t2r.kernels import load as load_kernels
from t2r.kernels.support import is_one_device, kernel_platform
from t2r.normalizer import Normalizer

# Stands for −∞ where −∞ − (−∞) must not become NaN.
LOWEST = -1e30
# Up to this length all pairs of query and key cost less than the state between chunks.
QUADRATIC_LENGTH = 128


class LinearState(NamedTuple):
    """All that linear attention remembers. S and z are kept relative to exp(log_scale) where φ needs it."""

    S: Float[Array, "b g k d"]
    z: Float[Array, "b g k"]
    log_scale: Float[Array, "b g"] | None = None

    @classmethod
    def zeros(cls, batch: Any, heads: int, features: int, head_dim: int, *, scaled: bool = False) -> "LinearState":
        """The state before the first token; `scaled` for maps whose keys carry a log_scale. In a program for any number
        of texts, `batch` is a symbol."""
        log_scale = jnp.full((batch, heads), LOWEST) if scaled else None
        return cls(jnp.zeros((batch, heads, features, head_dim)), jnp.zeros((batch, heads, features)), log_scale)


def update(state: LinearState, k: Features, v: Array, mask: Bool[Array, "b m"] | None = None) -> LinearState:
    """Adds any number of keys and values to S and z."""
    k = _without_padding(k, mask)
    S, z, log_scale = state
    values = k.values
    if k.log_scale is not None:
        log_scale = jnp.maximum(state.log_scale, k.log_scale.max(1))
        values = values.astype(jnp.float32) * jnp.exp(k.log_scale - log_scale[:, None])[..., None]
        shrink = jnp.exp(state.log_scale - log_scale)
        S, z = S * shrink[..., None, None], z * shrink[..., None]
    return LinearState(S + _outer_products(values, v), z + values.sum(1, dtype=jnp.float32), log_scale)


def _outer_products(values: Float[Array, "b m g k"], v: Float[Array, "b m g d"]) -> Float[Array, "b g k d"]:
    """Σ k vᵀ over all keys, in float32."""
    product = functools.partial(jnp.einsum, "bmgk,bmgd->bgkd", preferred_element_type=jnp.float32)
    widened = lambda *arrays: product(*(x.astype(jnp.float32) for x in arrays))  # noqa: E731
    # XLA for CPUs compiles such a product of bfloat16 in any layout, but cannot run it in some.
    return jax.lax.platform_dependent(values, v, cpu=widened, default=product)


def query_state(state: LinearState, q: Features, normalizer: Normalizer, dtype=None) -> Float[Array, "b n g r d"]:
    """What the queries see in the state: φ(q)·S / normalizer(φ(q)·z)."""
    values = q.values.astype(jnp.float32)
    above = jnp.einsum("bngrk,bgkd->bngrd", values, state.S)
    below = jnp.einsum("bngrk,bgk->bngr", values, state.z)
    return (above / normalizer(below)[..., None]).astype(dtype or q.values.dtype)


def quadratic(
    q: Features,
    k: Features,
    v: Float[Array, "b m g d"],
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    causal: bool = True,
    offset: int = 0,
    length: int | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "b n g r d"], LinearState]:
    """The definition: all pairs of query and key. Alone in having dropout, which falls on normalised weights.

    The first query stands beside key number `offset`; `length` is that of the sequence these are a block of.
    """
    older, state = state, initial_state(k, v) if state is None else state
    similarity, kept = _similarities(q, k, state, mask, causal, offset)
    below = similarity.sum(-1)
    if older is not None:
        values = q.values.astype(jnp.float32) * kept
        below += jnp.einsum("bngrk,bgk->bgnr", values, state.z)
    divisor = normalizer(below)[..., None]
    # As on the normalised weights: each is dropped or kept whole.
    similarity = drop_weights(similarity, dropout, key, first=offset, length=length)
    out = jnp.einsum("bgnrm,bmgd->bgnrd", similarity.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if older is not None:
        out += jnp.einsum("bngrk,bgkd->bgnrd", values, state.S)
    out /= divisor
    return jnp.moveaxis(out, 1, 2).astype(v.dtype), update(state, k, v, mask)


def weights(
    q: Features, k: Features, normalizer: Normalizer, *, mask: Array | None = None, causal: bool = True
) -> Float[Array, "b g n r m"]:
    """The attention distribution itself, for analysis."""
    state = initial_state(k, jnp.zeros((*k.values.shape[:-1], 0)))
    similarity, _ = _similarities(q, k, state, mask, causal)
    return similarity / normalizer(similarity.sum(-1))[..., None]


def chunked(
    q: Features,
    k: Features,
    v: Float[Array, "b m g d"],
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    causal: bool = True,
    chunk: int = 128,
) -> tuple[Float[Array, "b n g r d"], LinearState]:
    """Quadratic within chunks, recurrent between them: linear in length, and still matrix products."""
    state = initial_state(k, v) if state is None else state
    if not causal:  # every query sees every key, so there is nothing to cut
        state = update(state, k, v, mask)
        return query_state(state, q, normalizer, v.dtype), state

    batch, length = v.shape[:2]
    count = -(-length // chunk)
    mask = jnp.ones((batch, length), bool) if mask is None else mask

    def cut(x: Array) -> Array:  # (b, n, …) → (b, chunks, chunk, …), the end padded and so masked
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, count, chunk, *x.shape[2:])

    chunks = jax.tree.map(cut, (q, k, v, mask))
    form = _chunks_at_once if k.log_scale is None else _chunk_by_chunk
    out, state = form(*chunks, normalizer, state)
    return out.reshape(batch, count * chunk, *out.shape[3:])[:, :length], state


def _chunks_at_once(q: Features, k: Features, v: Array, mask: Array, normalizer: Normalizer, state: LinearState):
    """All chunks are one batch, once each knows the state before it: the sum of those that came earlier."""
    batch, count = v.shape[:2]
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(batch * count, *x.shape[2:]), tree)  # noqa: E731
    q, k, v, mask = flat((q, k, v, mask))
    each = update(initial_state(k, v), k, v, mask)
    after = jax.tree.map(
        lambda first, x: first[:, None] + jnp.cumsum(x.reshape(batch, count, *x.shape[1:]), 1), state, each
    )
    before = jax.tree.map(lambda first, x: jnp.concatenate([first[:, None], x[:, :-1]], 1), state, after)
    out, _ = quadratic(q, k, v, normalizer, state=flat(before), mask=mask)
    return out.reshape(batch, count, *out.shape[1:]), jax.tree.map(lambda x: x[:, -1], after)


def _chunk_by_chunk(q: Features, k: Features, v: Array, mask: Array, normalizer: Normalizer, state: LinearState):
    """One after the other, for features on a scale that the largest key so far decides."""

    def one_chunk(state, inputs):
        q, k, v, mask = inputs
        out, state = quadratic(q, k, v, normalizer, state=state, mask=mask)
        return state, out

    state, out = jax.lax.scan(one_chunk, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, mask)))
    return jnp.moveaxis(out, 0, 1), state


def recurrent(
    q: Features,
    k: Features,
    v: Float[Array, "b m g d"],
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    causal: bool = True,
) -> tuple[Float[Array, "b n g r d"], LinearState]:
    """The RNN: for each token, update S and z, then read them."""
    state = initial_state(k, v) if state is None else state
    mask = jnp.ones(v.shape[:2], bool) if mask is None else mask

    def step(state, inputs):
        q, k, v, mask = jax.tree.map(lambda x: x[:, None], inputs)
        state = update(state, k, v, mask)
        return state, query_state(state, q, normalizer, v.dtype)[:, 0] if causal else None

    per_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q if causal else None, k, v, mask))
    if causal:
        state, out = jax.lax.scan(step, state, per_token, unroll=v.shape[1] == 1)
        return jnp.moveaxis(out, 0, 1), state
    state, _ = jax.lax.scan(step, state, per_token)
    return query_state(state, q, normalizer, v.dtype), state


def causal_attention(
    q: Features,
    k: Features,
    v: Array,
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
    kernels: str = "auto",
) -> tuple[Array, LinearState]:
    """Causal attention in the form that suits the length and the device. The one place that chooses."""
    length, drops = v.shape[1], bool(dropout) and key is not None
    platform = kernel_platform(kernels, q.values, v) if k.log_scale is None else None
    if platform and length > QUADRATIC_LENGTH and state is None and (platform == "gpu" or not drops):
        kernel = load_kernels("attention_pairs" if drops else "attention_chunked")
        if kernel is not None:
            k = _without_padding(k, mask)
            after = update(initial_state(k, v), k, v)
            how = dict(dropout=dropout, key=key) if drops else dict(platform=platform)
            return kernel.attention(q.values, k.values, v, normalizer=normalizer, **how), after
    if drops:
        return _in_blocks(q, k, v, normalizer, state, mask, dropout, key)
    if length == 1:
        in_place = platform and kernels == "on" and state is not None and is_one_device()
        if in_place and (kernel := load_kernels("attention_step")) is not None:
            key_features = _without_padding(k, mask).values[:, 0]
            out, S, z = kernel.step(q.values[:, 0], key_features, v[:, 0], state.S, state.z, normalizer)
            return out[:, None], LinearState(S, z)
        return recurrent(q, k, v, normalizer, state=state, mask=mask)
    form = quadratic if length <= QUADRATIC_LENGTH else chunked
    return form(q, k, v, normalizer, state=state, mask=mask)


def _in_blocks(q, k, v, normalizer, state, mask, dropout, key) -> tuple[Array, LinearState]:
    """The quadratic form without most of the pairs that causality forbids."""

    def cut(x: Any, first: int, last: int) -> Any:
        return jax.tree.map(lambda array: array[:, first:last], x)

    outs = []
    chance = dict(length=v.shape[1], dropout=dropout, key=key)
    for first, last in query_blocks(v.shape[1]):
        here, (keys, values, seen) = cut(q, first, last), cut((k, v, mask), 0, last)
        out, after = quadratic(here, keys, values, normalizer, state=state, mask=seen, offset=first, **chance)
        outs.append(out)
    return jnp.concatenate(outs, 1), after


def initial_state(k: Features, v: Array) -> LinearState:
    """The empty state that fits these keys and values."""
    batch, _, heads, features = k.values.shape
    return LinearState.zeros(batch, heads, features, v.shape[-1], scaled=k.log_scale is not None)


def _without_padding(k: Features, mask: Array | None) -> Features:
    if mask is None:
        return k
    values = jnp.where(mask[..., None, None], k.values, 0)
    return Features(values, None if k.log_scale is None else jnp.where(mask[..., None], k.log_scale, LOWEST))


def _similarities(
    q: Features, k: Features, state: LinearState, mask, causal: bool, offset: int = 0
) -> tuple[Array, Array | float]:
    """φ(q)·φ(k) of all pairs (b, g, n, r, m), zero where not allowed, and the factor left to the older state.

    With a log_scale both are relative to the running maximum that the recurrent form would have at each query.
    """
    k = _without_padding(k, mask)
    n, m = q.values.shape[1], k.values.shape[1]
    similarity = jnp.einsum("bngrk,bmgk->bgnrm", q.values, k.values, preferred_element_type=jnp.float32)
    kept = 1.0
    if k.log_scale is not None:
        last = (
            jax.lax.cummax(k.log_scale, axis=1)[:, offset : offset + n] if causal else k.log_scale.max(1, keepdims=True)
        )
        running = jnp.maximum(last, state.log_scale[:, None])  # (b, n or 1, g)
        scale = k.log_scale.mT[:, :, None, :] - running.mT[..., None]  # (b, g, n or 1, m)
        similarity *= jnp.exp(jnp.minimum(scale, 0))[:, :, :, None]  # above 0 only where causality forbids
        kept = jnp.exp(state.log_scale[:, None] - running)[..., None, None]
    if causal:
        allowed = jnp.arange(m) <= offset + jnp.arange(n)[:, None]
        similarity = jnp.where(allowed[:, None, :], similarity, 0)
    return similarity, kept
