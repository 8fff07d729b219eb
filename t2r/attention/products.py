"""Products of queries with what a group of heads shares: its keys, its values, or the state S.

XLA's CPU compiler multiplies few vectors with many several times as fast if the few have one axis, and if the larger
factor comes first (results/NOTES.md). On other devices, and with many queries, these are plain einsums.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEW_QUERIES = 32  # of one group


def dot_products(q: Float[Array, "b n g r d"], k: Float[Array, "b g m d"]) -> Float[Array, "b g n r m"]:
    """q·k of each query with each key of its group, in float32."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    plain = functools.partial(product, "bngrd,bgmd->bgnrm")
    if not _are_few(q.shape[1], q.shape[3]):
        return plain(q, k)

    def keys_first(q: Array, k: Array) -> Array:
        queries = _one_axis(jnp.swapaxes(q, 1, 2))
        # The barrier keeps the order of the factors, which the compiler would exchange to save the transposition.
        products = jax.lax.optimization_barrier(product("bgmd,bgqd->bgmq", k, queries))
        return products.mT.reshape(*k.shape[:2], q.shape[1], q.shape[3], k.shape[2])

    return jax.lax.platform_dependent(q, k, cpu=keys_first, default=plain)


def weighted_sums(weights: Float[Array, "b g n r m"], v: Float[Array, "b g m d"]) -> Float[Array, "b n g r d"]:
    """The weighted sum of a group's values, for each of its queries; or φ(q)·S, with S for the values."""
    plain = functools.partial(jnp.einsum, "bgnrm,bgmd->bngrd")
    if not _are_few(*weights.shape[2:4]):
        return plain(weights, v)

    def one_axis(weights: Array, v: Array) -> Array:
        sums = jnp.einsum("bgqm,bgmd->bgqd", _one_axis(weights), v)
        return jnp.swapaxes(sums.reshape(*weights.shape[:4], v.shape[3]), 1, 2)

    return jax.lax.platform_dependent(weights, v, cpu=one_axis, default=plain)


def _are_few(*sizes: Any) -> bool:
    """Whether a group has several queries, but few, in axes of these sizes."""
    return all(isinstance(size, int) for size in sizes) and 1 < math.prod(sizes) <= FEW_QUERIES  # some may be symbols


def _one_axis(x: Float[Array, "b g n r e"]) -> Float[Array, "b g q e"]:
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])
