"""Perplexity: the paper's measure (the last 256 tokens of each window of 512), of all tokens, and of documents."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from t2r.batch import Batch, pad_sequences
from t2r.console import Progress
from t2r.data.buckets import Buckets
from t2r.errors import InputError
from t2r.layout import constrain
from t2r.model.loss import total_loss
from t2r.model.transformer import LanguageModel, check_length

WINDOW = 512  # tokens, as in the paper
_LARGEST_LOSS = 700  # nats; exp overflows float64 soon after


class Scores(NamedTuple):
    """The scores of a model on text."""

    perplexity: float  # of the second half of each window: every token has at least half a window of context
    perplexity_all: float  # of all tokens, in non-overlapping windows
    tokens: int
    total: float  # negative log-likelihood of all tokens, in nats, as in perplexity_all


def perplexity(
    model: LanguageModel,
    tokens: np.ndarray,
    *,
    window: int | None = None,
    batch: int = 8,
    start: int | None = None,
    quiet: bool = False,
) -> Scores:
    """Scores a text. Its first token is predicted from `start`, the end-of-text token; None: it is not scored.

    `window` is 512 by default, or fewer if the model has fewer learned positions. Windows start every half window.
    `perplexity` is over the second half of each; `perplexity_all` is over every second window, whole, and what is left
    after the last of these, with the window before as context. A text of at most half a window has both measures over
    all its tokens.
    """
    window = _window(model, window)
    if window < 2:
        raise InputError(f"window={window} must be at least 2: its second half is scored")
    stream = np.asarray(tokens, np.int32)
    if start is not None:
        stream = np.concatenate([[start], stream])
    if len(stream) < 2:
        raise InputError(f"a text of {len(stream)} tokens cannot be scored: it needs at least 2")
    half, targets = window // 2, len(stream) - 1
    starts = range(0, max(targets - half, 1), half)
    graph, state = nnx.split(model)
    late, whole = np.full(targets, np.nan), np.full(targets, np.nan)
    with Progress("evaluate", len(starts), quiet=quiet) as progress:
        for first in range(0, len(starts), batch):
            chosen = starts[first : first + batch]
            losses = np.asarray(_losses(graph, state, windows(stream, chosen, window, batch)))
            for begin, loss in zip(chosen, losses):
                loss = loss[: targets - begin]
                late[begin + half : begin + window] = loss[half:]
                if (begin // half) % 2 == 0:
                    whole[begin : begin + window] = loss
                elif begin == starts[-1]:  # the remainder after the last non-overlapping window
                    whole[begin + half : begin + window] = loss[half:]
            progress.advance(len(chosen))
    later = late[half:] if targets > half else whole
    return Scores(_exp(later.mean()), _exp(whole.mean()), targets, float(whole.sum()))


def document_perplexity(
    model: LanguageModel,
    documents: Sequence[Sequence[int] | np.ndarray],
    *,
    start: int,
    window: int | None = None,
    batch: int = 8,
    quiet: bool = False,
) -> Scores:
    """Scores documents independently. Each follows `start` and is cut to `window` tokens, `start` included.

    End tokens are not scored. Both measures are over all tokens.
    """
    window = _window(model, window)
    sequences = [[start, *ids[: window - 1]] for ids in documents]
    graph, state = nnx.split(model)
    sums = []
    with Progress("evaluate", len(sequences), quiet=quiet) as progress:
        for first in range(0, len(sequences), batch):
            chosen = sequences[first : first + batch]
            sums.append(_total(graph, state, Batch(pad_sequences(chosen, batch, window))))
            progress.advance(len(chosen))
    loss, tokens = _add(sums)
    if not tokens:
        raise InputError(f"{len(sequences)} documents without a token cannot be scored: give documents with text")
    return Scores(_exp(loss / tokens), _exp(loss / tokens), tokens, loss)


def _window(model: LanguageModel, window: int | None) -> int:
    """The window size: WINDOW by default, or fewer if the model has fewer learned positions; checked."""
    window = min(WINDOW, model.config.max_positions or WINDOW) if window is None else window
    check_length(model.config, window)
    return window


def windows(stream: np.ndarray, starts: range, window: int, batch: int) -> Int[np.ndarray, "b n"]:
    """The `window` + 1 tokens from each start, padded with zeros to `batch` sequences."""
    sequences = np.zeros((batch, window + 1), np.int32)
    for sequence, begin in zip(sequences, starts):
        tokens = stream[begin : begin + window + 1]
        sequence[: len(tokens)] = tokens
    return sequences


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: nnx.GraphDef, state: nnx.State, tokens: Int[Array, "b n"]) -> Float[Array, "b m"]:
    # Padding is at the end: attention is causal, so no token that counts attends to it.
    tokens = constrain(tokens, ("batch", None))
    losses = nnx.merge(graph, state).losses(tokens[:, :-1], tokens[:, 1:]).astype(jnp.float32)
    return constrain(losses, (None, None))  # replicated: every process reads all


def pair_perplexity(model: LanguageModel, pairs: Buckets) -> float:
    """Perplexity of the target tokens, given their sources."""
    graph, state = nnx.split(model)
    sums = [_total(graph, state, pairs.batch(index).whole()) for index in range(len(pairs))]
    loss, tokens = _add(sums)
    return _exp(loss / tokens)


def _add(sums: list[tuple[Array, Array]]) -> tuple[float, int]:
    losses, tokens = zip(*sums)
    return sum(map(float, losses)), sum(map(int, tokens))


@functools.partial(jax.jit, static_argnums=0)
def _total(graph: nnx.GraphDef, state: nnx.State, batch: Batch) -> tuple[Array, Array]:
    batch = jax.tree.map(lambda ids: constrain(ids, ("batch", None)), batch)
    return jax.tree.map(lambda sums: constrain(sums, ()), total_loss(nnx.merge(graph, state), batch))


def per_word(scores: Scores, text: str) -> float:
    """Perplexity per word (separated by spaces), which is comparable between models with different subwords."""
    return _exp(scores.total / max(len(text.split()), 1))


def bits_per_byte(scores: Scores, text: str) -> float:
    """Bits per byte of the text, which is comparable between any two tokenizers."""
    return scores.total / math.log(2) / len(text.encode())


def _exp(mean: float) -> float:
    return math.exp(min(mean, _LARGEST_LOSS))
