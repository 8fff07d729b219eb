"""Dropout, with random numbers that are cheap, and the same however an array is divided among devices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray


def dropout(
    x: Array,
    rate: float,
    key: PRNGKeyArray | None,
    fold: int = 0,
    *,
    within: tuple[int, ...] | None = None,
    first: tuple[int, ...] | None = None,
) -> Array:
    """Zeroes entries at `rate` in training, which is when there is a key; `fold` tells places apart that share one.

    A part of an array, of shape `within` and from index `first` on, loses what it would lose in the whole.
    """
    if not rate or key is None:
        return x
    bits = random_bits(jax.random.fold_in(key, fold), x.shape, within=within, first=first)
    return jnp.where(bits >= threshold(rate), x / (1 - rate), 0).astype(x.dtype)


def threshold(rate: float) -> Array:
    """What random bits must reach for their place to be kept."""
    return jnp.uint32(rate * 2**32)


def random_bits(key: PRNGKeyArray, shape: tuple[int, ...], *, within=None, first=None) -> Array:
    """32 random bits for each place, a hash of its number and the key.

    Good enough to drop units by, and a fifth of the work of the generator that draws parameters and samples; like
    that, it gives the same numbers however an array is divided among devices.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, (size, start) in enumerate(zip(within or shape, first or (0,) * len(shape))):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.uint32(start)
    return hashed(place, *_seeds(key))


def seeds_of(key: PRNGKeyArray, fold: int = 0) -> tuple[Array, Array]:
    """The two numbers that `dropout` hashes with."""
    return _seeds(jax.random.fold_in(key, fold))


def _seeds(key: PRNGKeyArray) -> tuple[Array, Array]:
    first, second = jax.random.key_data(key).astype(jnp.uint32).ravel()[:2]
    return first, second


def hashed(place: Array, first: Array, second: Array) -> Array:
    """Random bits from the number of a place; each round's constants are those of a known mixer, "lowbias32"."""
    bits = place
    for seed in (first, second):
        bits = (bits ^ seed) * jnp.uint32(0x9E3779B9)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x735A2D97)
        bits = bits ^ (bits >> 15)
    return bits
