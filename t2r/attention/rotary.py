"""Rotary positions: queries and keys turned by angles that grow with their position."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(x: Float[Array, "b n *heads d"], positions: Int[Array, "b n"], theta: float) -> Array:
    """Turns the pairs (x_i, x_{i + d/2}) by position · theta^(−2i/d)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = angle.reshape(*positions.shape, *[1] * (x.ndim - 3), half)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
