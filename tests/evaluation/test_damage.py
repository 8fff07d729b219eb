"""Recall, and the damage of reducing one attention at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from t2r.batch import Batch
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.evaluation.damage import Damage, choose, measure_damage
from t2r.evaluation.recall import recall, repeated
from t2r.model.loss import token_losses
from tests.conftest import make_model, micro, micro_mt, random_tokens


def test_recall_is_the_perplexity_of_the_repeated_half_without_its_first_token():
    model, text = make_model(micro(adaptive_cutoffs=())), np.asarray(random_tokens(1, 50)[0])
    sequences = repeated(text, 16, 3)
    assert sequences.shape == (3, 16) and (sequences[:, :8] == sequences[:, 8:]).all()
    log_probs = model.log_probs(model(jnp.asarray(sequences))[0])
    expected = [-log_probs[b, i - 1, sequences[b, i]] for b in range(3) for i in range(9, 16)]
    for batch, length in ((2, 16), (8, 16), (2, 17)):  # of 17 tokens, 8 repeat 8
        measured = recall(model, text, length=length, sequences=3, batch=batch, quiet=True)
        assert measured == pytest.approx(np.exp(np.mean(expected)), rel=1e-5)
    with pytest.raises(InputError, match="at least 100 tokens, not 50"):
        recall(model, text, length=200)


def reduced_to_a_window(model, layer, window, sinks):
    """The model with one layer that attends to its window and sinks alone, by another way: a swap, then no mixture."""
    keep = ",".join(str(other) for other in range(len(model.blocks)) if other != layer)
    swapped = swap(model, features=2, window=window, sinks=sinks, keep=keep, attention="causal")
    mixture = swapped.blocks[layer].attention.mixture
    mixture.bias[...] = jnp.full(mixture.bias.shape, -1e9)
    return swapped


def test_damage_is_the_recall_of_the_model_with_one_layer_reduced_to_its_window():
    model, text = (
        make_model(micro(layers=3, positions="rotary", adaptive_cutoffs=())),
        np.asarray(random_tokens(1, 60)[0]),
    )
    batches = [Batch(part) for part in np.split(repeated(text, 20, 6), 2)]
    damage = measure_damage(model, batches, window=3, sinks=1, quiet=True)
    options = dict(length=20, sequences=6, quiet=True)
    assert damage.base == pytest.approx(recall(model, text, **options), rel=1e-5)
    assert list(damage.scores) == ["0.attention", "1.attention", "2.attention"]
    for layer, score in enumerate(damage.scores.values()):
        expected = recall(reduced_to_a_window(model, layer, 3, 1), text, **options)
        assert score == pytest.approx(expected, rel=1e-5)


def test_damage_of_a_translation_model_reduces_cross_attention_to_the_mean_of_the_source():
    model = make_model(micro_mt(layers=2))
    batch = Batch(random_tokens(2, 9, vocab=60), random_tokens(2, 7, 1, vocab=60))
    damage = measure_damage(model, [batch], window=20, quiet=True)
    assert list(damage.scores) == ["0.attention", "0.cross", "1.attention", "1.cross"]
    whole = float(jnp.exp(token_losses(model, batch)[0].mean()))
    assert damage.base == pytest.approx(whole, rel=1e-5)
    assert damage.scores["0.attention"] == pytest.approx(whole, rel=1e-5)  # the window holds everything
    swapped = swap(model, features=1, attention="cross", keep="0")
    phi = swapped.blocks[1].cross.feature_map
    phi.weight[...], phi.bias[...] = jnp.zeros(phi.weight.shape), jnp.ones(phi.bias.shape)
    expected = float(jnp.exp(token_losses(swapped, batch)[0].mean()))
    assert damage.scores["1.cross"] == pytest.approx(expected, rel=1e-5)


def test_keep_auto_is_the_worst_layers_or_those_above_a_bound():
    damage = Damage(2.0, {"0.attention": 2.1, "1.attention": 9.0, "2.attention": 2.5, "3.attention": 2.0}, 1.0)
    assert choose("auto:2", damage) == "1,2" and choose("auto:1", damage) == "1"
    assert choose("auto", damage) == "1,2" and choose("auto:50%", damage) == "1"
    assert choose("auto:4%", damage) == "0,1,2"
    assert choose("auto:0", damage) == choose("auto:900%", damage) == "none"
    for wrong in ("auto:", "auto:x", "auto:-1", "automatic"):
        with pytest.raises(InputError, match="auto:N"):
            choose(wrong, damage)


def test_a_model_without_softmax_has_nothing_to_measure():
    with pytest.raises(InputError, match="no softmax attention left"):
        measure_damage(swap(make_model(micro()), features=4), [Batch(random_tokens(2, 8))])
