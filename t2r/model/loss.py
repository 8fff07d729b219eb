"""The loss of a model on a batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention.module import State
from t2r.batch import PADDING, Batch, inputs_and_targets
from t2r.model.embedding import TeacherOutputs
from t2r.model.transformer import LanguageModel, Seq2Seq


def source_states(model: Seq2Seq, source: Int[Array, "b m"], key: PRNGKeyArray | None = None) -> tuple[State, ...]:
    """Each decoder layer's state of padded sources."""
    return model.source_states(jnp.maximum(source, 0), source != PADDING, key)


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
        lesson = TeacherOutputs(teacher.model.embedding, wanted, teacher.share)
    inside = None if batch.source is None else counts  # of texts nearly all are
    losses = model.embedding.loss(hidden, jnp.maximum(targets, 0), key, smoothing, inside=inside, lesson=lesson)
    return jnp.where(counts, losses, 0), counts


def _hidden(model: LanguageModel, tokens: Array, source: Array | None, key: PRNGKeyArray | None) -> Array:
    seen = None if source is None else source_states(model, source, key)
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
