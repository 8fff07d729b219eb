"""Recall, and the damage of reducing one attention at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from t2r.batch import Batch
from t2r.benchmark.steps import attention_bytes
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.evaluation.damage import Damage, damage_on_text, measure_damage
from t2r.evaluation.keep import choose_layers
from t2r.evaluation.recall import recall, repeated
from t2r.model.loss import token_losses
from t2r.model.state_size import state_bytes
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


def test_damage_of_one_head_is_that_of_its_layer_if_the_other_heads_are_silent():
    model = make_model(micro(layers=2, heads=4, kv_heads=2, positions="rotary", adaptive_cutoffs=()))
    out = model.blocks[1].attention.out
    out.kernel[...] = out.kernel[...].at[:2].set(0)  # of the first key/value head
    batches = [Batch(repeated(np.asarray(random_tokens(1, 60)[0]), 20, 6))]
    damage = measure_damage(model, batches, window=3, sinks=1, heads=True, quiet=True)
    names = ["0.attention", "0.attention.0", "0.attention.1", "1.attention", "1.attention.0", "1.attention.1"]
    assert list(damage.scores) == names and list(damage.layers()) == [0, 1]
    assert damage.scores["1.attention.0"] == pytest.approx(damage.base, rel=1e-6)
    assert damage.scores["1.attention.1"] == pytest.approx(damage.scores["1.attention"], rel=1e-6)
    assert damage.scores["1.attention"] != pytest.approx(damage.base, rel=1e-4)
    assert len({damage.scores[name] for name in names[:3]}) == 3


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


DAMAGE = Damage(2.0, {"0.attention": 2.1, "1.attention": 9.0, "2.attention": 2.5, "3.attention": 2.0}, 1.0)


def kept(keep: str, config=micro(layers=4), damage=DAMAGE, **plan) -> str | tuple[str, str]:
    """The layers that are kept, of a translation model also those of cross attention."""
    chosen, measured = choose_layers({"keep": keep, **plan}, config, lambda: damage)
    assert measured["damage"] == damage._asdict()
    return (chosen["keep"], chosen["cross_keep"]) if config.encoder_layers else chosen["keep"]


def test_keep_auto_is_the_worst_layers_or_those_above_a_bound():
    assert kept("auto:2") == "1,2" and kept("auto:1") == "1"
    assert kept("auto") == "1,2" and kept("auto:50%") == "1"
    assert kept("auto:4%") == "0,1,2"
    assert kept("auto:0") == kept("auto:900%") == "none"
    for wrong in ("auto:", "auto:x", "auto:-1", "automatic", "auto:8MB", "auto:8MiB@", "auto:8MiB@0", "auto:2KiB%"):
        with pytest.raises(InputError, match="auto:N"):
            kept(wrong)


def size(config, keep: str, length: int, **plan) -> int:
    """Bytes of the state of one sequence, counted from its arrays."""
    swapped = swap(make_model(config), keep=keep, **plan)
    return attention_bytes(swapped.init_state(1, length))


def test_keep_auto_with_a_budget_keeps_as_many_of_the_worst_layers_as_fit():
    config, plan = micro(layers=4), dict(features=4, window=3, sinks=1, seed=7)
    sizes = [size(config, keep, 100, **plan) for keep in ("none", "1", "1,2", "0,1,2")]
    assert sizes == sorted(sizes)
    chosen = {"none": sizes[1] - 1, "1": sizes[1], "1,2": sizes[3] - 1, "0,1,2": sizes[3]}
    for layers, budget in chosen.items():
        assert kept(f"auto:{budget / 1024:.6f}KiB@100", **plan) == layers
    with pytest.raises(InputError, match="when all layers are converted: give at least as much"):
        kept(f"auto:{(sizes[0] - 1) / 1024:.6f}KiB@100", **plan)
    with pytest.raises(InputError, match="of 2,048 tokens fits without a conversion"):
        kept("auto:1GiB", **plan)
    with pytest.raises(InputError, match="of 32 tokens fits without"):
        kept("auto:1GiB", micro(layers=4, positions="learned", max_positions=32), **plan)


def test_a_budget_is_for_both_kinds_of_attention_of_a_translation_model():
    config, plan = micro_mt(layers=3), dict(features=4)
    scores = {
        "0.attention": 5.0,
        "1.attention": 3.0,
        "2.attention": 4.0,
        "0.cross": 2.0,
        "1.cross": 9.0,
        "2.cross": 8.0,
    }
    one = state_bytes(swap(make_model(config), keep="0", cross_keep="1", **plan).config, 1, 50, 50)
    options = dict(config=config, damage=Damage(2.0, scores, 1.0), **plan)
    assert kept(f"auto:{one / 1024:.6f}KiB@50", **options) == ("0", "1")
    assert kept(f"auto:{(one - 1) / 1024:.6f}KiB@50", **options) == ("none", "none")
    with pytest.raises(InputError, match="a budget is for all of the state"):
        kept("auto:8KiB@50", cross_keep="auto:1", **options)
    with pytest.raises(InputError, match="a budget is for all of the state"):
        kept("none", cross_keep="auto:8KiB@50", **options)


def test_a_model_without_softmax_has_nothing_to_measure():
    with pytest.raises(InputError, match="no softmax attention left"):
        measure_damage(swap(make_model(micro()), features=4), [Batch(random_tokens(2, 8))])


def test_a_window_that_leaves_nothing_out_is_refused():
    model, text = make_model(micro(adaptive_cutoffs=())), np.asarray(random_tokens(1, 60)[0])
    with pytest.raises(InputError, match="window of 20 tokens leaves nothing of a sequence of 20 out"):
        damage_on_text(model, text, length=20, window=20)
