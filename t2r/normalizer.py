"""The normaliser of linear attention, which keeps its denominator φ(q)·z away from zero."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class Normalizer(NamedTuple):
    """The denominator as a function of φ(q)·z: max(φ(q)·z, value) if `clamp`, else φ(q)·z + value."""

    clamp: bool
    value: float

    def __call__(self, denominator: Array) -> Array:
        return jnp.maximum(denominator, self.value) if self.clamp else denominator + self.value
