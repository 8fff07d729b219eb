"""The language model: the same results for whole sequences, token by token, and with padding."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from conftest import WINDOW, error, linear_spec, make_model, micro, random_tokens, slow_but
from t2r.dropout import dropout
from t2r.errors import InputError
from t2r.layout import AXES
from t2r.model.config import AttentionSpec
from t2r.model.embedding import AdaptiveEmbedding, sinusoids
from t2r.model.transformer import Block, LanguageModel, check_length, run_layers
from t2r.training.sharding import make_mesh

KINDS = slow_but(["softmax", "t2r", "windowed", "elu", "rfa", "performer"], "softmax", "t2r")
T2R, WINDOWED = AttentionSpec("linear", "t2r", 4), AttentionSpec("windowed", "t2r", 8, **WINDOW)

FAMILIES = {
    "paper": {},
    "post-norm": dict(norm_placement="after"),
    "llama": dict(
        norm="rms", positions="rotary", activation="swish", gated=True, bias=False, kv_heads=1, tied_output=False,
        adaptive_cutoffs=(), scale_embedding=False, final_norm=True,
    ),
    "gpt-2": dict(positions="learned", max_positions=40, activation="gelu", final_norm=True, adaptive_cutoffs=()),
    "olmo 2": dict(
        norm="rms", norm_placement="output", query_norm=True, query_norm_heads=True, positions="rotary", kv_heads=1,
        out_bias=False, attention=(AttentionSpec(), AttentionSpec(rotary=False)), embedding_multiplier=0.5,
    ),
    "no positions": dict(positions="none"),
    "hybrid": dict(attention=(AttentionSpec("linear", "t2r", 8), AttentionSpec())),
    "merged": dict(attention=(AttentionSpec("merged", "t2r", 8),)),
    "windowed": dict(attention=(WINDOWED,), positions="rotary", kv_heads=1),
    "windowed hybrid": dict(attention=(WINDOWED, AttentionSpec())),
}  # fmt: skip


def decode(model, tokens, sizes):
    """Hidden states of the tokens in pieces of these sizes, with the state carried from piece to piece."""
    state, pieces, first = model.init_state(tokens.shape[0], tokens.shape[1]), [], 0
    for size in sizes:
        hidden, state = model(tokens[:, first : first + size], state=state)
        pieces.append(hidden)
        first += size
    return jnp.concatenate(pieces, 1), state


@pytest.mark.parametrize("family", slow_but(FAMILIES, *(FAMILIES.keys() - {"olmo 2", "windowed"})))
def test_every_family_decodes_as_it_trains(family):
    model = make_model(micro(**FAMILIES[family]))
    tokens = random_tokens(2, 12)
    run = jax.jit(lambda: (model(tokens)[0], decode(model, tokens, [5, 1, 1, 4, 1])[0]))
    whole, pieces = run()
    assert error(pieces, whole) < 1e-5


@functools.cache
def compiled(kind):
    """The compiled functions `forward(tokens)` and `padded(tokens, mask, continuation)` of one model."""
    model = make_model(micro(attention=linear_spec(kind)))

    def padded(tokens, mask, continuation):
        state = model.init_state(tokens.shape[0], tokens.shape[1] + continuation.shape[1])
        hidden, state = model(tokens, mask=mask, state=state)
        return hidden, model(continuation, state=state)[0]

    return jax.jit(lambda tokens: model(tokens)[0]), jax.jit(padded)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.sampled_from([1, 4, 9]), min_size=3, max_size=3), seed=st.integers(0, 99), data=st.data())
def test_padding_changes_neither_hidden_states_nor_what_follows(kind, lengths, seed, data):
    """A batch padded at random positions, and two tokens decoded after it, against each sequence without padding."""
    forward, padded = compiled(kind)
    length = 9
    tokens, continuation = random_tokens(3, length, seed), random_tokens(3, 2, seed + 100)
    mask = np.zeros((3, length), bool)
    for i, real in enumerate(lengths):
        mask[i, data.draw(st.permutations(range(length)))[:real]] = True
    hidden, after = padded(tokens, jnp.asarray(mask), continuation)
    for i, real in enumerate(lengths):
        unpadded = forward(jnp.concatenate([tokens[i][mask[i]], continuation[i]])[None])[0]
        assert error(hidden[i][mask[i]], unpadded[:real]) < 1e-5
        assert error(after[i], unpadded[real:]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_close_to_float32(kind):
    config = micro(attention=linear_spec(kind))
    tokens = random_tokens(2, 20)
    models = make_model(config), make_model(config.replace(dtype="bfloat16"))
    exact, rounded = jax.jit(lambda: [model.losses(tokens[:, :-1], tokens[:, 1:]) for model in models])()
    assert rounded.dtype == jnp.float32
    assert error(rounded, exact) < 3e-2


def test_the_adaptive_softmax_sums_to_one_and_its_loss_is_its_log_probability():
    model = make_model(micro())
    x = jax.random.normal(jax.random.key(0), (50, 32))
    targets = jnp.arange(50) * 5 % 260  # all three bands
    log_probs = model.log_probs(x)
    np.testing.assert_allclose(jnp.exp(log_probs).sum(-1), 1.0, rtol=1e-5)
    loss = model.embedding.loss(x[None], targets[None])[0]
    np.testing.assert_allclose(loss, -log_probs[jnp.arange(50), targets], rtol=1e-5)


def test_the_adaptive_embedding_against_its_formulas():
    """Each band has its own table and projection; the output shares them; band 0 is scored unprojected."""
    embedding = AdaptiveEmbedding(micro(), rngs=nnx.Rngs(0))
    tables, projections = [t[...] for t in embedding.tables], [p[...] for p in embedding.projections]
    assert [t.shape for t in tables] == [(40, 32), (80, 8), (140, 2)]
    embedded = embedding.embed(jnp.array([[7, 41, 259]]))[0]
    for position, (band, index) in enumerate([(0, 7), (1, 1), (2, 139)]):
        np.testing.assert_allclose(embedded[position], tables[band][index] @ projections[band], rtol=1e-5, atol=1e-6)
    x = jax.random.normal(jax.random.key(1), (32,))
    head = jax.nn.log_softmax(jnp.concatenate([tables[0] @ x, embedding.classes[...].T @ x]))
    tail = jax.nn.log_softmax(tables[2] @ (projections[2] @ x))
    log_probs = embedding.log_probs(x)
    assert float(log_probs[7]) == pytest.approx(float(head[7]), rel=1e-5)
    assert float(log_probs[259]) == pytest.approx(float(head[41] + tail[139]), rel=1e-5)


@pytest.mark.parametrize(
    "mesh", [None, (4, 2, 1), (2, 1, 4)], ids=["one device", "batch sharded", "vocabulary sharded"]
)
@pytest.mark.parametrize("cutoffs", [(), (40, 120)], ids=["plain", "adaptive"])
def test_the_chunked_loss_and_its_gradient_are_those_of_the_log_probabilities(cutoffs, mesh, monkeypatch):
    """With a padded last chunk, targets in all bands, and devices whose targets are in different bands."""
    monkeypatch.setattr("t2r.model.cross_entropy.MAX_CHUNK_LOGITS", 1000)
    model = make_model(micro(adaptive_cutoffs=cutoffs))
    graph, state = nnx.split(model)
    x, targets = jax.random.normal(jax.random.key(0), (8, 13, 32)), random_tokens(8, 13).at[:2].set(5)
    weights = jax.random.uniform(jax.random.key(1), targets.shape)

    def by_definition(state, x):
        log_probs = nnx.merge(graph, state).log_probs(x)
        return -(weights * jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]).sum()

    def in_chunks(state, x):
        return (weights * nnx.merge(graph, state).embedding.loss(x, targets)).sum()

    expected = jax.jit(jax.value_and_grad(by_definition, (0, 1)))(state, x)
    sizes = dict(zip(AXES, mesh)) if mesh else {"data": 1}
    with jax.set_mesh(make_mesh(ConfigDict(sizes))) if mesh else contextlib.nullcontext():
        actual = jax.jit(jax.value_and_grad(in_chunks, (0, 1)))(state, x)
    assert error(actual[0], expected[0]) < 1e-5
    assert error(actual[1][0].embedding, expected[1][0].embedding) < 1e-5
    assert error(actual[1][1], expected[1][1]) < 1e-5


def test_dropout_is_uniform_and_independent_between_keys_and_folds():
    x = jnp.ones((64, 128, 96))
    keys = jax.random.split(jax.random.key(0), 3)
    masks = [np.asarray(dropout(x, 0.1, key, fold)) == 0 for key in keys for fold in (0, 1)]
    for dropped in masks:
        for axes in [(0, 1), (0, 2), (1, 2)]:  # at each index of every axis, within five standard deviations
            rate = dropped.mean(axes)
            assert np.abs(rate - 0.1).max() < 5 * (0.09 / (dropped.size / rate.size)) ** 0.5
        assert abs((dropped[:, 1:] & dropped[:, :-1]).mean() - 0.01) < 1e-3  # neighbours are independent
    for one, other in itertools.pairwise(masks):
        assert abs((one & other).mean() - 0.01) < 1e-3
    np.testing.assert_allclose(dropout(x, 0.1, keys[0]).max(), 1 / 0.9, rtol=1e-6)


def test_sinusoids_are_sines_and_cosines_of_the_position():
    actual = np.asarray(sinusoids(jnp.array([[0, 3]]), 8))[0]
    frequency = 10_000.0 ** (-np.arange(4) / 3)
    np.testing.assert_allclose(actual[0], [0, 0, 0, 0, 1, 1, 1, 1], atol=1e-6)
    np.testing.assert_allclose(actual[1], np.concatenate([np.sin(3 * frequency), np.cos(3 * frequency)]), rtol=1e-4)


def test_dropout_is_determined_by_the_key_and_off_without_one():
    model = make_model(micro(dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, adaptive_dropout=0.2))
    tokens = random_tokens(1, 9)
    losses = jax.jit(lambda key: model.losses(tokens[:, :-1], tokens[:, 1:], key=key))
    np.testing.assert_array_equal(losses(None), losses(None))
    np.testing.assert_array_equal(losses(jax.random.key(1)), losses(jax.random.key(1)))
    assert not np.allclose(losses(jax.random.key(1)), losses(jax.random.key(2)))
    assert not np.allclose(losses(jax.random.key(1)), losses(None))


def test_layer_dropout_skips_whole_layers():
    """At about its rate, and never in evaluation."""
    config = micro(layers=1, layer_dropout=0.4)
    block, x = Block(config, AttentionSpec(), rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (1, 3, 32))
    run = jax.jit(lambda key: jnp.allclose(run_layers([block], config, x, key=key), x))
    skipped = np.mean([bool(run(jax.random.key(i))) for i in range(300)])
    assert 0.3 < skipped < 0.5
    assert not np.allclose(run_layers([block], config, x), x)


@pytest.mark.parametrize(
    ("keep", "linear"),
    [("none", T2R), ("last", T2R), ("every_2nd", T2R), ("every_2nd", WINDOWED)],
    ids=["none", "last", "every_2nd", "windowed"],
)
@pytest.mark.slow
def test_scan_layers_and_remat_change_neither_loss_nor_gradient(keep, linear):
    """With dropout; for equal layers, a repeating pattern of layers, and layers with no pattern."""
    full = AttentionSpec()
    specs = {"none": [linear] * 4, "every_2nd": [linear, full] * 2, "last": [linear, linear, linear, full]}[keep]
    tokens = random_tokens(2, 9)
    plain = micro(layers=4, attention=tuple(specs), dropout=0.2, adaptive_cutoffs=())
    results = []
    for fields in ({}, dict(scan_layers=True, remat=True)):
        graph, arrays = nnx.split(make_model(plain.replace(**fields)))

        def loss(arrays, graph=graph):
            return nnx.merge(graph, arrays).losses(tokens[:, :-1], tokens[:, 1:], key=jax.random.key(3)).mean()

        program = jax.jit(jax.value_and_grad(loss)).lower(arrays)
        results.append((program.compile()(arrays), program.as_text().count("stablehlo.while")))
    assert error(results[1][0], results[0][0]) < 1e-5
    assert (results[1][1] > results[0][1]) == (keep != "last")


def test_sequences_longer_than_learned_positions_are_an_error():
    config = micro(positions="learned", max_positions=16)
    check_length(config, 16)
    with pytest.raises(InputError, match=r"17 tokens.*max_positions=16"):
        check_length(config, 17)


@pytest.mark.slow
def test_gradients_reach_every_parameter():
    """In every family, all parameters have a non-zero gradient."""
    tokens = random_tokens(2, 24)  # long enough to touch all bands

    def loss(state, graph):
        return nnx.merge(graph, state).losses(tokens[:, :-1], tokens[:, 1:]).mean()

    for family in FAMILIES.values():
        graph, state = nnx.split(make_model(micro(**family)))
        for path, gradient in nnx.to_flat_state(jax.jit(jax.grad(loss), static_argnums=1)(state, graph)):
            assert np.abs(np.asarray(gradient.get_value())).max() > 0, path


def test_the_model_is_a_flax_module():
    assert isinstance(LanguageModel(micro(), rngs=nnx.Rngs(0)), nnx.Module)
