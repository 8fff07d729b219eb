"""The largest numbers of long rows or columns, such as the likeliest tokens: `lax.top_k`, in two small searches.

The `count` largest numbers are in the `count` blocks with the largest maxima. So the maxima of blocks are searched
first, then only the blocks found.

On a GPU, a search among at most MOST_RANKED numbers compares all pairs: the rank of a number is how many come before
it. That is two small kernels, where XLA would sort, in 4 to 9 µs. Among more numbers XLA's own kernel takes 60 to
150 µs (results/NOTES.md).

Of equal numbers the first ones are chosen, as `lax.top_k` does.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

BLOCK = 64  # numbers
MOST_RANKED = 1024  # numbers whose pairs are compared


def largest(x: Num[Array, "b n"], count: int) -> tuple[Num[Array, "b count"], Int[Array, "b count"]]:
    """`lax.top_k`: the largest numbers of each row of x, largest first, and their indices."""
    batch, size = x.shape
    if count * BLOCK >= size:
        return _search(x, jnp.broadcast_to(jnp.arange(size), x.shape), count)
    padded = jnp.pad(x, [(0, 0), (0, -size % BLOCK)], constant_values=_least(x))
    blocks = padded.reshape(batch, -1, BLOCK)
    chosen = _rising(largest(blocks.max(2), count)[1])
    return _search_blocks(jnp.take_along_axis(blocks, chosen[:, :, None], 1), chosen, count)


def largest_of_columns(x: Num[Array, "n b"], count: int) -> tuple[Num[Array, "b count"], Int[Array, "b count"]]:
    """The same for the columns of x, whose length is a multiple of BLOCK, without a copy of its transpose."""
    batch = x.shape[1]
    blocks = x.reshape(-1, BLOCK, batch)
    if count > len(blocks):
        return largest(x.T, count)
    chosen = _rising(largest(blocks.max(1).T, count)[1])
    return _search_blocks(blocks[chosen, :, jnp.arange(batch)[:, None]], chosen, count)


def _search_blocks(
    candidates: Num[Array, "b blocks numbers"], chosen: Int[Array, "b blocks"], count: int
) -> tuple[Num[Array, "b count"], Int[Array, "b count"]]:
    """The largest numbers of the chosen blocks, and their indices among the numbers of all blocks."""
    indices = chosen[:, :, None] * BLOCK + jnp.arange(BLOCK)
    return _search(candidates.reshape(len(chosen), -1), indices.reshape(len(chosen), -1), count)


def _search(
    x: Num[Array, "b n"], indices: Int[Array, "b n"], count: int
) -> tuple[Num[Array, "b count"], Int[Array, "b count"]]:
    """The largest numbers, and their `indices`; of equal numbers, those with the least indices."""
    on_gpu = _by_rank if x.shape[1] <= MOST_RANKED else _by_top_k
    return jax.lax.platform_dependent(
        x, indices, cuda=functools.partial(on_gpu, count), default=functools.partial(_by_top_k, count)
    )


def _by_rank(count: int, x: Num[Array, "b n"], indices: Int[Array, "b n"]) -> tuple[Array, Array]:
    number = jnp.where(x == x, x, _largest(x))  # NaN is largest; without a rank, its index would have no meaning
    (x_i, index_i), (x_j, index_j) = (number[:, :, None], indices[:, :, None]), (number[:, None], indices[:, None])
    rank = ((x_j > x_i) | ((x_j == x_i) & (index_j < index_i))).sum(2, dtype=jnp.int32)
    chosen = rank[:, None] == jnp.arange(count)[:, None]
    return jnp.where(chosen, x[:, None], _least(x)).max(2), jnp.where(chosen, index_j, 0).max(2)


def _by_top_k(count: int, x: Num[Array, "b n"], indices: Int[Array, "b n"]) -> tuple[Array, Array]:
    """`indices` must rise: see `_rising`."""
    # Without the barrier, XLA's CPU compiler sorts all candidates if only a part of the result is used somewhere.
    values, places = jax.lax.optimization_barrier(jax.lax.top_k(x, count))
    return values, jnp.take_along_axis(indices, places, 1)


def _rising(chosen: Int[Array, "b count"]) -> Int[Array, "b count"]:
    """Indices in rising order, where `_by_top_k` may follow: it takes equal numbers in the order of their places."""
    few = chosen.shape[1] * BLOCK <= MOST_RANKED
    sort = functools.partial(jnp.sort, axis=1)
    return jax.lax.platform_dependent(chosen, cuda=(lambda x: x) if few else sort, default=sort)


def _least(x: Array) -> float | int:
    return -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min


def _largest(x: Array) -> float | int:
    return jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).max
