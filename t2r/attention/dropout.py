"""Dropout, with random numbers that are cheap, and the same however an array is divided among devices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray


def dropout(x: Array, rate: float, key: PRNGKeyArray | None, fold: int = 0) -> Array:
    """Zeroes entries at `rate` in training, which is when there is a key; `fold` tells places apart that share one."""
    if not rate or key is None:
        return x
    keep = random_bits(jax.random.fold_in(key, fold), x.shape) >= jnp.uint32(rate * 2**32)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def random_bits(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """32 random bits for each place, a hash of its number and the key.

    Good enough to drop units by, and a fifth of the work of the generator that draws parameters and samples; like
    that, it gives the same numbers however an array is divided among devices.
    """
    first, second = jax.random.key_data(key).astype(jnp.uint32).ravel()[:2]
    bits = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        bits = bits * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    for seed in (first, second):  # each round's constants are those of a known mixer of 32 bits, "lowbias32"
        bits = (bits ^ seed) * jnp.uint32(0x9E3779B9)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x735A2D97)
        bits = bits ^ (bits >> 15)
    return bits
