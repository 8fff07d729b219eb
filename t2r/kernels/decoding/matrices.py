"""Linear layers as matrices (outputs, inputs), with the norm before them folded in."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Matrix(NamedTuple):
    """A linear layer: weights · x + bias."""

    weights: Float[Array, "outputs inputs"]
    bias: Float[Array, "outputs"]


def matrix_of(linear: Any, inputs: int, outputs: int = -1) -> Matrix:
    """A linear layer's kernel as (outputs, inputs), with its heads flattened, and its bias."""
    weights = linear.kernel[...].reshape(inputs, outputs).T
    return Matrix(weights, jnp.zeros(len(weights)) if linear.bias is None else linear.bias[...].reshape(-1))


def fold_norm(norm: Any, matrix: Matrix) -> Matrix:
    """Folds the norm's scale and bias into the matrix; the identity if there is no norm."""
    if norm is None:
        return matrix
    bias = getattr(norm, "bias", None)  # an RMS norm has none
    bias = matrix.bias if bias is None else matrix.bias + matrix.weights @ bias[...]
    return Matrix(matrix.weights * norm.scale[...], bias)
