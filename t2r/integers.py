"""Matrices in 8 bits: integers and a scale for each row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LARGEST = 127  # of the integers; −128 is not used, so that they are symmetric


def quantise(x: Float[Array, "b n"]) -> tuple[Int8[Array, "b n"], Float[Array, "b"]]:
    """Integers from −127 to 127 and a scale for each row, whose product is nearest to x."""
    x = jnp.asarray(x, jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(1), jnp.finfo(jnp.float32).tiny * LARGEST) / LARGEST
    return jnp.round(x / scale[:, None]).astype(jnp.int8), scale
