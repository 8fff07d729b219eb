"""What a model is trained and scored on: padded batches, and their loss."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention.module import State
from t2r.model.embedding import Lesson
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


def inputs_and_targets(batch: Batch) -> tuple[Int[Array, "b n"], Int[Array, "b n"]]:
    """What is read, and what is to be predicted from it, PADDING where nothing is."""
    # Padding stands at the end of rows, where causal attention shows it to nothing that counts.
    return jnp.maximum(batch.tokens[:, :-1], 0), batch.tokens[:, 1:]


def remember(model: Seq2Seq, source: Int[Array, "b m"], key: PRNGKeyArray | None = None) -> tuple[State, ...]:
    """Each decoder layer's state of padded sources."""
    return model.remember(jnp.maximum(source, 0), source != PADDING, key)


class Teacher(NamedTuple):
    """A model whose probabilities are to be learned, and their share of the loss; the tokens have the rest."""

    model: LanguageModel
    share: float


def token_losses(
    model: LanguageModel,
    batch: Batch,
    *,
    key: PRNGKeyArray | None = None,
    smoothing: float = 0.0,
    teacher: Teacher | None = None,
) -> tuple[Float[Array, "b m"], Bool[Array, "b m"]]:
    """The loss of each token but the first of its row, 0 where there is none, and where there is one."""
    tokens, targets = inputs_and_targets(batch)
    counts = targets != PADDING
    hidden, lesson = _hidden(model, tokens, batch.source, key), None
    if teacher is not None and teacher.share:
        wanted = jax.lax.stop_gradient(_hidden(teacher.model, tokens, batch.source, None))
        lesson = Lesson(teacher.model.embedding, wanted, teacher.share)
    inside = None if batch.source is None else counts  # of texts nearly all are
    losses = model.embedding.loss(hidden, jnp.maximum(targets, 0), key, smoothing, inside=inside, lesson=lesson)
    return jnp.where(counts, losses, 0), counts


def _hidden(model: LanguageModel, tokens: Array, source: Array | None, key: PRNGKeyArray | None) -> Array:
    seen = None if source is None else remember(model, source, key)
    return model(tokens, source=seen, key=key)[0]


def total_loss(
    model: LanguageModel,
    batch: Batch,
    *,
    key: PRNGKeyArray | None = None,
    smoothing: float = 0.0,
    teacher: Teacher | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The losses of all tokens of a batch, added up, and how many tokens there are. A `key` means training."""
    losses, counts = token_losses(model, batch, key=key, smoothing=smoothing, teacher=teacher)
    return losses.sum(), counts.sum()
