"""Dropout with cheap random bits that do not depend on how an array is sharded or cut into blocks."""

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
    """x with elements zeroed at `rate` and the others divided by 1 − rate; x itself without a key (evaluation).

    `fold` distinguishes uses that share a key. If x is the part of an array of shape `within` that begins at index
    `first`, the elements zeroed are those that would be zeroed in the whole array.
    """
    if not rate or key is None:
        return x
    return _dropout(x, dropout_seeds(key, fold), rate, within or x.shape, first or (0,) * x.ndim)


def relu_and_dropout(x: Array, rate: float, key: PRNGKeyArray | None, fold: int = 0) -> Array:
    """dropout(relu(x)), which saves only its output for the backward pass."""
    if not rate or key is None:
        return _relu_and_dropout(x, None, 0.0)
    return _relu_and_dropout(x, dropout_seeds(key, fold), rate)


Seeds = tuple[Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _dropout(x: Array, seeds: Seeds, rate: float, within: tuple[int, ...], first: tuple[int, ...]) -> Array:
    bits = hash_bits(_flat_indices(x.shape, within, first), *seeds)
    return jnp.where(bits >= keep_threshold(rate), x / (1 - rate), 0).astype(x.dtype)


def _dropout_forward(x: Array, seeds: Seeds, *options) -> tuple[Array, Seeds]:
    return _dropout(x, seeds, *options), seeds


def _dropout_backward(rate: float, within: tuple, first: tuple, seeds: Seeds, gradient: Array) -> tuple[Array, None]:
    # The same bits are drawn again from the seeds, so that no mask has to be saved.
    return _dropout(gradient, seeds, rate, within, first), None


_dropout.defvjp(_dropout_forward, _dropout_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _relu_and_dropout(x: Array, seeds: Seeds | None, rate: float) -> Array:
    positive = jnp.maximum(x, 0)
    return _dropout(positive, seeds, rate, x.shape, (0,) * x.ndim) if rate else positive


def _relu_and_dropout_forward(x: Array, seeds: Seeds | None, rate: float) -> tuple[Array, Array]:
    output = _relu_and_dropout(x, seeds, rate)
    return output, output


def _relu_and_dropout_backward(rate: float, output: Array, gradient: Array) -> tuple[Array, None]:
    # The output is positive exactly where x was positive and was not dropped.
    return jnp.where(output > 0, gradient / (1 - rate), 0).astype(gradient.dtype), None


_relu_and_dropout.defvjp(_relu_and_dropout_forward, _relu_and_dropout_backward)


def keep_threshold(rate: float) -> Array:
    """An element is kept if its random bits are at least this, which has probability 1 − rate."""
    return jnp.uint32(rate * 2**32)


def _flat_indices(shape: tuple[int, ...], within: tuple[int, ...], first: tuple[int, ...]) -> Array:
    """The flat (row-major) index, in an array of shape `within`, of each element of its part that begins at `first`."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, (size, start) in enumerate(zip(within, first)):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.uint32(start)
    return index


def dropout_seeds(key: PRNGKeyArray, fold: int = 0) -> tuple[Array, Array]:
    """The two 32-bit seeds of `hash_bits`, from a key and the number of its use."""
    return _seeds(jax.random.fold_in(key, fold))


def _seeds(key: PRNGKeyArray) -> tuple[Array, Array]:
    first, second = jax.random.key_data(key).astype(jnp.uint32).ravel()[:2]
    return first, second


def hash_bits(index: Array, first_seed: Array, second_seed: Array) -> Array:
    """32 random bits for each flat index: the index mixed with both seeds, then the integer hash "lowbias32".

    Good enough for dropout, at a tenth of the operations of JAX's generator (threefry); on a GPU these operations are
    the cost of dropout. As with threefry, the bits do not depend on how an array is sharded.
    """
    # 0x9E3779B9 is 2^32 over the golden ratio: it spreads neighbouring indices. The other constants are lowbias32's.
    bits = (index ^ first_seed) * jnp.uint32(0x9E3779B9) + second_seed
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x735A2D97)
    return bits ^ (bits >> 15)
