"""The translation model: a decoder with cross attention of any kind, to sources with and without padding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from conftest import WINDOW, error, make_model, micro_mt, random_tokens, slow_but
from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.model.config import AttentionSpec, preset
from t2r.model.parameters import abstract_model, arrays_of, parameter_count

FAMILIES = {
    "paper": {},
    "pre-norm": dict(norm_placement="before", final_norm=True),
    "decoder-only tying": dict(shared_embedding=False, source_vocab_size=40),
    "separate": dict(shared_embedding=False, tied_output=False),
    "learned positions": dict(positions="learned", max_positions=30),
    "rotary": dict(positions="rotary", norm="rms", bias=False),
}
# "windowed": causal attention with a window, and linear or softmax cross attention.
KINDS = ["softmax", "t2r", "windowed", "windowed, softmax cross", "elu", "rfa", "performer"]


def converted(kind, model):
    if kind == "softmax":
        return model
    if kind == "windowed, softmax cross":
        return swap(model, features=4, attention="causal", **WINDOW)
    if kind == "windowed":
        return swap(model, features=4, cross_features=8, **WINDOW)
    sizes = {} if kind == "elu" else dict(features=4, cross_features=8)
    return swap(model, feature_map=kind, **sizes)


CASES = [*((family, "t2r") for family in FAMILIES), ("paper", "windowed"), ("rotary", "windowed, softmax cross")]


@pytest.mark.parametrize(("family", "kind"), slow_but(CASES, ("paper", "t2r"), ("pre-norm", "t2r")))
def test_every_family_decodes_as_it_trains_and_uses_every_parameter(family, kind):
    """Whole targets against the same targets in pieces, through the state; every parameter has a gradient."""
    model = converted(kind, make_model(micro_mt(layers=1, **FAMILIES[family])))
    graph, arrays = nnx.split(model)
    source, tokens = random_tokens(2, 11, 1, vocab=40), random_tokens(2, 8, 2, vocab=60)
    mask = jnp.ones(source.shape, bool).at[1, 7:].set(False)

    def whole(arrays):
        model = nnx.merge(graph, arrays)
        memory = model.source_states(source, mask)
        hidden, _ = model(tokens, source=memory)
        state, pieces, first = model.init_state(2, 8, memory), [], 0
        for size in (3, 1, 4):
            piece, state = model(tokens[:, first : first + size], state=state)
            pieces.append(piece)
            first += size
        loss = model.losses(tokens[:, :-1], tokens[:, 1:], source=memory).mean()
        return loss, (hidden, jnp.concatenate(pieces, 1))

    (_, (hidden, pieces)), gradient = jax.jit(jax.value_and_grad(whole, has_aux=True))(arrays)
    assert error(pieces, hidden) < 1e-5
    for path, leaf in nnx.to_flat_state(gradient):
        assert np.abs(np.asarray(leaf.get_value())).max() > 0, path


@pytest.mark.parametrize("kind", slow_but(KINDS, "softmax", "t2r", "windowed"))
def test_source_padding_has_no_effect_and_source_tokens_have_one(kind):
    model = converted(kind, make_model(micro_mt(layers=1)))
    tokens, sources = random_tokens(2, 6, 2, vocab=60), random_tokens(2, 9, 3, vocab=60)
    translate = jax.jit(lambda source, mask: model(tokens, source=model.source_states(source, mask))[0])
    unpadded = translate(sources, jnp.ones(sources.shape, bool))
    padded = jnp.concatenate([sources, random_tokens(2, 5, 4, vocab=60)], 1)
    assert error(translate(padded, jnp.arange(14) < jnp.array([[9], [9]])), unpadded) < 1e-5
    assert error(translate(padded, jnp.ones(padded.shape, bool)), unpadded) > 1e-3
    assert bool(jnp.isfinite(translate(sources, jnp.zeros(sources.shape, bool))).all()), (
        "a source of padding only gives no NaN"
    )


@pytest.mark.parametrize("kind", slow_but(["softmax", "t2r", "windowed"], "softmax", "t2r"))
def test_several_targets_of_one_source_share_its_state(kind):
    """As in beam search: three targets for each source, against three copies of each source."""
    model = converted(kind, make_model(micro_mt()))
    tokens, source = random_tokens(6, 5, 1, vocab=60), random_tokens(2, 7, 2, vocab=60)
    run = jax.jit(lambda source: model(tokens, source=model.source_states(source, jnp.ones(source.shape, bool)))[0])
    assert error(run(source), run(jnp.repeat(source, 3, 0))) < 1e-5


def test_source_keys_and_target_queries_use_the_same_random_features():
    """In training RFA draws new features at each step: one draw for the source's keys and the queries to them."""
    many = dict(features=4096, cross_features=4096)  # with which all draws of one kernel give about the same
    model = swap(make_model(micro_mt(layers=1)), feature_map="rfa", **many)
    tokens, source = random_tokens(1, 5, 1, vocab=60), random_tokens(1, 7, 2, vocab=60)
    mask = jnp.ones(source.shape, bool)

    @jax.jit
    def hidden(key):
        return model(tokens, source=model.source_states(source, mask, key), key=key)[0]

    @jax.jit
    def mismatched(key, source_key):
        return model(tokens, source=model.source_states(source, mask, source_key), key=key)[0]

    keys = [jax.random.key(i) for i in range(8)]
    expected = hidden(None)
    same_draw = np.mean([error(hidden(key), expected) for key in keys])
    two_draws = np.mean([error(mismatched(key, other), expected) for key, other in itertools.pairwise(keys)])
    assert 0 < 2 * same_draw < two_draws, (same_draw, two_draws)


def test_the_encoder_is_not_swapped_and_causal_and_cross_attention_have_their_feature_sizes():
    model = make_model(micro_mt(layers=3))
    swapped = swap(model, features=4, cross_features=8, keep="2")
    kinds = [
        (a.kind, a.features, c.kind, c.features)
        for a, c in zip(swapped.config.attention, swapped.config.cross_attention)
    ]
    assert kinds == [("linear", 4, "linear", 8)] * 2 + [("softmax", None, "softmax", None)]
    new = arrays_of(swapped).keys() - arrays_of(model).keys()
    assert len(new) == 8 and all(".feature_map." in name and name.startswith("blocks.") for name in new)
    assert arrays_of(swapped)["blocks.0.attention.feature_map.weight"].shape == (2, 4, 16)
    assert arrays_of(swapped)["blocks.0.cross.feature_map.weight"].shape == (2, 8, 16)
    only_cross = swap(model, features=8, attention="cross")
    assert {spec.kind for spec in only_cross.config.attention} == {"softmax"}
    assert {spec.kind for spec in only_cross.config.cross_attention} == {"linear"}
    both = swap(only_cross, feature_map="elu", attention="causal")
    assert both.config.attention[0].feature_map == "elu" and both.config.cross_attention[0].feature_map == "t2r"


def test_a_merged_translation_model_computes_what_the_unmerged_one_does():
    model = swap(make_model(micro_mt()), features=4, cross_features=8, keep="1")
    merged = merge(model)
    assert [spec.kind for spec in merged.config.cross_attention] == ["merged", "softmax"]
    tokens, source = random_tokens(2, 5, 1, vocab=60), random_tokens(2, 7, 2, vocab=60)
    run = lambda model: model(tokens, source=model.source_states(source, jnp.ones(source.shape, bool)))[0]  # noqa: E731
    assert error(jax.jit(lambda: run(merged))(), jax.jit(lambda: run(model))()) < 1e-5
    rotary = make_model(micro_mt(positions="rotary"))  # cross attention is not rotated
    assert merge(swap(rotary, features=4, attention="cross")).config.cross_attention[0].kind == "merged"
    with pytest.raises(InputError, match=r"layer 0, cross_attention.*'elu'"):
        merge(swap(make_model(micro_mt()), feature_map="elu"))


def test_the_papers_model_has_the_papers_size():
    """Parameters counted by hand, as in configs/wmt.py."""
    attention, norm = 4 * (1024**2 + 1024), 2 * 1024
    feedforward = 2 * 1024 * 4096 + 4096 + 1024
    encoder, decoder = attention + feedforward + 2 * norm, 2 * attention + feedforward + 3 * norm
    expected = 32_768 * 1024 + 6 * (encoder + decoder)
    config = preset("paper_mt")
    assert parameter_count(arrays_of(abstract_model(config))) == expected == 209_911_808
    assert (config.layers, config.encoder_layers, config.heads, config.head_dim) == (6, 6, 16, 64)
    separate = preset("paper_mt", shared_embedding=False)
    assert parameter_count(arrays_of(abstract_model(separate))) == expected + 32_768 * 1024


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(source_vocab_size=50), "shared_embedding needs one vocabulary, not source_vocab_size=50"),
        (dict(adaptive_cutoffs=(20,)), "adaptive_cutoffs are for language models"),
        (dict(encoder_layers=-1), "encoder_layers=-1"),
        (dict(encoder_layers=0, cross_attention=(AttentionSpec(),)), "cross_attention is for translation models"),
        (dict(cross_attention=(AttentionSpec("linear", "elu", 3),)), "layer 1, cross_attention: feature map 'elu'"),
    ],
)
def test_invalid_configs_are_errors(fields, message):
    with pytest.raises(InputError, match=message):
        micro_mt(**fields)


def test_invalid_swaps_are_errors():
    from conftest import micro

    with pytest.raises(InputError, match="a language model has no cross attention"):
        swap(make_model(micro()), cross_features=8)
    with pytest.raises(InputError, match="attention='cross'"):
        swap(make_model(micro()), attention="cross")
