"""Softmax attention: over the keys at hand, and over a cache that grows by a token a step.

Queries (b, n, g, r, d); dimensions as in `feature_map.py`. Keys and values come as (b, m, g, d) and are
kept as (b, g, m, d): a decoding step then reads the cache as it lies in memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention.causal import drop_weights, query_blocks
from t2r.batch import pad_length
from t2r.kernels import load as load_kernels
from t2r.kernels.support import kernel_platform

KERNEL_LENGTH = 128  # kernels are for longer sequences
NEGATIVE = -1e30  # finite, so that a query that may see nothing (padding) gives no NaN


class KVCache(NamedTuple):
    """All keys and values so far, in arrays of fixed capacity."""

    k: Float[Array, "b g capacity d"]
    v: Float[Array, "b g capacity d"]
    valid: Bool[Array, "b capacity"]  # False for padding and for slots not yet written
    index: Int[Array, ""]  # the next slot; the same for the whole batch

    @classmethod
    def zeros(cls, batch: int, capacity: int, heads: int, head_dim: int, dtype) -> "KVCache":
        """An empty cache. Keys and values are two arrays even while equal: they will be donated."""
        shape = (batch, heads, capacity, head_dim)
        valid = jnp.zeros((batch, capacity), bool)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), valid, jnp.zeros((), jnp.int32))


def cache_of(k: Array, v: Array, mask: Bool[Array, "b m"] | None = None) -> KVCache:
    """A full cache of a sequence that is known whole."""
    mask = jnp.ones(k.shape[:2], bool) if mask is None else mask
    return KVCache(heads_first(k), heads_first(v), mask, jnp.array(k.shape[1], jnp.int32))


def append(cache: KVCache, k: Array, v: Array, mask: Bool[Array, "b m"] | None = None) -> KVCache:
    """Writes keys and values into the next slots. Their number must fit: see `grow`."""
    mask = jnp.ones(k.shape[:2], bool) if mask is None else mask
    start = cache.index
    return KVCache(
        jax.lax.dynamic_update_slice(cache.k, heads_first(k.astype(cache.k.dtype)), (0, 0, start, 0)),
        jax.lax.dynamic_update_slice(cache.v, heads_first(v.astype(cache.v.dtype)), (0, 0, start, 0)),
        jax.lax.dynamic_update_slice(cache.valid, mask, (0, start)),
        start + k.shape[1],
    )


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` tokens in all."""
    extra = (0, max(0, capacity - cache.valid.shape[1]))
    keys = [(0, 0), (0, 0), extra, (0, 0)]
    return KVCache(jnp.pad(cache.k, keys), jnp.pad(cache.v, keys), jnp.pad(cache.valid, [(0, 0), extra]), cache.index)


def heads_first(x: Float[Array, "b m g d"]) -> Float[Array, "b g m d"]:
    """The layout in which keys and values are kept."""
    return jnp.swapaxes(x, 1, 2)


def weights(q: Array, k: Array, allowed: Bool[Array, "#b #n m"], scale: float) -> Float[Array, "b g n r m"]:
    """The attention distribution, in float32."""
    logits = jnp.einsum("bngrd,bgmd->bgnrm", q * scale, k, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(allowed[:, None, :, None, :], logits, NEGATIVE), axis=-1)


def attend(
    q: Float[Array, "b n g r d"],
    k: Float[Array, "b g m d"],
    v: Float[Array, "b g m d"],
    allowed: Bool[Array, "#b #n m"],
    scale: float,
    *,
    offset: int = 0,
    length: int | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "b n g r d"]:
    """Σ softmax(scale · q·k) v over the allowed keys; with `offset` and `length`, of a block of a longer sequence."""
    distribution = drop_weights(weights(q, k, allowed, scale), dropout, key, first=offset, length=length)
    return jnp.einsum("bgnrm,bgmd->bngrd", distribution.astype(v.dtype), v)


def causal_attend(
    q: Float[Array, "b n g r d"],
    k: Float[Array, "b n g d"],
    v: Float[Array, "b n g d"],
    scale: float,
    *,
    mask: Bool[Array, "b n"] | None = None,
    window: int = 0,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
    kernels: str = "auto",
) -> Float[Array, "b n g r d"]:
    """The same over each token's own past, without most of the pairs that causality forbids."""
    length, drops = q.shape[1], bool(dropout) and key is not None
    if mask is None and not window:
        on_gpu = drops and length > KERNEL_LENGTH and kernel_platform(kernels, q, v) == "gpu"
        if on_gpu and (kernel := load_kernels("attention_pairs")) is not None:
            return kernel.attention(q, k, v, scale=scale, dropout=dropout, key=key)
        if not drops and kernels != "off" and has_flash_attention(q):
            return _flash_attention(q, k, v, scale)
    k, v, allowed, outs = heads_first(k), heads_first(v), causal_mask(length, mask, window), []
    for first, last in query_blocks(length):
        past, seen = (slice(None), slice(None), slice(last)), allowed[:, first:last, :last]
        block = dict(offset=first, length=length, dropout=dropout, key=key)
        outs.append(attend(q[:, first:last], k[past], v[past], seen, scale, **block))
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, 1)


def has_flash_attention(q: Array) -> bool:
    """Whether cuDNN's kernel, which never writes the weights down and drops none of them, takes these queries."""
    return jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0


def _flash_attention(q: Array, k: Array, v: Array, scale: float) -> Float[Array, "b n g r d"]:
    batch, n, groups, per_group, size = q.shape
    flat = q.reshape(batch, n, groups * per_group, size)
    even = [pad_length(x, n + n % 2) for x in (flat, k, v)]  # its backward pass takes no other lengths
    out = jax.nn.dot_product_attention(*even, scale=scale, is_causal=True, implementation="cudnn")
    return out[:, :n].reshape(q.shape)


def causal_mask(length: int, mask: Bool[Array, "b m"] | None = None, window: int = 0) -> Bool[Array, "#b n m"]:
    """Which keys each query of the same sequence may see: those up to its own, of a `window` only the last so many."""
    allowed = (jnp.arange(length) <= jnp.arange(length)[:, None])[None]
    if window:
        position = jnp.arange(length)[None] if mask is None else jnp.cumsum(mask, 1)
        allowed &= position[:, :, None] - position[:, None, :] < window
    return allowed if mask is None else allowed & mask[:, None, :]


def cached_mask(cache: KVCache, length: int, window: int = 0) -> Bool[Array, "b n m"]:
    """Which slots the queries of the last `length` tokens written may see."""
    slots = jnp.arange(cache.valid.shape[1])
    queries = cache.index - length + jnp.arange(length)
    allowed = (slots <= queries[:, None])[None] & cache.valid[:, None, :]
    if window:
        position = jnp.cumsum(cache.valid, 1)  # padding takes none
        allowed &= jnp.take(position, queries, 1)[:, :, None] - position[:, None, :] < window
    return allowed
