"""The largest numbers of long rows or columns, such as the likeliest tokens: `lax.top_k`, in two small searches.

The `count` largest numbers are in the `count` blocks with the largest maxima. So the maxima of blocks are searched
first, then only the blocks found. On a GPU it matters that no search has 1,024 numbers or more: XLA sorts fewer, in
4 µs, and has a kernel for more, which takes 60 to 150 µs (results/NOTES.md).

Blocks and numbers that are equal are taken in their order, so equal numbers are chosen as `lax.top_k` does.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

BLOCK = 64  # numbers


def largest(x: Num[Array, "b n"], count: int) -> tuple[Num[Array, "b count"], Int[Array, "b count"]]:
    """`lax.top_k`: the largest numbers of each row of x, largest first, and their indices."""
    batch, size = x.shape
    if count * BLOCK >= size:
        return _top_k(x, count)
    padded = jnp.pad(x, [(0, 0), (0, -size % BLOCK)], constant_values=_least(x))
    blocks = padded.reshape(batch, -1, BLOCK)
    chosen = jnp.sort(largest(blocks.max(2), count)[1], 1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1)
    return _second_search(candidates.reshape(batch, -1), chosen, count)


def largest_of_columns(x: Num[Array, "n b"], count: int) -> tuple[Num[Array, "b count"], Int[Array, "b count"]]:
    """The same for the columns of x, whose length is a multiple of BLOCK, without a copy of its transpose."""
    batch = x.shape[1]
    blocks = x.reshape(-1, BLOCK, batch)
    if count > len(blocks):
        return _top_k(x.T, count)
    chosen = jnp.sort(_top_k(blocks.max(1).T, count)[1], 1)
    candidates = blocks[chosen, :, jnp.arange(batch)[:, None]]
    return _second_search(candidates.reshape(batch, -1), chosen, count)


def _top_k(x: Num[Array, "b n"], count: int) -> tuple[Array, Array]:
    values, index = jax.lax.top_k(x, count)
    return values, index.astype(jnp.int32)


def _least(x: Array) -> float | int:
    return -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min


def _second_search(
    candidates: Num[Array, "b candidates"], chosen: Int[Array, "b count"], count: int
) -> tuple[Num[Array, "b count"], Int[Array, "b count"]]:
    # Without the barrier, XLA's CPU compiler sorts all candidates if only a part of the result is used somewhere.
    values, index = jax.lax.optimization_barrier(jax.lax.top_k(candidates, count))
    return values, (jnp.take_along_axis(chosen, index // BLOCK, 1) * BLOCK + index % BLOCK).astype(jnp.int32)
