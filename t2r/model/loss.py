"""The loss of a model on a batch: next-token cross-entropy, optionally mixed with distillation from a teacher."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention.module import State
from t2r.batch import PADDING, Batch, inputs_and_targets
from t2r.model.embedding import TeacherOutputs
from t2r.model.transformer import LanguageModel, Seq2Seq


def source_states(model: Seq2Seq, source: Int[Array, "b m"], key: PRNGKeyArray | None = None) -> tuple[State, ...]:
    """Each decoder layer's state over the sources, which are padded with PADDING."""
    return model.source_states(jnp.maximum(source, 0), source != PADDING, key)


class Teacher(NamedTuple):
    """A model to distil from. The loss is (1 − share) · loss of the targets + share · loss of its distribution.

    With `top_k`, the distribution is that over its `top_k` likeliest tokens.
    """

    model: LanguageModel
    share: float
    top_k: int = 0


def token_losses(
    model: LanguageModel,
    batch: Batch,
    *,
    key: PRNGKeyArray | None = None,
    smoothing: float = 0.0,
    teacher: Teacher | None = None,
) -> tuple[Float[Array, "b m"], Bool[Array, "b m"]]:
    """The loss of each token of a sequence after its first, and a mask of real targets; padding has loss 0."""
    tokens, targets = inputs_and_targets(batch)
    is_real = targets != PADDING
    hidden, teacher_outputs = _hidden(model, tokens, batch.source, key), None
    if teacher is not None and teacher.share:
        teacher_hidden = jax.lax.stop_gradient(_hidden(teacher.model, tokens, batch.source, None))
        teacher_outputs = TeacherOutputs(teacher.model.embedding, teacher_hidden, teacher.share, teacher.top_k)
    # Skipping padding pays off in batches of sentence pairs; those of a language model have hardly any.
    mask = None if batch.source is None else is_real
    losses = model.embedding.loss(hidden, jnp.maximum(targets, 0), key, smoothing, mask=mask, teacher=teacher_outputs)
    return jnp.where(is_real, losses, 0), is_real


def _hidden(
    model: LanguageModel, tokens: Int[Array, "b n"], source: Int[Array, "b m"] | None, key: PRNGKeyArray | None
) -> Float[Array, "b n width"]:
    """The last hidden layer; for a translation model, of targets given their sources."""
    memory = None if source is None else source_states(model, source, key)
    return model(tokens, source=memory, key=key)[0]


def total_loss(
    model: LanguageModel,
    batch: Batch,
    *,
    key: PRNGKeyArray | None = None,
    smoothing: float = 0.0,
    teacher: Teacher | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The sum of a batch's token losses, and the number of tokens it is over. A `key` means training."""
    losses, is_real = token_losses(model, batch, key=key, smoothing=smoothing, teacher=teacher)
    return losses.sum(), is_real.sum()
