"""Linear attention: its three forms, on whole sequences and in pieces, compute the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from conftest import error
from t2r.attention import linear
from t2r.attention.feature_map import FEATURE_MAPS, Features
from t2r.attention.module import AttentionShape, make_feature_map

MAPS = sorted(FEATURE_MAPS.keys() - {"t2r_elu"})  # which is t2r but for its activation
FORMS = {"quadratic": linear.quadratic, "chunked": linear.chunked, "recurrent": linear.recurrent}


@st.composite
def cases(draw):
    """Sizes, a seed, whether there is a padding mask, whether there is a previous state, and a chunk size."""
    size = dict(
        batch=draw(st.integers(1, 2)),
        length=draw(st.integers(1, 37)),
        groups=draw(st.integers(1, 2)),
        per_group=draw(st.integers(1, 2)),
        dim=draw(st.sampled_from([3, 8])),
    )
    return (
        size,
        draw(st.integers(0, 2**16)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([4, 7, 16])),
    )


class Inputs:
    """Raw queries, keys and values, their φ, optionally a padding mask, and optionally five earlier keys and values."""

    def __init__(self, name, size, seed, masked, with_past, scale=1.5):
        batch, n, g, r, d = (size[name] for name in ("batch", "length", "groups", "per_group", "dim"))
        random = np.random.default_rng(seed)
        normal = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
        shape = AttentionShape(width=g * r * d, heads=g * r, kv_heads=g, head_dim=d, bias=True)
        self.phi = make_feature_map(shape, name, None if name == "elu" else 6, rngs=nnx.Rngs(0))
        self.q, self.k, self.v = (
            scale * normal(batch, n, g, r, d),
            scale * normal(batch, n, g, d),
            normal(batch, n, g, d),
        )
        self.mask = random.random((batch, n)) < 0.7 if masked else None
        self.past = (scale * normal(batch, 5, g, d), normal(batch, 5, g, d)) if with_past else None

    def state(self):
        if self.past is None:
            return None
        k, v = map(jnp.asarray, self.past)
        k = self.phi(k, is_query=False)
        return linear.update(linear.initial_state(k, v), k, v)

    def features(self, part=slice(None)):
        """φ(q), φ(k), v and the mask at the positions of a slice."""
        q, k, v = (jnp.asarray(x[:, part]) for x in (self.q, self.k, self.v))
        mask = None if self.mask is None else jnp.asarray(self.mask[:, part])
        return self.phi(q, is_query=True), self.phi(k, is_query=False), v, mask

    def run(self, form, q=None, k=None, v=None, **options):
        q, k, v = (jnp.asarray(own if x is None else x) for x, own in zip((q, k, v), (self.q, self.k, self.v)))
        features = self.phi(q, is_query=True), self.phi(k, is_query=False)
        mask = None if self.mask is None else jnp.asarray(self.mask)
        return form(*features, v, self.phi.normalizer, state=self.state(), mask=mask, **options)


def value_and_gradient(inputs: Inputs, form, **options):
    """(Output, final state), and the gradient of a random linear function of both with respect to q, k and v."""
    random = np.random.default_rng(0)

    def function(q, k, v):
        out, state = inputs.run(form, q, k, v, **options)
        total = sum(jnp.vdot(x, random.normal(size=x.shape).astype(np.float32)) for x in (out, state.S, state.z))
        return total, (out, state)

    (_, result), gradient = jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)(inputs.q, inputs.k, inputs.v)
    return result, gradient


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", MAPS)
@given(case=cases())
def test_all_forms_agree_in_value_and_gradient(name, causal, case):
    size, seed, masked, with_past, chunk = case
    inputs = Inputs(name, size, seed, masked, with_past)

    @jax.jit
    def all_forms():
        return [
            value_and_gradient(inputs, linear.quadratic, causal=causal),
            value_and_gradient(inputs, linear.chunked, causal=causal, chunk=chunk),
            value_and_gradient(inputs, linear.recurrent, causal=causal),
        ]

    (expected, expected_gradient), *others = all_forms()
    for actual, gradient in others:
        assert error(actual, expected) < 1e-5
        assert error(gradient, expected_gradient) < 1e-4


@pytest.mark.parametrize("name", MAPS)
@given(case=cases())
def test_the_quadratic_form_is_the_equation(name, case):
    """Against a loop over queries in float64: Σ_j φ(q)·φ(k_j) v_j / normalizer(Σ_j φ(q)·φ(k_j))."""
    size, seed, masked, _, _ = case
    size = {**size, "length": min(size["length"], 9)}
    inputs = Inputs(name, size, seed, masked, False)
    (out, _), (queries, keys, _, _) = jax.jit(lambda: (inputs.run(linear.quadratic), inputs.features()))()
    fq = np.asarray(queries.values, np.float64)
    log_scale = np.zeros(keys.values.shape[:3]) if keys.log_scale is None else np.asarray(keys.log_scale, np.float64)
    fk, v = np.asarray(keys.values, np.float64), np.asarray(inputs.v, np.float64)
    mask = np.ones(v.shape[:2], bool) if inputs.mask is None else inputs.mask
    out, clamp, value = np.asarray(out), *inputs.phi.normalizer
    for b, i, g, r in np.ndindex(fq.shape[:4]):
        past = [j for j in range(i + 1) if mask[b, j]]
        largest = max([log_scale[b, j, g] for j in past], default=0.0)
        weights = [fq[b, i, g, r] @ fk[b, j, g] * np.exp(log_scale[b, j, g] - largest) for j in past]
        numerator = sum((w * v[b, j, g] for w, j in zip(weights, past)), np.zeros(v.shape[-1]))
        denominator = max(sum(weights), value) if clamp else sum(weights) + value
        np.testing.assert_allclose(out[b, i, g, r], numerator / denominator, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", MAPS)
@given(case=cases(), data=st.data())
def test_two_pieces_with_the_state_between_them_are_the_whole(name, case, data):
    size, seed, masked, with_past, chunk = case
    inputs = Inputs(name, size, seed, masked, with_past)
    cut = data.draw(st.integers(1, size["length"]))

    def in_two_pieces(form, **options):
        state, pieces = inputs.state(), []
        for part in (slice(0, cut), slice(cut, None))[: 1 + (cut < size["length"])]:
            q, k, v, mask = inputs.features(part)
            out, state = form(q, k, v, inputs.phi.normalizer, state=state, mask=mask, **options)
            pieces.append(out)
        return jnp.concatenate(pieces, 1), state

    @jax.jit
    def all_forms():
        forms = [(linear.quadratic, {}), (linear.chunked, {"chunk": chunk}), (linear.recurrent, {})]
        return inputs.run(linear.quadratic), [in_two_pieces(form, **options) for form, options in forms]

    whole, pieced = all_forms()
    for result in pieced:
        assert error(result, whole) < 1e-5


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("name", MAPS)
def test_masked_keys_have_no_effect(name, form):
    """Output and state are those of the sequence without the masked keys, whose gradients are zero."""
    size = dict(batch=1, length=20, groups=2, per_group=2, dim=8)
    inputs, unpadded = Inputs(name, size, 3, True, False), Inputs(name, size, 3, True, False)
    real, masked = np.flatnonzero(inputs.mask[0]), np.flatnonzero(~inputs.mask[0])
    inputs.k[:, masked] = 50.0  # values of masked keys must not matter
    (out, state), (_, dk, dv) = jax.jit(lambda: value_and_gradient(inputs, FORMS[form]))()
    unpadded.q, unpadded.k, unpadded.v = unpadded.q[:, real], unpadded.k[:, real], unpadded.v[:, real]
    unpadded.mask = None
    expected = jax.jit(lambda: unpadded.run(linear.quadratic))()
    assert error((out[:, real], state), expected) < 1e-5
    assert not np.asarray(dk)[:, masked].any() and not np.asarray(dv)[:, masked].any()


@pytest.mark.parametrize("name", MAPS)
def test_bfloat16_is_within_one_percent(name):
    size = dict(batch=2, length=100, groups=2, per_group=1, dim=16)
    inputs = Inputs(name, size, 5, False, False)

    def cast(features, dtype):
        return Features(features.values.astype(dtype), features.log_scale)

    @jax.jit
    def all_forms():
        q, k, v, _ = inputs.features()
        q, k, v = cast(q, jnp.bfloat16), cast(k, jnp.bfloat16), v.astype(jnp.bfloat16)
        exact = cast(q, jnp.float32), cast(k, jnp.float32), v.astype(jnp.float32)
        normalizer = inputs.phi.normalizer
        return linear.quadratic(*exact, normalizer), {name: form(q, k, v, normalizer) for name, form in FORMS.items()}

    (expected, expected_state), results = all_forms()
    for out, state in results.values():
        assert out.dtype == jnp.bfloat16 and state.S.dtype == state.z.dtype == jnp.float32
        assert error(out, expected) < 1e-2
        assert error(state, expected_state) < 1e-2


def test_performer_does_not_overflow_and_stays_causal():
    """Keys of rising norm: exp would overflow without a maximum, and a global maximum would depend on later keys."""
    size = dict(batch=1, length=30, groups=1, per_group=1, dim=8)
    inputs = Inputs("performer", size, 0, False, False, scale=1.0)
    inputs.k = inputs.k * np.linspace(0.1, 30.0, 30, dtype=np.float32)[None, :, None, None]
    largest = inputs.features()[1].log_scale
    assert float(jnp.abs(largest).max()) > 100  # exp of this overflows float32
    expected, _ = inputs.run(linear.quadratic)
    for form in (linear.chunked, linear.recurrent):
        assert error(inputs.run(form)[0], expected) < 1e-5
    before, _ = inputs.run(linear.recurrent)
    inputs.k[:, 20:] = 0.0
    np.testing.assert_array_equal(inputs.run(linear.recurrent)[0][:, :20], before[:, :20])


def test_weights_are_those_of_the_quadratic_form():
    size = dict(batch=2, length=12, groups=2, per_group=2, dim=8)
    inputs = Inputs("t2r", size, 1, True, False)
    q, k, v, mask = inputs.features()
    weights = linear.weights(q, k, inputs.phi.normalizer, mask=mask)
    assert error(jnp.einsum("bgnrm,bmgd->bngrd", weights, v), inputs.run(linear.quadratic)[0]) < 1e-5


def test_dropout_acts_on_normalised_weights():
    """The mean output over many draws is the output without dropout."""
    size = dict(batch=1, length=10, groups=1, per_group=1, dim=4)
    inputs = Inputs("elu", size, 2, False, False)
    expected, _ = inputs.run(linear.quadratic)
    draw = jax.jit(lambda key: inputs.run(linear.quadratic, dropout=0.3, key=key)[0])
    draws = jnp.stack([draw(jax.random.key(i)) for i in range(800)])
    assert error(draws.mean(0), expected) < 0.1
    assert error(draws[0], expected) > 0.1


@pytest.mark.parametrize("name", ["t2r", "performer"])
def test_blocks_of_queries_are_the_quadratic_form(name):
    """With a state and padding; at a dropout rate so low that nothing is dropped, since only dropout uses blocks."""
    feature_map = FEATURE_MAPS[name](2, 8, 8, query_scale=0.35, rngs=nnx.Rngs(0))
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
    q = feature_map(normal(0, 2, 300, 2, 1, 8), is_query=True, key=None)
    k = feature_map(normal(1, 2, 300, 2, 8), is_query=False, key=None)
    v, mask = normal(2, 2, 300, 2, 8), jnp.arange(300)[None] != jnp.array([[0], [150]])
    _, state = linear.quadratic(q, k, v, feature_map.normalizer)
    expected = linear.quadratic(q, k, v, feature_map.normalizer, state=state, mask=mask)
    actual = linear.causal_attention(
        q, k, v, feature_map.normalizer, state=state, mask=mask, dropout=1e-9, key=jax.random.key(3)
    )
    assert error(actual, expected) < 1e-5
