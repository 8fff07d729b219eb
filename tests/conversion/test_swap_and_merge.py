"""Swap and merge: what they change, what they keep, and their errors."""

import dataclasses

import jax
import numpy as np
import pytest

from conftest import WINDOW, error, make_model, micro, micro_mt, random_tokens, slow_but
from t2r import environment
from t2r.conversion.merge import merge
from t2r.conversion.swap import layers_to_keep, swap
from t2r.errors import InputError
from t2r.model.config import AttentionSpec
from t2r.model.parameters import arrays_of

MAPS = ["t2r", "windowed", "elu", "rfa", "performer", "hedgehog"]


@pytest.mark.parametrize("name", MAPS)
def test_swap_changes_only_the_attention(name):
    """All arrays but φ's and the mixture's are the original's; with the old attention put back, outputs are bitwise
    the old ones."""
    model, tokens = make_model(micro()), random_tokens(2, 10)
    before = arrays_of(model)
    if name == "windowed":
        swapped = swap(model, features=8, **WINDOW)
    else:
        swapped = swap(model, feature_map=name, features=None if name == "elu" else 8)
    after = arrays_of(swapped)
    new = after.keys() - before.keys()
    added = {key.split(".attention.")[1].split(".")[0] for key in new}
    assert before.keys() <= after.keys() and added <= ({"feature_map"} | ({"mixture"} if name == "windowed" else set()))
    assert name != "windowed" or added == {"feature_map", "mixture"}
    assert all(after[key] is before[key] for key in before)
    assert dataclasses.replace(swapped.config, attention=model.config.attention) == model.config
    run = lambda model: jax.jit(lambda: model(tokens)[0])()  # noqa: E731
    expected, converted = run(model), run(swapped)
    assert error(converted, expected) > 0.01
    assert {spec.kind for spec in model.config.attention} == {"softmax"}, "swap must not modify the original"
    for block, original in zip(swapped.blocks, model.blocks):
        block.attention = original.attention
    np.testing.assert_array_equal(run(swapped), expected)


def test_keep_names_the_layers_that_stay_softmax():
    assert layers_to_keep("every_4th", 32) == {3, 7, 11, 15, 19, 23, 27, 31}
    assert layers_to_keep("every_4th", 6) == {5, 1} and layers_to_keep("every_3rd", 6) == {5, 2}
    assert layers_to_keep("0,2", 3) == {0, 2}
    swapped = swap(make_model(micro(layers=5)), features=4, keep="every_4th")
    assert [spec.kind for spec in swapped.config.attention] == ["softmax", "linear", "linear", "linear", "softmax"]
    again = swap(swapped, feature_map="elu")  # swaps the remaining softmax layers
    assert [spec.feature_map for spec in again.config.attention] == ["elu", "t2r", "t2r", "t2r", "elu"]


def test_a_model_without_softmax_attention_is_not_swapped_again():
    swapped = swap(make_model(micro()), features=4)
    with pytest.raises(InputError, match="all of this model's attention is linear already"):
        swap(swapped, features=4)
    translator = swap(make_model(micro_mt()), features=4, attention="cross")
    with pytest.raises(InputError, match="all of this model's cross attention is linear already"):
        swap(translator, features=4, attention="cross")
    with pytest.raises(InputError, match="keep='none' and cross_keep='0,1' keeps all softmax cross attention"):
        swap(make_model(micro_mt()), features=4, attention="cross", cross_keep="0,1")


def test_a_fault_of_one_value_is_named_once():
    with pytest.raises(InputError) as caught:
        swap(make_model(micro_mt()), features=-1, sinks=-1)
    assert [str(caught.value).count(words) for words in ("features=-1", "sinks=-1", "window")] == [1, 1, 0]


def test_all_faults_are_named_by_their_own_names():
    with pytest.raises(InputError) as caught:
        swap(make_model(micro_mt()), features=-1, keep="0,9", cross_keep="0,1,2")
    for words in ("features=-1", "\n  - keep='0,9'", "\n  - cross_keep='0,1,2': the model has layers 0 to 1"):
        assert words in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(feature_map="tr2"), "'tr2'.*t2r, elu, rfa, rfa_fixed, performer"),
        (dict(feature_map="hedghog"), "did you mean 'hedgehog'"),
        (dict(features=0), "features=0"),
        (dict(features=-3), "features=-3"),
        (dict(keep="2,9"), "layers 0 to 1, not 2, 9"),
        (dict(keep="some"), "every_4th"),
        (dict(keep="0,1"), "nothing to swap"),
        (dict(keep="auto:1"), "t2r convert and t2r train also measure"),
        (dict(window=-1), "window=-1 must be at least 0"),
        (dict(window=4, sinks=-1), "sinks=-1 must be at least 0"),
        (dict(window=-4, sinks=-1, features=-3), r"window=-4(.|\n)*sinks=-1(.|\n)*features=-3"),
        (
            dict(cross_features=8, cross_keep="1", attention="cross"),
            r"cross_features=8(.|\n)*cross_keep(.|\n)*attention=",
        ),
        (dict(sinks=2), "sinks=2 needs a window"),
        (dict(window=4, attention="cross"), "attention='cross'"),
    ],
)
def test_invalid_swaps_are_errors(plan, message):
    with pytest.raises(InputError, match=message):
        swap(make_model(micro()), **plan)


@pytest.mark.parametrize("plan", [dict(window=4), dict(window=-4), dict(sinks=1)], ids=str)
def test_a_window_without_causal_attention_is_refused(plan):
    with pytest.raises(InputError, match=r"(window=-?4|sinks=1).*attention='cross'"):
        swap(make_model(micro_mt()), features=4, attention="cross", **plan)


@pytest.mark.parametrize("fields", slow_but([{}, dict(kv_heads=1), dict(bias=False)], dict(kv_heads=1)), ids=str)
def test_merging_does_not_change_the_model(fields):
    """Outputs of whole sequences and token by token, and gradients of inputs. No query or key projection remains."""
    model, tokens = swap(make_model(micro(layers=1, **fields)), features=8), random_tokens(2, 12)
    merged = merge(model)
    assert merged.blocks[0].attention.query.kernel.shape == (32, 2, 8)
    assert not any("feature_map" in name for name in arrays_of(merged))
    assert error(merged(tokens)[0], model(tokens)[0]) < 1e-5

    def by_token(model):
        state = model.init_state(2, 4)
        for i in range(4):
            hidden, state = model(tokens[:, i : i + 1], state=state)
        return hidden, state

    assert error(jax.jit(lambda: by_token(merged))(), jax.jit(lambda: by_token(model))()) < 1e-5
    attentions = [m.blocks[0].attention for m in (model, merged)]
    x = jax.random.normal(jax.random.key(0), (1, 7, 32))
    expected, actual = (jax.grad(lambda x, a=a: (a(x)[0] ** 2).sum())(x) for a in attentions)
    assert error(actual, expected) < 1e-4


@pytest.mark.slow
def test_merging_a_hybrid_leaves_its_softmax_layers():
    model, tokens = swap(make_model(micro(layers=4)), features=8, keep="every_4th"), random_tokens(1, 9)
    merged = merge(model)
    assert [spec.kind for spec in merged.config.attention] == ["merged", "merged", "merged", "softmax"]
    assert error(merged(tokens)[0], model(tokens)[0]) < 1e-5


@pytest.mark.slow
def test_a_layer_without_rotary_positions_can_be_merged():
    """Though others have them: SmolLM3."""
    specs = (AttentionSpec(), AttentionSpec(rotary=False))
    model = swap(make_model(micro(positions="rotary", attention=specs)), features=8, keep="0")
    merged, tokens = merge(model), random_tokens(1, 9)
    assert [spec.kind for spec in merged.config.attention] == ["softmax", "merged"]
    assert error(merged(tokens)[0], model(tokens)[0]) < 1e-5


def test_attention_that_cannot_be_merged_is_an_error():
    with pytest.raises(InputError, match="nothing to merge"):
        merge(make_model(micro()))
    with pytest.raises(InputError, match=r"layer 0.*'elu'(.|\n)*layer 1"):
        merge(swap(make_model(micro()), feature_map="elu"))
    with pytest.raises(InputError, match="rotary"):
        merge(swap(make_model(micro(positions="rotary")), features=8))
    with pytest.raises(InputError, match="queries and keys are normalised between the projection and φ"):
        merge(swap(make_model(micro(query_norm=True)), features=8))
    with pytest.raises(InputError, match="nothing to merge"):
        merge(merge(swap(make_model(micro()), features=8)))
    with pytest.raises(InputError, match=r"layer 0: attention with a window needs its queries and keys(.|\n)*layer 1"):
        merge(swap(make_model(micro()), features=8, **WINDOW))
    hybrid = swap(swap(make_model(micro()), features=8, keep="1"), features=8, **WINDOW)
    with pytest.raises(InputError, match=r"layer 1: attention with a window") as raised:
        merge(hybrid)
    assert "layer 0" not in str(raised.value)


def test_feature_maps_that_do_not_fit_are_refused_before_anything_is_allocated(tmp_path, call, monkeypatch):
    arguments = ["convert", "--model=builtin:tiny_lm", f"--output={tmp_path}/rnn", "--keep=0"]
    status, printed = call(*arguments, "--features=1000000000")
    assert status == 2 and "features=1000000000: a feature map needs 1 to 65,536 features" in printed
    # 3 layers × 3 heads × 64 dimensions and a bias × 4 bytes
    needed = 3 * 3 * (64 + 1) * 65_536 * 4
    monkeypatch.setattr(environment, "available_memory", lambda: needed - 1)
    status, printed = call(*arguments, "--features=65536")
    assert status == 2 and len(printed.splitlines()) == 1
    assert f"3 feature maps of 65536 features needs {needed / 2**30:,.1f} GiB" in printed and "choose fewer" in printed
    assert not (tmp_path / "rnn").exists()
