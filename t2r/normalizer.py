"""The normaliser of linear attention: what the sum of weights becomes before it divides."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class Normalizer(NamedTuple):
    """The denominator of linear attention: max(φ(q)·z, value) if `clamp`, else φ(q)·z + value."""

    clamp: bool
    value: float

    def __call__(self, total: Array) -> Array:
        return jnp.maximum(total, self.value) if self.clamp else total + self.value
