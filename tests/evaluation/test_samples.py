"""What a model writes, scored by another model, against a plain computation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.evaluation.samples import ends_in_loop, pieces, repetition, score_samples
from t2r.store.model_dir import LoadedModel
from tests.conftest import PROSE, make_model, micro


@pytest.fixture(scope="module")
def models(tokenizer):
    """A random transformer, and its conversion."""
    transformer = make_model(micro(vocab_size=300, layers=1))
    return [LoadedModel(model, tokenizer, {"history": []}) for model in (transformer, swap(transformer, features=4))]


def test_samples_are_scored_by_the_other_model(models, tokenizer):
    """Greedy ones can be written by hand: token by token, without a state."""
    transformer, rnn = models
    tokens = np.asarray(tokenizer.encode(PROSE)[:60])
    scores = score_samples(rnn, tokens, 3, scorer=transformer, length=7, prompt=5, batch=2, quiet=True)
    next_of = [
        jax.jit(lambda ids, at, model=one.model: model.log_probs(model(ids)[0])[0, at]) for one in (rnn, transformer)
    ]
    losses, lengths = [], []
    for prompt in pieces(tokens, 3, 5):
        ids = [tokenizer.end, *prompt] if tokenizer.begins else list(prompt)
        before = len(ids)
        for _ in range(7):
            padded = jnp.asarray([ids + [0] * (16 - len(ids))])  # what comes after a token has no effect on it
            own, others = (np.asarray(log_probs(padded, len(ids) - 1)) for log_probs in next_of)
            if int(own.argmax()) == tokenizer.stop:
                break
            ids.append(int(own.argmax()))
            losses.append(-others[ids[-1]])
        lengths.append(len(ids) - before)
    assert scores["greedy_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert scores["greedy_tokens"] == np.mean(lengths) > 1


@pytest.mark.slow
def test_what_a_model_samples_is_likelier_under_itself_than_what_another_samples(models, tokenizer):
    transformer, tokens = models[0], np.asarray(tokenizer.encode(PROSE)[:60])
    both = [
        score_samples(one, tokens, 16, scorer=transformer, length=24, prompt=5, batch=16, quiet=True) for one in models
    ]
    assert both[0]["sample_perplexity"] < both[1]["sample_perplexity"]
    own = score_samples(transformer, tokens, 16, length=24, prompt=5, batch=16, quiet=True)
    assert own == both[0], "without a scorer, the model itself"
    other_seed = score_samples(transformer, tokens, 16, length=24, prompt=5, batch=16, seed=1, quiet=True)
    assert other_seed["sample_perplexity"] != own["sample_perplexity"]
    assert other_seed["greedy_perplexity"] == own["greedy_perplexity"]


def test_prompts_come_from_all_over_the_text_or_there_are_none(models):
    tokens = np.arange(100)
    assert pieces(tokens, 3, 10) == [list(range(first, first + 10)) for first in (0, 45, 90)]
    assert pieces(tokens[:4], 2, 4) == [[0, 1, 2, 3]] * 2 and pieces(tokens, 2, 0) == [[], []]
    with pytest.raises(InputError, match="prompts of 10 tokens need a longer text: this one has 4 tokens"):
        pieces(tokens[:4], 2, 10)
    assert score_samples(models[0], tokens, 2, length=3, prompt=0, quiet=True)["greedy_tokens"] <= 3


def test_repetition_counts_4_grams_within_a_text():
    assert repetition([[1, 2, 3, 4, 5, 6, 7]]) == 0.0 == repetition([[1, 2, 3], []])
    assert repetition([[1, 2, 3, 4] * 3]) == pytest.approx(1 - 4 / 9)
    assert repetition([[5] * 8, [1, 2, 3, 4, 5]]) == pytest.approx(1 - 3 / 7), "1 of 5, and 2 of 2"


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ([7] * 24, True),
        ([7] * 23, False),  # such as a row of dots
        ([*range(100), *[1, 2, 3] * 8], True),
        ([*[1, 2, 3] * 40, *range(9, 20)], False),  # it found its way out
        ([*range(50), *list(range(20)) * 3], True),
        ([*range(50), *list(range(20)) * 2], False),
        ([*range(50), *list(range(20)) * 3, *range(7)], True),  # cut in the middle of a round
        ([], False),
    ],
)
def test_a_loop_is_one_piece_three_times_at_the_end(text, loops):
    assert ends_in_loop(text) == loops


def test_models_that_do_not_fit_together_are_refused(models, tokenizer):
    larger = LoadedModel(make_model(micro(vocab_size=310, layers=1)), tokenizer, {"history": []})
    with pytest.raises(InputError, match="other tokens than the model"):
        score_samples(models[1], np.arange(50), 2, scorer=larger)
    learned = make_model(micro(vocab_size=300, layers=1, positions="learned", max_positions=32))
    with pytest.raises(InputError, match="max_positions=32"):
        score_samples(models[1], np.arange(50), 2, scorer=LoadedModel(learned, tokenizer, {"history": []}))
