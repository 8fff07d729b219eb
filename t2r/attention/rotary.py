"""Rotary positions: queries and keys are rotated by angles proportional to their position."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rotary:
    """The frequencies theta^(−2i/size) at which pairs of dimensions rotate, and their scaling for long sequences.

    Scaling adapts a model to sequences longer than those it was trained on. `linear` divides all frequencies by
    `factor`. `llama3` divides by `factor` those that make fewer than `low` rotations in `original` tokens, keeps those
    that make more than `high`, and interpolates in between. `factors` divides each frequency by its own factor.
    """

    theta: float = 10_000.0
    size: int = 0  # only the first `size` dimensions are rotated; 0: all
    scaling: str = "none"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    factors: tuple[float, ...] = ()
    gain: float = 1.0  # rotated dimensions are multiplied by it

    def frequencies(self, head_dim: int) -> np.ndarray:
        """The frequency of each of the size/2 pairs, in radians per token."""
        half = (self.size or head_dim) // 2
        unscaled = self.theta ** (-np.arange(half) / half)
        if self.scaling == "none":
            return unscaled
        if self.scaling == "linear":
            return unscaled / self.factor
        if self.scaling == "factors":
            return unscaled / np.array(self.factors)
        rotations = self.original * unscaled / (2 * math.pi)
        unscaled_share = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
        return unscaled_share * unscaled + (1 - unscaled_share) * unscaled / self.factor


SCALINGS = ("none", "linear", "llama3", "factors")


def rotate(x: Float[Array, "b n *heads d"], positions: Int[Array, "b n"], rotary: Rotary) -> Array:
    """Rotates the pairs (x_i, x_{i + size/2}) by position · frequency_i; dimensions from `size` on are unchanged.

    What is rotated is also multiplied by `gain`.
    """
    frequency = jnp.asarray(rotary.frequencies(x.shape[-1]), jnp.float32)
    half = len(frequency)
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = angle.reshape(*positions.shape, *[1] * (x.ndim - 3), half)
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    sin, cos = jnp.sin(angle) * rotary.gain, jnp.cos(angle) * rotary.gain
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], -1)
