"""Perplexity against a plain computation, window by window."""

import math

import jax
import numpy as np
import pytest

from conftest import make_model, micro, random_tokens
from t2r.errors import InputError
from t2r.evaluation.perplexity import bits_per_byte, document_perplexity, per_word, perplexity
from t2r.model.parameters import arrays_of, with_arrays

MODEL = make_model(micro(layers=1))
LOG_PROBS = jax.jit(lambda tokens: MODEL.log_probs(MODEL(tokens)[0]))


@pytest.fixture
def model():
    return MODEL


def nll(stream, begin, window):
    """The losses of all targets of one window, from the probabilities of the whole vocabulary."""
    piece = stream[begin : begin + window + 1]
    log_probs = np.asarray(LOG_PROBS(piece[None, :-1]))[0]
    return -log_probs[np.arange(len(piece) - 1), piece[1:]]


@pytest.mark.parametrize("length", [9, 50, 65, 70])
def test_both_measures_equal_a_plain_computation(model, length):
    """`perplexity`: each token from at least half a window; `perplexity_all`: all tokens, once each."""
    window, stream = 16, np.asarray(random_tokens(1, length))[0]
    scores = perplexity(model, stream, window=window, batch=3, quiet=True)
    late = [nll(stream, begin, window)[8:] for begin in range(0, max(length - 9, 1), 8)]
    whole = [nll(stream, begin, window) for begin in range(0, length - 1, window)]
    late = np.concatenate(late) if length > 9 else np.concatenate(whole)
    assert scores.tokens == length - 1 == len(np.concatenate(whole))
    assert scores.perplexity == pytest.approx(math.exp(late.mean()), rel=1e-4)
    if (length - 1) % 16 == 0 or (length - 1) % 16 > 8:
        # A remainder of up to half a window is scored with more context than a separate window would give.
        assert scores.perplexity_all == pytest.approx(math.exp(np.concatenate(whole).mean()), rel=1e-4)


def test_the_first_token_is_predicted_from_the_end_of_text(model):
    stream = np.asarray(random_tokens(1, 20))[0]
    with_start = perplexity(model, stream, window=32, start=2, quiet=True)
    by_hand = perplexity(model, np.concatenate([[2], stream]), window=32, quiet=True)
    assert with_start == by_hand and with_start.tokens == 20


def test_documents_are_scored_independently(model):
    """Each follows `start` and is cut to the window; other documents of the batch, or empty ones, have no effect."""
    documents = [np.asarray(random_tokens(1, length, seed=length))[0].tolist() for length in (5, 40, 15)]
    scores = document_perplexity(model, [*documents, []], start=2, window=16, batch=2, quiet=True)
    losses = np.concatenate([nll(np.array([2, *ids]), 0, 15) for ids in documents])
    assert scores.tokens == len(losses) == 5 + 15 + 15
    assert scores.perplexity == scores.perplexity_all == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    with pytest.raises(InputError, match="without a token"):
        document_perplexity(model, [[]], start=2, window=16, batch=2, quiet=True)


def test_a_loss_that_is_not_a_number_is_not_left_out():
    """Only the last window reads token 7, whose embedding is not a number."""
    untied = make_model(micro(layers=1, tied_output=False, adaptive_cutoffs=()))
    arrays = arrays_of(untied)
    broken = with_arrays(untied, {**arrays, "embedding.table": arrays["embedding.table"].at[7].set(np.nan)})
    stream = np.array([5] * 60 + [7, 5, 5])
    assert math.isfinite(perplexity(broken, stream[:60], window=16, quiet=True).perplexity)
    scores = perplexity(broken, stream, window=16, quiet=True)
    assert math.isnan(scores.perplexity) and math.isnan(scores.perplexity_all)


def test_per_word_and_per_byte_count_the_same_bits(model):
    scores = perplexity(model, np.asarray(random_tokens(1, 30))[0], window=16, quiet=True)
    text = "zwölf Boxkämpfer jagen Viktor"
    assert math.log(per_word(scores, text)) * 4 == pytest.approx(scores.total)
    assert bits_per_byte(scores, text) * math.log(2) * 31 == pytest.approx(scores.total)


def test_what_cannot_be_scored_is_refused(model):
    with pytest.raises(InputError, match="window=1 must be at least 2"):
        perplexity(model, np.array([1, 2, 3]), window=1)
    with pytest.raises(InputError, match="1 tokens"):
        perplexity(model, np.array([3]), quiet=True)
    learned = make_model(micro(positions="learned", max_positions=32))
    with pytest.raises(InputError, match="max_positions=32"):
        perplexity(learned, np.arange(100), window=64, quiet=True)
    assert perplexity(learned, np.arange(100), quiet=True).tokens == 99
