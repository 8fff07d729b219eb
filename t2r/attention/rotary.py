"""Rotary positions: queries and keys turned by angles that grow with their position."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rotary:
    """How fast each pair of dimensions turns.

    Frequencies are theta^(−2i/size). Scalings stretch them to texts longer than those trained on: `linear` slows all by
    `factor`; `llama3` slows those that turn fewer than `low` times in `original` tokens, leaves alone those that turn
    more than `high` times, and goes from one to the other in between.
    """

    theta: float = 10_000.0
    size: int = 0  # dimensions that are turned, the first ones; 0: all
    scaling: str = "none"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def frequencies(self, head_dim: int) -> np.ndarray:
        """One for each pair, in radians per token."""
        half = (self.size or head_dim) // 2
        found = self.theta ** (-np.arange(half) / half)
        if self.scaling == "none":
            return found
        if self.scaling == "linear":
            return found / self.factor
        turns = self.original * found / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept * found + (1 - kept) * found / self.factor


SCALINGS = ("none", "linear", "llama3")


def rotate(x: Float[Array, "b n *heads d"], positions: Int[Array, "b n"], rotary: Rotary) -> Array:
    """Turns the pairs (x_i, x_{i + size/2}) by position · frequency_i; dimensions beyond `size` stay."""
    frequency = jnp.asarray(rotary.frequencies(x.shape[-1]), jnp.float32)
    half = len(frequency)
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = angle.reshape(*positions.shape, *[1] * (x.ndim - 3), half)
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], -1)
