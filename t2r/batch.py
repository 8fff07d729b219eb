"""Batches of token ids: what `data` makes, and models are trained and scored on."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

PADDING = -1


class Batch(NamedTuple):
    """Token ids (b, n), and for translation those of the sources (b, m); PADDING fills up the ends of sequences.

    Each token predicts the next. Arrays may be NumPy's, JAX's, or shapes of them.
    """

    tokens: Array
    source: Array | None = None


def pad_rows(rows: Sequence[Sequence[int]], count: int, width: int) -> Int[np.ndarray, "{count} {width}"]:
    """Sequences of any lengths as one array, filled up with PADDING; missing sequences are padding alone."""
    padded = np.full((count, width), PADDING, np.int32)
    for place, ids in zip(padded, rows):
        place[: len(ids)] = ids
    return padded


def inputs_and_targets(batch: Batch) -> tuple[Int[Array, "b n"], Int[Array, "b n"]]:
    """The model's inputs, and the token to predict from each; PADDING where there is none."""
    # Padding stands at the end of sequences, where causal attention shows it to nothing that counts.
    return jnp.maximum(batch.tokens[:, :-1], 0), batch.tokens[:, 1:]


def pad_length(x: Array, length: int) -> Array:
    """Sequences (b, n, …) with zeros after them, up to a length."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
