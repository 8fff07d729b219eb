"""Recall: how well a model repeats what it has just read.

A sequence is a piece of text, twice. In the second half every token can be copied from the first. A transformer does
so nearly without error; a model with a state of fixed size may write good text and still fail here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from t2r.console import Progress
from t2r.errors import InputError
from t2r.model.transformer import LanguageModel, check_length


def repeated(tokens: np.ndarray, length: int, sequences: int) -> Int[np.ndarray, "b n"]:
    """Sequences of `length` tokens whose second half repeats the first: the text in pieces, in order.

    Halves are equal: an odd length is rounded down.
    """
    half = length // 2
    count = min(sequences, len(tokens) // half) if half else 0
    if count < 1:
        raise InputError(
            f"recall over {length} tokens needs a text of at least {max(half, 1)} tokens, not {len(tokens)}: give a "
            "longer text, or a shorter length"
        )
    pieces = np.asarray(tokens[: count * half], np.int32).reshape(count, half)
    return np.concatenate([pieces, pieces], 1)


def recall(
    model: LanguageModel,
    tokens: np.ndarray,
    *,
    length: int = 512,
    sequences: int = 32,
    batch: int = 8,
    quiet: bool = False,
) -> float:
    """The perplexity of the second halves, without their first tokens, which nothing announces; 1 is perfect."""
    check_length(model.config, length)
    all_sequences = repeated(tokens, length, sequences)
    graph, arrays = nnx.split(model)
    losses = []
    with Progress("recall", len(all_sequences), quiet=quiet) as progress:
        for first in range(0, len(all_sequences), batch):
            part = all_sequences[first : first + batch]
            padded = np.resize(part, (min(batch, len(all_sequences)), part.shape[1]))  # one shape: one compiled program
            losses.append(np.asarray(_second_half(graph, arrays, padded))[: len(part)])
            progress.advance(len(part))
    return float(np.exp(np.concatenate(losses).mean()))


@functools.partial(jax.jit, static_argnums=0)
def _second_half(graph: nnx.GraphDef, arrays: nnx.State, tokens: Int[Array, "b n"]) -> Float[Array, "b m"]:
    losses = nnx.merge(graph, arrays).losses(tokens[:, :-1], tokens[:, 1:])
    return losses[:, tokens.shape[1] // 2 :].astype(jnp.float32)
