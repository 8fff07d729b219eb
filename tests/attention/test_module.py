"""The attention modules: all kinds behind one interface."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from conftest import WINDOW, error
from t2r.attention import linear, softmax
from t2r.attention.module import AttentionShape, LinearAttention, SoftmaxAttention, WindowedAttention
from t2r.attention.rotary import Rotary, rotate

SHAPE = AttentionShape(width=16, heads=4, kv_heads=2, head_dim=4, bias=True)
KINDS = ["softmax", "t2r", "elu", "rfa", "performer", "hedgehog"]
CAUSAL_KINDS = [*KINDS, "windowed"]  # attention with a window is causal only


def make(kind, shape=SHAPE):
    if kind == "softmax":
        return SoftmaxAttention(shape, rngs=nnx.Rngs(0))
    if kind == "windowed":
        attention = WindowedAttention(shape, "t2r", 6, **WINDOW, rngs=nnx.Rngs(0))
        mixture = attention.mixture  # zero at first: distant keys would have the same weight for all queries
        for i, variable in enumerate((mixture.weight, mixture.bias)):
            variable[...] = jax.random.normal(jax.random.key(i), (4, *variable.shape[2:])).reshape(variable.shape)
        return attention
    return LinearAttention(shape, kind, None if kind == "elu" else 6, rngs=nnx.Rngs(0))


def sequence(length, seed=0, batch=2):
    return jax.random.normal(jax.random.key(seed), (batch, length, 16))


@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_causal_attention_does_not_depend_on_later_tokens(kind):
    attention, x = make(kind), sequence(9)
    run = jax.jit(lambda x: attention(x)[0])
    out, changed = run(x), run(x.at[:, 6:].set(7.0))
    np.testing.assert_allclose(out[:, :6], changed[:, :6], rtol=1e-5, atol=1e-6)
    assert not np.allclose(out[:, 6:], changed[:, 6:])


@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention_is_attention_over_the_unpadded_source(kind):
    """`build_state` and `query_state` against attention over all pairs, and against a source without padding."""
    attention, source, x = make(kind), sequence(7, 1), sequence(5, 2)
    mask = jnp.ones((2, 7), bool).at[1, 4:].set(False)
    out = attention.query_state(x, attention.build_state(source, mask=mask))
    if kind == "softmax":
        k, v = softmax.heads_first(attention.keys(source, None)), softmax.heads_first(attention.value(source))
        heads = softmax.attend(attention.queries(x, None), k, v, mask[:, None, :], SHAPE.query_scale)
    else:
        q, k = attention.query_features(x, None, None), attention.key_features(source, None, None)
        heads, _ = linear.quadratic(q, k, attention.value(source), attention.normalizer, mask=mask, causal=False)
    assert error(out, attention._finish(heads)) < 1e-5
    unpadded = attention.query_state(x[1:], attention.build_state(source[1:, :4]))
    assert error(out[1:], unpadded) < 1e-5


@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_grouped_heads_are_full_heads_with_repeated_keys(kind):
    """Four query heads on two key/value heads, against four heads with copies of keys, values and φ."""
    grouped = make(kind)
    full = make(kind, dataclasses.replace(SHAPE, kv_heads=4))
    for name in ("query", "out"):
        setattr(full, name, getattr(grouped, name))
    for name in ("key", "value"):
        getattr(full, name).kernel = nnx.Param(jnp.repeat(getattr(grouped, name).kernel[...], 2, 1))
        getattr(full, name).bias = nnx.Param(jnp.repeat(getattr(grouped, name).bias[...], 2, 0))
    if kind == "windowed":
        full.mixture.weight[...] = grouped.mixture.weight[...].reshape(4, 1, 4)
        full.mixture.bias[...] = grouped.mixture.bias[...].reshape(4, 1)
    if kind != "softmax" and kind != "elu":
        names = {"rfa": ["sigma"], "performer": ["directions"], "hedgehog": ["weight"]}
        for name in names.get(kind, ["weight", "bias"]):
            variable = getattr(grouped.feature_map, name)
            setattr(full.feature_map, name, type(variable)(jnp.repeat(variable[...], 2, 0)))
    if kind == "rfa":
        full.feature_map.pool = grouped.feature_map.pool
    x = sequence(10)
    assert error(*jax.jit(lambda: (full(x)[0], grouped(x)[0]))()) < 1e-5


@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_rotary_attention_decodes_as_it_trains_and_softmax_depends_on_distances_only(kind):
    """Token by token against the whole sequence; softmax also with all positions shifted."""
    attention = make(kind, dataclasses.replace(SHAPE, rotary=Rotary(100.0)))
    x = sequence(8)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    run = jax.jit(lambda x, positions, state=None: attention(x, positions=positions, state=state))
    out, _ = run(x, positions)
    if kind == "softmax":
        assert error(run(x, positions + 13)[0], out) < 1e-4
    state, pieces = attention.init_state(2, 8), []
    for i in range(8):
        piece, state = run(x[:, i : i + 1], positions[:, i : i + 1], state)
        pieces.append(piece)
    assert error(jnp.concatenate(pieces, 1), out) < 1e-5


def test_rotation_keeps_norms_and_has_the_right_angle():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 6))
    positions = jnp.arange(5)[None]
    rotated = rotate(x, positions, Rotary(50.0))
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(rotated[:, 0], x[:, 0], rtol=1e-6)
    expected = x[0, 2, 0, 0] * np.cos(2.0) - x[0, 2, 0, 3] * np.sin(2.0)  # pair 0 has frequency 1
    assert float(rotated[0, 2, 0, 0]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_bfloat16_activations_with_a_float32_state(kind):
    attention = make(kind, dataclasses.replace(SHAPE, dtype="bfloat16"))
    reference = make(kind)
    x = sequence(12)
    out, state = jax.jit(lambda x: attention(x, state=attention.init_state(2, 12)))(x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    if kind != "softmax":
        assert state.S.dtype == state.z.dtype == jnp.float32
    if kind == "windowed":
        assert state.k.dtype == state.v.dtype == jnp.bfloat16, "keys and values in the window are those of a cache"
    assert error(out, jax.jit(lambda: reference(x)[0])()) < 0.03  # weights and inputs are rounded too


@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_weights_times_values_are_the_output(kind):
    """For each query head: the first half of them reads the first key/value head."""
    attention, x = make(kind), sequence(9)
    weights = attention.weights(x)
    assert weights.shape == (2, 4, 9, 9) and not np.triu(weights, 1).any()
    heads = jnp.einsum("bhnm,bmhd->bnhd", weights, jnp.repeat(attention.value(x), 2, axis=2))
    assert error(attention.out(heads), attention(x)[0]) < 1e-5
