"""Batches of token ids: what `t2r.data` yields, and what models are trained and evaluated on."""

from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

PADDING = -1


class Batch(NamedTuple):
    """Token ids of sequences (b, n), and in translation of their sources (b, m), both padded at the end with PADDING.

    The arrays may be NumPy's, JAX's, or `jax.ShapeDtypeStruct`s.
    """

    tokens: Array
    source: Array | None = None


def pad_sequences(
    sequences: Sequence[Sequence[SupportsIndex] | np.ndarray], batch: int, length: int
) -> Int[np.ndarray, "{batch} {length}"]:
    """Sequences of token ids as one array, padded with PADDING to a length and to a number of sequences."""
    padded = np.full((batch, length), PADDING, np.int32)
    for row, ids in zip(padded, sequences):
        row[: len(ids)] = ids
    return padded


def inputs_and_targets(batch: Batch) -> tuple[Int[Array, "b n"], Int[Array, "b n"]]:
    """Each sequence without its last token, and without its first: token i predicts target i, which may be PADDING."""
    # PADDING becomes token 0 in the inputs. It needs no mask: it is at the end, where no real token attends to it.
    return jnp.maximum(batch.tokens[:, :-1], 0), batch.tokens[:, 1:]


def pad_length(x: Array, length: int) -> Array:
    """An array (b, n, …) padded with zeros to (b, length, …)."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
