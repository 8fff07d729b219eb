"""What a model is trained and scored on: padded batches, and their loss."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention.module import State
from t2r.model.transformer import LanguageModel, Seq2Seq

PADDING = -1


class Batch(NamedTuple):
    """Token ids, and for translation those of the sources; PADDING ends the rows. Each token predicts the next."""

    tokens: Int[Array, "b n"]
    source: Int[Array, "b m"] | None = None


def pad_rows(rows: Sequence[Sequence[int]], count: int, width: int) -> Int[np.ndarray, "count width"]:
    """Rows of ids of any lengths, each ended by PADDING; missing rows are padding alone."""
    padded = np.full((count, width), PADDING, np.int32)
    for place, ids in zip(padded, rows):
        place[: len(ids)] = ids
    return padded


def remember(model: Seq2Seq, source: Int[Array, "b m"], key: PRNGKeyArray | None = None) -> tuple[State, ...]:
    """Each decoder layer's state of padded sources."""
    return model.remember(jnp.maximum(source, 0), source != PADDING, key)


def token_losses(
    model: LanguageModel, batch: Batch, *, key: PRNGKeyArray | None = None, smoothing: float = 0.0
) -> tuple[Float[Array, "b m"], Bool[Array, "b m"]]:
    """The loss of each token but the first of its row, 0 where there is none, and where there is one."""
    source = None if batch.source is None else remember(model, batch.source, key)
    # Padding stands at the end of rows, where causal attention shows it to nothing that counts.
    tokens, targets = jnp.maximum(batch.tokens[:, :-1], 0), batch.tokens[:, 1:]
    counts = targets != PADDING
    losses = model.losses(tokens, jnp.maximum(targets, 0), source=source, key=key, smoothing=smoothing)
    return jnp.where(counts, losses, 0), counts


def total_loss(
    model: LanguageModel, batch: Batch, *, key: PRNGKeyArray | None = None, smoothing: float = 0.0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The losses of all tokens of a batch, added up, and how many tokens there are. A `key` means training."""
    losses, counts = token_losses(model, batch, key=key, smoothing=smoothing)
    return losses.sum(), counts.sum()
