"""What a model is trained and scored on: padded batches, and their loss."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention.module import State
from t2r.model.cross_entropy import LOGITS
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
    # Padding stands at the end of rows, where causal attention shows it to nothing that counts.
    tokens, targets = jnp.maximum(batch.tokens[:, :-1], 0), batch.tokens[:, 1:]
    counts = targets != PADDING
    hidden = _hidden(model, tokens, batch.source, key)
    losses = jnp.zeros(targets.shape)
    if teacher is None or teacher.share < 1:
        losses = model.embedding.loss(hidden, jnp.maximum(targets, 0), key, smoothing)
    if teacher is not None:
        wanted = jax.lax.stop_gradient(_hidden(teacher.model, tokens, batch.source, None))
        apart = distances(model.log_probs, hidden, teacher.model.log_probs, wanted)
        losses = (1 - teacher.share) * losses + teacher.share * apart
    return jnp.where(counts, losses, 0), counts


def _hidden(model: LanguageModel, tokens: Array, source: Array | None, key: PRNGKeyArray | None) -> Array:
    seen = None if source is None else remember(model, source, key)
    return model(tokens, source=seen, key=key)[0]


def distances(
    log_probs: Callable[[Array], Array],
    hidden: Float[Array, "b n e"],
    teacher_log_probs: Callable[[Array], Array],
    wanted: Float[Array, "b n f"],
) -> Float[Array, "b n"]:
    """-Σ p log q over the vocabulary, p the teacher's probabilities: the divergence and the teacher's own entropy.

    Probabilities exist for some places at a time, and are computed again for the backward pass.
    """
    batch, length, _ = hidden.shape
    words = jax.eval_shape(log_probs, hidden[:, :1]).shape[-1]
    size = min(max(LOGITS // (batch * words), 1), length)
    count = -(-length // size)

    def cut(x: Array) -> Array:  # (b, n, …) → (pieces, b, size, …)
        x = jnp.pad(x, [(0, 0), (0, count * size - length), (0, 0)])
        return jnp.moveaxis(x.reshape(batch, count, size, -1), 1, 0)

    @jax.checkpoint
    def piece(rows: tuple[Array, Array]) -> Array:
        ours, theirs = rows
        return -(jnp.exp(teacher_log_probs(theirs)) * log_probs(ours)).sum(-1)

    found = jax.lax.map(piece, (cut(hidden), cut(wanted)))
    return jnp.moveaxis(found, 0, 1).reshape(batch, count * size)[:, :length]


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
