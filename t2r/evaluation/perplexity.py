"""Perplexity: the paper's measure (the last 256 of each 512 tokens), over all tokens, and document by document."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from t2r.batch import Batch, pad_rows
from t2r.console import Progress
from t2r.data.buckets import Buckets
from t2r.errors import InputError
from t2r.layout import constrain
from t2r.model.loss import total_loss
from t2r.model.transformer import LanguageModel, check_length


class Scores(NamedTuple):
    """What a model makes of a text."""

    perplexity: float  # of the last half of each window: every token has at least half a window before it
    perplexity_all: float  # of all tokens, in windows that do not overlap
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
    """Scores a text. `start` (the end-of-text id) is what the first token is predicted from; None leaves it out.

    `window` is 512 unless told, or as much as the model's learned positions reach.
    Windows start every half window. The later half of each counts for `perplexity`; every second window, whole, counts
    for `perplexity_all`. A text too short to have a later half has both measures over all its tokens.
    """
    window = _window(model, window)
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
            losses = np.asarray(_losses(graph, state, cut(stream, chosen, window, batch)))
            for begin, row in zip(chosen, losses):
                row = row[: targets - begin]
                late[begin + half : begin + window] = row[half:]
                if (begin // half) % 2 == 0:
                    whole[begin : begin + window] = row
                elif begin == starts[-1]:  # what is left beyond the last window that does not overlap
                    whole[begin + half : begin + window] = row[half:]
            progress.advance(len(chosen))
    later = late[~np.isnan(late)] if targets > half else whole
    return Scores(_exp(later.mean()), _exp(whole.mean()), targets, float(whole.sum()))


def document_perplexity(
    model: LanguageModel,
    documents: Sequence[Sequence[int]],
    *,
    start: int,
    window: int | None = None,
    batch: int = 8,
    quiet: bool = False,
) -> Scores:
    """Scores documents that know nothing of each other: each follows `start`, with which it is cut at `window` tokens,
    and its end does not count. Both measures are over all tokens."""
    window = _window(model, window)
    rows = [[start, *ids[: window - 1]] for ids in documents]
    graph, state = nnx.split(model)
    sums = []
    with Progress("evaluate", len(rows), quiet=quiet) as progress:
        for first in range(0, len(rows), batch):
            chosen = rows[first : first + batch]
            sums.append(_total(graph, state, Batch(pad_rows(chosen, batch, window))))
            progress.advance(len(chosen))
    loss, tokens = _added(sums)
    if not tokens:
        raise InputError(f"{len(rows)} documents without a token cannot be scored: give others")
    return Scores(_exp(loss / tokens), _exp(loss / tokens), tokens, loss)


def _window(model: LanguageModel, window: int | None) -> int:
    """A window the model has positions for; 512 unless told, or as much as learned positions reach."""
    window = min(512, model.config.max_positions or 512) if window is None else window
    check_length(model.config, window)
    return window


def cut(stream: np.ndarray, starts: range, window: int, batch: int) -> Int[np.ndarray, "b n"]:
    """`batch` rows of window + 1 tokens from each start, filled up with zeros."""
    rows = np.zeros((batch, window + 1), np.int32)
    for row, begin in zip(rows, starts):
        piece = stream[begin : begin + window + 1]
        row[: len(piece)] = piece
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: nnx.GraphDef, state: nnx.State, rows: Int[Array, "b n"]) -> Float[Array, "b m"]:
    # Padding stands at the end, where causal attention shows it to nothing that is counted.
    rows = constrain(rows, ("batch", None))
    losses = nnx.merge(graph, state).losses(rows[:, :-1], rows[:, 1:]).astype(jnp.float32)
    return constrain(losses, (None, None))  # every process sees all


def pair_perplexity(model: LanguageModel, pairs: Buckets) -> float:
    """Perplexity of the targets' tokens, given their sources."""
    graph, state = nnx.split(model)
    sums = [_total(graph, state, pairs.batch(index).whole()) for index in range(len(pairs))]
    loss, tokens = _added(sums)
    return _exp(loss / tokens)


def _added(sums: list[tuple[Array, Array]]) -> tuple[float, int]:
    losses, tokens = zip(*sums)
    return sum(map(float, losses)), sum(map(int, tokens))


@functools.partial(jax.jit, static_argnums=0)
def _total(graph: nnx.GraphDef, state: nnx.State, batch: Batch) -> tuple[Array, Array]:
    batch = jax.tree.map(lambda rows: constrain(rows, ("batch", None)), batch)
    return jax.tree.map(lambda sums: constrain(sums, ()), total_loss(nnx.merge(graph, state), batch))


def per_word(scores: Scores, text: str) -> float:
    """Perplexity per word between spaces, so that models with different subwords compare."""
    return _exp(scores.total / max(len(text.split()), 1))


def bits_per_byte(scores: Scores, text: str) -> float:
    """Bits to encode a byte of the text; the measure that needs no notion of a word."""
    return scores.total / math.log(2) / len(text.encode())


def _exp(mean: float) -> float:
    return math.exp(min(mean, 700))  # a model can be bad enough to overflow
