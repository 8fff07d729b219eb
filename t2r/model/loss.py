"""What a model is trained and scored on: batches, and their loss."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from t2r.model.transformer import LanguageModel

PADDING = -1


class Batch(NamedTuple):
    """Token ids, and for translation those of the sources; PADDING ends the rows. Each token predicts the next."""

    tokens: Int[Array, "b n"]
    source: Int[Array, "b m"] | None = None


def total_loss(
    model: LanguageModel, batch: Batch, *, key: PRNGKeyArray | None = None, smoothing: float = 0.0
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The losses of all tokens of a batch, added up, and how many tokens there are. A `key` means training."""
    source = None
    if batch.source is not None:
        source = model.remember(jnp.maximum(batch.source, 0), batch.source != PADDING, key)
    # Padding stands at the end of rows, where causal attention shows it to nothing that counts.
    tokens, targets = jnp.maximum(batch.tokens[:, :-1], 0), batch.tokens[:, 1:]
    counts = targets != PADDING
    losses = model.losses(tokens, jnp.maximum(targets, 0), source=source, key=key, smoothing=smoothing)
    return jnp.where(counts, losses, 0).sum(), counts.sum()
