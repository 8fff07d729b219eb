"""What a model writes: how likely another model, such as its teacher, finds it, and how much it repeats itself.

A conversion can keep the perplexity of given text and still write worse text, since its own errors become its input.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from t2r.batch import Batch, pad_sequences
from t2r.console import Progress
from t2r.data.tokenizer import prompt_ids, same_tokens, stop_ids
from t2r.decode.generate import generate_tokens, prefill
from t2r.decode.sampling import Sampling
from t2r.decode.text import check_language_model
from t2r.errors import InputError
from t2r.model.loss import token_losses
from t2r.model.transformer import LanguageModel, check_length
from t2r.store.model_dir import LoadedModel

LENGTH, PROMPT = 256, 32  # tokens of a sample, and of the text that it continues
GRAM = 4  # tokens of the pieces whose repetition is counted
REPEATS, LEAST_LOOP = 3, 24  # a loop is one piece, so many times in a row, over at least so many tokens
WAYS = {"sample": Sampling(1.0), "greedy": Sampling()}


def score_samples(
    loaded: LoadedModel,
    tokens: np.ndarray,
    count: int,
    *,
    scorer: LoadedModel | None = None,
    length: int = LENGTH,
    prompt: int = PROMPT,
    batch: int = 32,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, float]:
    """Scores of `count` samples of up to `length` tokens each, and of as many greedy continuations: see `WAYS`.

    They continue pieces of `prompt` tokens from all over the text `tokens`; 0: they begin from nothing. By name:
    `sample_perplexity` under `scorer` (None: the model itself), `sample_repetition`, `sample_loops`, `sample_tokens`
    (the mean length), and the same with `greedy_`.
    """
    check_samples(loaded, scorer, length=length, prompt=prompt)
    prompts = [prompt_ids(loaded.tokenizer, piece) for piece in pieces(tokens, count, prompt)]
    judge, scores = (scorer or loaded).model, {}
    with Progress("samples", count * len(WAYS), quiet=quiet) as progress:
        for way, sampling in WAYS.items():
            texts, loss = [], 0.0
            for first in range(0, count, batch):
                part = prompts[first : first + batch]
                written = _write(loaded, part, length, sampling, seed + first)
                loss += _loss(judge, part, written, batch=min(batch, count), length=length)
                texts += written
                progress.advance(len(part))
            total = sum(map(len, texts))
            scores |= {
                f"{way}_perplexity": math.exp(min(loss / total, 700)) if total else math.nan,
                f"{way}_repetition": repetition(texts),
                f"{way}_loops": sum(map(ends_in_loop, texts)) / count,
                f"{way}_tokens": total / count,
            }
    return scores


def check_samples(loaded: LoadedModel, scorer: LoadedModel | None, *, length: int, prompt: int) -> None:
    """Raises an InputError, before anything is computed, if the two models cannot be used together, or so long."""
    if scorer is not None and scorer.model.config.encoder_layers:
        raise InputError(
            "the scorer is a translation model: choose a language model, such as the one before conversion"
        )
    for content in (loaded, scorer or loaded):
        check_language_model(content)
        check_length(content.model.config, prompt + 1 + length)  # an end-of-text token may come first
    sizes = {content.model.config.vocab_size for content in (loaded, scorer or loaded)}
    if scorer is not None and (len(sizes) > 1 or not same_tokens(loaded.tokenizer, scorer.tokenizer)):
        raise InputError("the scorer has other tokens than the model: choose a scorer with the model's own tokenizer")


def pieces(tokens: np.ndarray, count: int, length: int) -> list[list[int]]:
    """`count` pieces of a text, evenly spaced from its beginning to its end; they overlap if it is short."""
    if len(tokens) < length:
        raise InputError(f"prompts of {length} tokens need a longer text: this one has {len(tokens)} tokens")
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [np.asarray(tokens[start : start + length]).tolist() for start in starts]


def repetition(texts: Sequence[Sequence[int]]) -> float:
    """The share of 4-grams that occurred before in the same text; 0 if there are none."""
    grams = [list(zip(*(text[start:] for start in range(GRAM)))) for text in texts]
    total = sum(map(len, grams))
    return 1 - sum(len(set(some)) for some in grams) / total if total else 0.0


def ends_in_loop(text: Sequence[int]) -> bool:
    """Whether a text ends with one piece at least three times in a row, over at least 24 tokens."""
    for period in range(1, len(text) // REPEATS + 1):
        end = text[-max(REPEATS * period, LEAST_LOOP) :]
        if len(end) >= LEAST_LOOP and end[period:] == end[:-period]:
            return True
    return False


def _write(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], length: int, sampling: Sampling, seed: int
) -> list[list[int]]:
    generation = prefill(loaded.model, prompts, length, seed=seed)
    return generate_tokens(loaded.model, generation, length, end=stop_ids(loaded.tokenizer), sampling=sampling)[1]


def _loss(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    written: Sequence[Sequence[int]],
    *,
    batch: int,
    length: int,
) -> float:
    """The total negative log-likelihood of what was written, given its prompts, in nats."""
    sequences = [[*prompt, *text] for prompt, text in zip(prompts, written)]
    padded = pad_sequences(sequences, batch, max(map(len, prompts)) + length)  # one shape: one compiled program
    losses = np.asarray(_token_losses(*nnx.split(model), Batch(jnp.asarray(padded))), np.float64)
    # Target i is token i + 1; those of the prompt do not count, and padding has loss 0.
    return float(sum(row[len(prompt) - 1 :].sum() for row, prompt in zip(losses, prompts)))


@functools.partial(jax.jit, static_argnums=0)
def _token_losses(graph: nnx.GraphDef, arrays: nnx.State, batch: Batch) -> Float[Array, "b n"]:
    return token_losses(nnx.merge(graph, arrays), batch)[0].astype(jnp.float32)
