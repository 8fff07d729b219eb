"""Model configs: the parameter counts of presets, JSON, and the errors of invalid ones."""

import json

import pytest

from conftest import micro
from t2r.errors import InputError
from t2r.model.config import AttentionSpec, ModelConfig, from_dict, preset
from t2r.model.parameters import abstract_model, arrays_of, parameter_count


@pytest.mark.slow
def test_presets_have_the_papers_sizes():
    """Parameters counted by hand."""
    embedding = 20_000 * 1024 + 40_000 * 256 + 207_735 * 64
    projections = (1024 + 256 + 64) * 1024 + 2 * 1024  # and two classes of the adaptive softmax
    layer = 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    for name, layers, total in [("paper_lm", 32, 448_472_512), ("baevski_lm", 16, 246_932_928)]:
        config = preset(name)
        assert (config.layers, config.heads, config.head_dim, config.width) == (layers, 8, 128, 1024)
        assert parameter_count(arrays_of(abstract_model(config))) == embedding + projections + layers * layer == total


def test_phi_adds_as_many_parameters_as_the_paper_says():
    """rk(d + 1) parameters for each layer, less than 0.2% of the model (§2.2)."""
    config = preset("paper_lm", layers=1)
    converted = config.replace(attention=(AttentionSpec("linear", "t2r", 32),))
    added = parameter_count(arrays_of(abstract_model(converted))) - parameter_count(arrays_of(abstract_model(config)))
    assert added == 8 * 32 * (128 + 1)
    assert (
        32 * added / 448_472_512 < 0.0025
    )  # of the paper's model, counted above; the paper rounds to "less than 0.2%"


def test_a_config_survives_json():
    config = micro(attention=(AttentionSpec("linear", "t2r", 8), AttentionSpec()), kv_heads=1, rope_factors=(1.5, 2.0))
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        (dict(positions="rotory"), ["positions='rotory'", "rotary"]),
        (dict(kv_heads=3), ["heads=2", "kv_heads=3"]),
        (dict(width="32", bias=1), ["width='32' must be of type int", "bias=1 must be of type bool"]),
        (dict(layers=10**30, norm_eps=float("nan")), ["layers=1000", "norm_eps=nan"]),
        (dict(attention=[{"kind": 3, "knd": 1}]), ["kind=3 must be of type str", "unknown field 'knd'"]),
        (dict(adaptive_cutoffs=7, attention=["linear"]), ["adaptive_cutoffs=7", "attention=['linear']"]),
        (dict(dropout=1.0, layer_dropout=-0.1), ["dropout=1.0", "layer_dropout=-0.1"]),
        (dict(positions="learned"), ["max_positions"]),
        (dict(adaptive_cutoffs=(120, 40)), ["adaptive_cutoffs=(120, 40)"]),
        (dict(attention=(AttentionSpec("linear", "t2rr"),)), ["layer 0", "layer 1", "'t2rr'", "performer"]),
        (dict(attention=(AttentionSpec("linear", "t2r", 0),)), ["features=0"]),
        (dict(attention=(AttentionSpec("linear", "elu", 7),)), ["elu", "7"]),
        (dict(attention=(AttentionSpec("merged", "rfa", 8),)), ["only feature map 't2r'"]),
        (dict(attention=(AttentionSpec(),) * 3), ["has 3 specs", "layers=2"]),
        (dict(rope_scaling="factors", rope_factors=(1.0,) * 7), ["rope_factors for each of the 8", "not 7"]),
        (dict(norm_placement="both", encoder_layers=1, adaptive_cutoffs=()), ["cross attention has no second norm"]),
        (
            dict(attention=(AttentionSpec("merged", "t2r", 8),), positions="rotary"),
            ["rotary", "merged attention needs φ right after the projection"],
        ),
    ],
)
def test_errors_list_every_problem(fields, messages):
    with pytest.raises(InputError) as raised:
        micro(**fields)
    for message in messages:
        assert message in str(raised.value)


def test_unknown_and_missing_fields_are_listed_together():
    with pytest.raises(InputError) as raised:
        from_dict({"vocab_size": 10, "layer": 3, "wdith": 4})
    for name in ("layer", "wdith", "layers", "width", "heads", "feedforward"):
        assert f"'{name}'" in str(raised.value)
    with pytest.raises(InputError, match="paper_lm"):
        preset("papper_lm")


def test_a_config_is_frozen():
    with pytest.raises(AttributeError):
        ModelConfig(vocab_size=8, layers=1, width=8, heads=1, feedforward=8).layers = 2
