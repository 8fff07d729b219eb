"""The loss over a large vocabulary: logits exist for some rows at a time, forwards and backwards, and where needed.

It has a derivative of its own: the one JAX would derive multiplies float32 logits by float32 copies of the tables, and
computes logits over rare words for tokens that are none of them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from t2r.layout import RULES

# Logits that are held at once: half a gibibyte in float32.
LOGITS = 2**27
ALIGNED = 128


def cross_entropy(
    x: Float[Array, "b n e"],
    table: Float[Array, "v e"],
    targets: Int[Array, "b n"],
    inside: Bool[Array, "b n"] | None = None,
    smoothing: float = 0.0,
) -> Float[Array, "b n"]:
    """-log softmax(x tableᵀ) at each target, of which `smoothing` is spread evenly over all words.

    With `inside`, only of the tokens where it is True; 0 for the others, which cost nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh is None or mesh.empty else dict(mesh.shape)
    ways = math.prod(sizes.get(axis, 1) for axis in RULES["batch"])
    # Devices that share the words of a vocabulary must go through the same rows: all of them.
    some = inside is not None and all(sizes.get(axis, 1) == 1 for axis in RULES["vocabulary"])
    inside = jnp.ones(targets.shape, bool) if inside is None else inside
    loss = functools.partial(_of_rows, some=some, smoothing=smoothing)
    if ways > 1 and len(x) % ways == 0:  # each device has its own rows
        rows = PartitionSpec(RULES["batch"])
        axes = {"in_specs": (rows, PartitionSpec(), rows, rows), "out_specs": rows, "axis_names": set(RULES["batch"])}
        loss = jax.shard_map(loss, **axes, check_vma=False)
    return loss(x, table, targets, inside)


def _of_rows(x: Array, table: Array, targets: Array, inside: Array, *, some: bool, smoothing: float) -> Array:
    """The same, on one device; if only `some` tokens are inside, these first and the others not at all."""
    flat, wanted, used = x.reshape(-1, x.shape[-1]), targets.reshape(-1), inside.reshape(-1)
    if not some:
        losses = _loss(flat, table, wanted, None, smoothing)
        return jnp.where(used, losses, 0).reshape(targets.shape)
    order = jnp.argsort(~used, stable=True)
    losses = _loss(flat[order], table, wanted[order], used.sum(), smoothing)
    return jnp.zeros_like(losses).at[order].set(losses, unique_indices=True).reshape(targets.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(x: Float[Array, "t e"], table: Float[Array, "v e"], targets: Int[Array, "t"], count, smoothing: float):
    """The losses of the first `count` rows, 0 for the rest; None: of all, whose number is known when compiled."""
    return _forward(x, table, targets, count, smoothing)[0]


def _forward(x: Array, table: Array, targets: Array, count, smoothing: float) -> tuple[Array, tuple]:
    rows, padded = _chunks(len(x), len(table))
    xs, ys, words = _pad(x, padded), _pad(targets, padded), _words(table, x.dtype)

    def chunk(number: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = _product("te,ve->tv", _cut(xs, number, rows), words)
        total = jax.nn.logsumexp(logits, -1, where=_is_word(logits, table))
        hit = jnp.take_along_axis(logits, _cut(ys, number, rows)[:, None], -1)[:, 0]
        loss = total - (1 - smoothing) * hit  # of words there are none of, logits are 0
        if smoothing:
            loss -= smoothing * logits.sum(-1) / len(table)
        return _put(found[0], loss, number, rows), _put(found[1], total, number, rows)

    nothing = jnp.zeros(padded, jnp.float32)
    losses, totals = jax.lax.fori_loop(0, _number_of_chunks(count, rows, padded), chunk, (nothing, nothing))
    return _first(losses[: len(x)], count), (x, table, targets, count, totals)


def _backward(smoothing: float, kept: tuple, gradient: Array) -> tuple:
    x, table, targets, count, totals = kept
    rows, padded = _chunks(len(x), len(table))
    xs, ys, words = _pad(x, padded), _pad(targets, padded), _words(table, x.dtype)
    gs = _pad(_first(gradient, count), padded)

    def chunk(number: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        part, hits = _cut(xs, number, rows), _cut(ys, number, rows)[:, None]
        logits = _product("te,ve->tv", part, words)
        error = jnp.exp(logits - _cut(totals, number, rows)[:, None]) - smoothing / len(table)
        error -= jnp.where(jax.lax.broadcasted_iota(jnp.int32, error.shape, 1) == hits, 1 - smoothing, 0)
        error = jnp.where(_is_word(error, table), error * _cut(gs, number, rows)[:, None], 0).astype(x.dtype)
        dx, dtable = found
        dx = _put(dx, _product("tv,ve->te", error, words).astype(x.dtype), number, rows)
        return dx, dtable + _product("tv,te->ve", error, part)

    nothing = jnp.zeros((padded, x.shape[1]), x.dtype), jnp.zeros(words.shape, jnp.float32)
    dx, dtable = jax.lax.fori_loop(0, _number_of_chunks(count, rows, padded), chunk, nothing)
    return dx[: len(x)], dtable[: len(table)].astype(table.dtype), None, None


_loss.defvjp(_forward, _backward)


def _chunks(rows: int, words: int) -> tuple[int, int]:
    """How many rows to take at a time, and rows with those that fill up the last chunk."""
    chunks = -(-rows // max(LOGITS // words, 1))
    size = -(-rows // chunks)
    return size, size * chunks


def _number_of_chunks(count: Array | None, rows: int, padded: int) -> Array | int:
    return padded // rows if count is None else -(-count // rows)


def _first(x: Array, count: Array | None) -> Array:
    return x if count is None else jnp.where(jnp.arange(len(x)) < count, x, 0)


def _words(table: Array, dtype: jnp.dtype) -> Array:
    """The table with rows of zeros up to a round number: matrix units are several times slower on odd ones."""
    return _pad(table.astype(dtype), -(-len(table) // ALIGNED) * ALIGNED)


def _is_word(logits: Array, table: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < len(table)


def _product(formula: str, a: Array, b: Array) -> Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _pad(x: Array, rows: int) -> Array:
    return jnp.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))


def _cut(x: Array, number: Array, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * rows, rows)


def _put(x: Array, part: Array, number: Array, rows: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, number * rows, 0)
