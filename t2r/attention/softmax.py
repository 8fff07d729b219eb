"""Softmax attention (the paper's §2.1), over whole sequences and over a key/value cache.

x_out_i = Σ_j softmax_j(q_i·k_j/√d) v_j. Queries are (b, n, g, r, d), keys and values (b, m, g, d), with the axes of
`feature_map.py`. The cache holds keys and values as (b, g, m, d): a decoding step then reads each head contiguously.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention.causal import drop_weights, query_blocks
from t2r.attention.products import dot_products, weighted_sums
from t2r.batch import pad_length
from t2r.kernels import load as load_kernels
from t2r.kernels.support import has_flash_attention, kernel_platform

KERNEL_LENGTH = 128  # kernels are used for longer sequences only
CACHE_BLOCKS = (256, 2048)  # slots of a cache that many queries read at once: at least, at most
BLOCK_LOGITS = 2**26  # 256 MiB: logits of all queries of all heads with a block of the cache
MASKED_LOGIT = -1e30  # finite: with −∞ a query whose keys are all masked (padding) would give NaN


class KVCache(NamedTuple):
    """The keys and values of all tokens so far, in arrays of fixed capacity."""

    k: Float[Array, "b g capacity d"]
    v: Float[Array, "b g capacity d"]
    valid: Bool[Array, "b capacity"]  # False for padding and for slots that are not written yet
    index: Int[Array, ""] | Int[Array, "b"]  # the next slot to write: one for the whole batch, or each sequence's own

    @classmethod
    def zeros(cls, batch: int, capacity: int, heads: int, head_dim: int, dtype) -> "KVCache":
        """An empty cache. Its k and v must not be one shared array of zeros, because both will be donated."""
        shape = (batch, heads, capacity, head_dim)
        valid = jnp.zeros((batch, capacity), bool)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), valid, jnp.zeros((), jnp.int32))

    @property
    def capacity(self) -> int:
        """The tokens of a sequence, or steps, that it has slots for."""
        return self.valid.shape[1]


def cache_of(k: Array, v: Array, mask: Bool[Array, "b m"] | None = None) -> KVCache:
    """A full cache of one whole sequence, with no free slots."""
    mask = jnp.ones(k.shape[:2], bool) if mask is None else mask
    return KVCache(heads_first(k), heads_first(v), mask, jnp.array(k.shape[1], jnp.int32))


def append(cache: KVCache, k: Array, v: Array, mask: Bool[Array, "b m"] | None = None) -> KVCache:
    """Writes keys and values into the next slots, which must exist: see `resized`."""
    mask = jnp.ones(k.shape[:2], bool) if mask is None else mask
    start = cache.index
    if start.ndim:  # what does not fit into the cache is dropped
        rows, slots = jnp.arange(k.shape[0])[:, None], start[:, None] + jnp.arange(k.shape[1])
        write = lambda array, new: array.at[rows, :, slots].set(new.astype(array.dtype), mode="drop")  # noqa: E731
        valid = cache.valid.at[rows, slots].set(mask, mode="drop")
        return KVCache(write(cache.k, k), write(cache.v, v), valid, start + k.shape[1])
    write = functools.partial(_write, start=start)
    valid = jax.lax.dynamic_update_slice(cache.valid, mask, (0, start))
    return KVCache(write(cache.k, k), write(cache.v, v), valid, start + k.shape[1])


def _write(array: Float[Array, "b g capacity d"], new: Float[Array, "b n g d"], start: Int[Array, ""]) -> Array:
    """The array with new keys or values in the slots from `start` on."""

    def update(array: Array, new: Array, start: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_update_slice(array, new, (0, 0, start, 0))

    def in_place(array: Array, new: Array, start: Int[Array, ""]) -> Array:
        """The same in a branch that is always taken: XLA fuses it with no reader, and so writes the cache once."""
        return jax.lax.cond(start < array.shape[2], update, lambda array, *_: array, array, new, start)

    new = heads_first(new).astype(array.dtype)
    if array.shape[0] != 1:
        return update(array, new, start)
    # XLA's CPU compiler fuses the update of one sequence's cache with each of its readers, and copies the cache for
    # each: attention to 4,096 tokens took 3.3 ms instead of 0.9 (results/NOTES.md).
    return jax.lax.platform_dependent(array, new, start, cpu=in_place, default=update)


class BeamCache(NamedTuple):
    """The keys and values of all live beams of each source, in one sequence of slots.

    What beam j adds in step t is in slot t · beams + j and stays there. When beams change places, only `path` moves.
    """

    k: Float[Array, "sources g slots d"]
    v: Float[Array, "sources g slots d"]
    # The beam whose slot each live beam attends to at each step, plus 1; 0: there is none yet.
    path: Int[Array, "sources beams steps"]
    index: Int[Array, "sources"]  # the next step

    @classmethod
    def like(cls, cache: KVCache, beams: int) -> "BeamCache":
        """An empty cache of the same size, of which each `beams` sequences have one source."""
        sequences, heads, steps, head_dim = cache.k.shape
        sources, shape = sequences // beams, (sequences // beams, heads, steps * beams, head_dim)
        path = jnp.zeros((sources, beams, steps), jnp.int32)
        return cls(jnp.zeros(shape, cache.k.dtype), jnp.zeros(shape, cache.v.dtype), path, path[:, 0, 0])

    @property
    def capacity(self) -> int:
        """The steps that it has slots for."""
        return self.path.shape[2]

    def reordered(self, parents: Int[Array, "sequences"]) -> "BeamCache":
        """With beam parents[i], of all beams of all sources, at i."""
        return self._replace(path=self.path.reshape(len(parents), -1)[parents].reshape(self.path.shape))


def append_beams(cache: BeamCache, k: Array, v: Array) -> BeamCache:
    """Writes one key and value of each beam; what does not fit into the cache is dropped."""
    sources, beams, _ = cache.path.shape
    rows, beam, step = jnp.arange(sources)[:, None], jnp.arange(beams), cache.index[:, None]

    def write(array: Array, new: Float[Array, "b 1 g d"]) -> Array:
        by_source = new.reshape(sources, beams, *new.shape[2:]).astype(array.dtype)
        return array.at[rows, :, step * beams + beam].set(by_source, mode="drop")

    path = cache.path.at[rows, beam, step].set(beam + 1, mode="drop")
    return BeamCache(write(cache.k, k), write(cache.v, v), path, cache.index + 1)


def resized(cache: KVCache | BeamCache, steps: int) -> KVCache | BeamCache:
    """The cache with room for this many steps; those that it has no room for are lost."""

    def fit(x: Array, axis: int, size: int) -> Array:
        x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
        return jnp.pad(x, [(0, size - x.shape[axis] if axis == i else 0) for i in range(x.ndim)])

    if isinstance(cache, KVCache):
        return cache._replace(k=fit(cache.k, 2, steps), v=fit(cache.v, 2, steps), valid=fit(cache.valid, 1, steps))
    slots = steps * cache.path.shape[1]
    return cache._replace(k=fit(cache.k, 2, slots), v=fit(cache.v, 2, slots), path=fit(cache.path, 2, steps))


def attend_beams(q: Float[Array, "b 1 g r d"], cache: BeamCache, scale: float, window: int = 0) -> Array:
    """Attention of each beam to the slots on its path: all beams of a source are queries to one sequence."""
    sources, beams, steps = cache.path.shape
    allowed = cache.path[..., None] == jnp.arange(1, beams + 1)
    if window:
        allowed &= (cache.index[:, None] - jnp.arange(steps) <= window)[:, None, :, None]
    queries = q.reshape(sources, beams, *q.shape[2:])
    return attend(queries, cache.k, cache.v, allowed.reshape(sources, beams, -1), scale).reshape(q.shape)


def heads_first(x: Float[Array, "b m g d"]) -> Float[Array, "b g m d"]:
    """Keys or values in the layout of the cache."""
    return jnp.swapaxes(x, 1, 2)


def weights(q: Array, k: Array, allowed: Bool[Array, "#b #n m"], scale: float) -> Float[Array, "b g n r m"]:
    """softmax(scale · q·k) over the allowed keys, in float32."""
    logits = dot_products(q * scale, k)
    return jax.nn.softmax(jnp.where(allowed[:, None, :, None, :], logits, MASKED_LOGIT), axis=-1)


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
    """Σ_j softmax_j(scale · q·k_j) v_j over the allowed keys.

    For a block of queries of a longer sequence, `offset` is the position of the first and `length` is the sequence's:
    dropout needs them (see `drop_weights`).
    """
    distribution = drop_weights(weights(q, k, allowed, scale), dropout, key, first=offset, length=length)
    return weighted_sums(distribution.astype(v.dtype), v)


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
    """`attend` with a causal mask, in the form that suits the device; few of the masked pairs are computed."""
    length, drops = q.shape[1], bool(dropout) and key is not None
    if mask is None and not window:
        on_gpu = drops and length > KERNEL_LENGTH and kernel_platform(kernels, q, v) == "gpu"
        if on_gpu and (kernel := load_kernels("attention_pairs")) is not None:
            return kernel.attention(q, k, v, scale=scale, dropout=dropout, key=key)
        if not drops and kernels != "off" and has_flash_attention(q):
            return _flash_attention(q, k, v, scale)
    k, v, allowed, outs = heads_first(k), heads_first(v), causal_mask(length, mask, window), []
    for first, last in query_blocks(length):
        block_allowed = allowed[:, first:last, :last]
        block_q, block_k, block_v = q[:, first:last], k[:, :, :last], v[:, :, :last]
        dropout_options = dict(offset=first, length=length, dropout=dropout, key=key)
        outs.append(attend(block_q, block_k, block_v, block_allowed, scale, **dropout_options))
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, 1)


def _flash_attention(q: Array, k: Array, v: Array, scale: float) -> Float[Array, "b n g r d"]:
    batch, n, groups, per_group, head_dim = q.shape
    flat_q = q.reshape(batch, n, groups * per_group, head_dim)
    padded = [pad_length(x, n + n % 2) for x in (flat_q, k, v)]  # cuDNN's backward pass needs an even length
    out = jax.nn.dot_product_attention(*padded, scale=scale, is_causal=True, implementation="cudnn")
    return out[:, :n].reshape(q.shape)


def causal_mask(length: int, mask: Bool[Array, "b m"] | None = None, window: int = 0) -> Bool[Array, "#b n m"]:
    """Whether query n may attend to key m of the same sequence: m ≤ n, not padding, and among the last `window`."""
    allowed = (jnp.arange(length) <= jnp.arange(length)[:, None])[None]
    if window:
        position = jnp.arange(length)[None] if mask is None else jnp.cumsum(mask, 1)
        allowed &= position[:, :, None] - position[:, None, :] < window
    return allowed if mask is None else allowed & mask[:, None, :]


def cached_mask(
    cache: KVCache, length: int, window: int = 0, *, block: tuple[Int[Array, ""], int] | None = None
) -> Bool[Array, "b n m"]:
    """`causal_mask` for the queries of the last `length` tokens written, over all slots of the cache.

    Or over a block of them: its first slot, and how many it has.
    """
    first, size = (0, cache.valid.shape[1]) if block is None else block
    of_block = lambda x: x if block is None else jax.lax.dynamic_slice_in_dim(x, first, size, 1)  # noqa: E731
    slots = first + jnp.arange(size)
    queries = cache.index[..., None] - length + jnp.arange(length)  # (n), or (b, n)
    queries = jnp.broadcast_to(queries, (cache.valid.shape[0], length))
    allowed = (slots <= queries[:, :, None]) & of_block(cache.valid)[:, None, :]
    if window:
        position = jnp.cumsum(cache.valid, 1)  # padding has no position
        distance = jnp.take_along_axis(position, queries, 1)[:, :, None] - of_block(position)[:, None, :]
        allowed &= distance < window
    return allowed


def attend_cache(
    q: Float[Array, "b n g r d"], cache: KVCache, scale: float, *, window: int = 0, **dropout_options: Any
) -> Float[Array, "b n g r d"]:
    """Attention of the last tokens written to all of the cache. Many queries read a long cache in blocks."""
    length, capacity = q.shape[1], cache.valid.shape[1]
    known = [n for n in q.shape[:-1] if isinstance(n, int)]  # the sizes of an exported program may be symbols
    size = _block_size(math.prod(known))
    drops = bool(dropout_options.get("dropout")) and dropout_options.get("key") is not None
    if length == 1 or capacity < 2 * size or drops:
        return attend(q, cache.k, cache.v, cached_mask(cache, length, window), scale, **dropout_options)
    return _attend_in_blocks(q, cache, scale, window, size)


def _block_size(queries: int) -> int:
    """Slots of a cache in a block: a power of two, smaller the more queries of all heads there are."""
    least, most = CACHE_BLOCKS
    return min(most, max(least, 2 ** int(math.log2(max(BLOCK_LOGITS // queries, 1)))))


def _attend_in_blocks(q: Array, cache: KVCache, scale: float, window: int, size: int) -> Float[Array, "b n g r d"]:
    """`attend` by blocks of the slots that are written, with a running maximum: the logits of one block at a time."""
    (batch, length, groups, per_group, _), capacity = q.shape, cache.valid.shape[1]
    scaled, shape = q * scale, (batch, groups, length, per_group)

    def add_block(number: Int[Array, ""], sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, out = sums
        first = jnp.minimum(number * size, capacity - size)  # the last block may overlap the one before
        k, v = (jax.lax.dynamic_slice_in_dim(x, first, size, 2) for x in (cache.k, cache.v))
        is_new = first + jnp.arange(size) >= number * size
        allowed = cached_mask(cache, length, window, block=(first, size)) & is_new
        allowed = allowed[:, None, :, None, :]
        logits = jnp.einsum("bngrd,bgmd->bgnrm", scaled, k, preferred_element_type=jnp.float32)
        logits = jnp.where(allowed, logits, MASKED_LOGIT)
        new_largest = jnp.maximum(largest, logits.max(-1))
        factor = jnp.exp(largest - new_largest)
        weights = jnp.where(allowed, jnp.exp(logits - new_largest[..., None]), 0)
        added = jnp.einsum("bgnrm,bgmd->bgnrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_largest, total * factor + weights.sum(-1), out * factor[..., None] + added

    nothing = jnp.full(shape, MASKED_LOGIT), jnp.zeros(shape), jnp.zeros((*shape, cache.v.shape[-1]))
    written = jnp.minimum(cache.index.max(), capacity)
    _, total, out = jax.lax.fori_loop(0, -(-written // size), add_block, nothing)
    out /= jnp.where(total > 0, total, 1)[..., None]  # padding may see no key
    return jnp.swapaxes(out, 1, 2).astype(cache.v.dtype)
