"""Dropout, with random numbers that are cheap, and the same however an array is divided among devices."""

import functools

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
    return _dropped(x, seeds_of(key, fold), rate, within or x.shape, first or (0,) * x.ndim)


def relu_and_dropout(x: Array, rate: float, key: PRNGKeyArray | None, fold: int = 0) -> Array:
    """dropout(relu(x)), of which the backward pass needs nothing but the result."""
    if not rate or key is None:
        return _relu(x, None, 0.0)
    return _relu(x, seeds_of(key, fold), rate)


Seeds = tuple[Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _dropped(x: Array, seeds: Seeds, rate: float, within: tuple[int, ...], first: tuple[int, ...]) -> Array:
    bits = hashed(_places(x.shape, within, first), *seeds)
    return jnp.where(bits >= threshold(rate), x / (1 - rate), 0).astype(x.dtype)


def _drop(x: Array, seeds: Seeds, *how) -> tuple[Array, Seeds]:
    return _dropped(x, seeds, *how), seeds


def _drop_gradient(rate: float, within: tuple, first: tuple, seeds: Seeds, gradient: Array) -> tuple[Array, None]:
    # The same places are zeroed: they are drawn again, and nothing was kept for it.
    return _dropped(gradient, seeds, rate, within, first), None


_dropped.defvjp(_drop, _drop_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _relu(x: Array, seeds: Seeds | None, rate: float) -> Array:
    positive = jnp.maximum(x, 0)
    return _dropped(positive, seeds, rate, x.shape, (0,) * x.ndim) if rate else positive


def _relu_and_result(x: Array, seeds: Seeds | None, rate: float) -> tuple[Array, Array]:
    found = _relu(x, seeds, rate)
    return found, found


def _relu_gradient(rate: float, found: Array, gradient: Array) -> tuple[Array, None]:
    # What is above zero was above zero and was not dropped.
    return jnp.where(found > 0, gradient / (1 - rate), 0).astype(gradient.dtype), None


_relu.defvjp(_relu_and_result, _relu_gradient)


def threshold(rate: float) -> Array:
    """What random bits must reach for their place to be kept."""
    return jnp.uint32(rate * 2**32)


def _places(shape: tuple[int, ...], within: tuple[int, ...], first: tuple[int, ...]) -> Array:
    """The number of each place of a part, from index `first` on, of an array of shape `within`."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, (size, start) in enumerate(zip(within, first)):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.uint32(start)
    return place


def seeds_of(key: PRNGKeyArray, fold: int = 0) -> tuple[Array, Array]:
    """The two numbers that `dropout` hashes with."""
    return _seeds(jax.random.fold_in(key, fold))


def _seeds(key: PRNGKeyArray) -> tuple[Array, Array]:
    first, second = jax.random.key_data(key).astype(jnp.uint32).ravel()[:2]
    return first, second


def hashed(place: Array, first: Array, second: Array) -> Array:
    """32 random bits from the number of a place, by a known mixer, "lowbias32", after both seeds have moved the place.

    Good enough to drop units by, and a tenth of the work of the generator that draws parameters and samples; like
    that, it gives the same numbers however an array is divided among devices. On a GPU this work is what dropout costs.
    """
    bits = (place ^ first) * jnp.uint32(0x9E3779B9) + second
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x735A2D97)
    return bits ^ (bits >> 15)
