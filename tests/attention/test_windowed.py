"""Windowed attention: its three forms, on whole sequences and in pieces, are the equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from conftest import error
from t2r.attention import windowed
from t2r.attention.feature_map import FEATURE_MAPS, Features
from t2r.attention.module import AttentionShape, make_feature_map
from t2r.attention.windowed import Queries, Window

MAPS = sorted(FEATURE_MAPS.keys() - {"t2r_elu"})  # which is t2r but for its activation
FORMS = {"quadratic": windowed.quadratic, "chunked": windowed.chunked, "recurrent": windowed.recurrent}


@st.composite
def cases(draw):
    """Sizes, a window, a seed, whether there is a padding mask, whether there is a previous state, and a chunk size."""
    size = dict(
        batch=draw(st.integers(1, 2)),
        length=draw(st.integers(1, 37)),
        groups=draw(st.integers(1, 2)),
        per_group=draw(st.integers(1, 2)),
        dim=draw(st.sampled_from([3, 8])),
    )
    window = dict(size=draw(st.sampled_from([1, 2, 5, 8])), sinks=draw(st.sampled_from([0, 1, 3])))
    masked, with_past = draw(st.booleans()), draw(st.booleans())
    return size, window, draw(st.integers(0, 2**16)), masked, with_past, draw(st.sampled_from([4, 7, 16]))


class Inputs:
    """Queries, keys, values and mixtures, optionally a padding mask, and optionally seven earlier keys and values."""

    def __init__(self, name, size, window, seed, masked=False, with_past=False, scale=1.5):
        batch, n, g, r, d = (size[name] for name in ("batch", "length", "groups", "per_group", "dim"))
        random = np.random.default_rng(seed)
        normal = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
        self.shape = AttentionShape(width=g * r * d, heads=g * r, kv_heads=g, head_dim=d, bias=True)
        self.phi = make_feature_map(self.shape, name, None if name == "elu" else 6, rngs=nnx.Rngs(0))
        self.window = Window(**window, key_features=lambda k: self.phi(k, is_query=False))
        self.q, self.mix = scale * normal(batch, n, g, r, d), normal(batch, n, g, r)
        self.k, self.v = scale * normal(batch, n, g, d), normal(batch, n, g, d)
        self.mask = random.random((batch, n)) < 0.7 if masked else None
        self.past = (scale * normal(batch, 7, g, d), normal(batch, 7, g, d)) if with_past else None

    def state(self):
        if self.past is None:
            return None
        k, v = map(jnp.asarray, self.past)
        return windowed.append(windowed.initial_state(k, v, self.window), k, v, self.window)

    def queries(self, q, mix):
        return Queries(q * self.shape.query_scale, self.phi(q, is_query=True), mix)

    def run(self, form, arrays=None, part=slice(None), state=None, **options):
        arrays = (self.q, self.mix, self.k, self.v) if arrays is None else arrays
        q, mix, k, v = (jnp.asarray(x)[:, part] for x in arrays)
        mask = None if self.mask is None else jnp.asarray(self.mask[:, part])
        state = self.state() if state is None else state
        return form(self.queries(q, mix), k, v, self.window, state=state, mask=mask, **options)


def value_and_gradient(inputs: Inputs, form, **options):
    """(Output, final state), and the gradient of a random linear function of both with respect to q, mix, k and v."""
    random = np.random.default_rng(0)

    def function(*arrays):
        out, state = inputs.run(form, arrays, **options)
        out = out if inputs.mask is None else jnp.where(inputs.mask[..., None, None, None], out, 0)
        parts = (out, state.S, state.z, state.k, state.v)
        total = sum(jnp.vdot(x, random.normal(size=x.shape).astype(np.float32)) for x in parts)
        return total, (out, state)

    arrays = inputs.q, inputs.mix, inputs.k, inputs.v
    (_, result), gradient = jax.value_and_grad(function, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)
    return result, gradient


@pytest.mark.parametrize("name", MAPS)
@given(case=cases())
def test_all_forms_agree_in_value_and_gradient(name, case):
    *case, chunk = case
    inputs = Inputs(name, *case)

    @jax.jit
    def all_forms():
        options = {"chunked": {"chunk": chunk}}
        return [value_and_gradient(inputs, form, **options.get(name, {})) for name, form in FORMS.items()]

    (expected, expected_gradient), *others = all_forms()
    for actual, gradient in others:
        assert error(actual, expected) < 1e-5
        assert error(gradient, expected_gradient) < 1e-4


def features(phi: Features) -> np.ndarray:
    """φ(x) itself, in float64."""
    scale = 0.0 if phi.log_scale is None else np.asarray(phi.log_scale, np.float64)[..., None]
    return np.asarray(phi.values, np.float64) * np.exp(scale)


def equation(inputs: Inputs) -> np.ndarray:
    """The equation of the module's docstring, as a loop over queries in float64."""
    fq, fk = (features(inputs.phi(jnp.asarray(x), is_query=is_q)) for x, is_q in ((inputs.q, True), (inputs.k, False)))
    q, k, v = (np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v))
    mask = np.ones(v.shape[:2], bool) if inputs.mask is None else inputs.mask
    out = np.zeros(q.shape)
    for b, i, g, r in np.ndindex(q.shape[:4]):
        seen = [j for j in range(i + 1) if mask[b, j]]
        if not mask[b, i]:
            continue
        exact = set(seen[-inputs.window.size :]) | set(seen[: inputs.window.sinks])
        scores = {j: q[b, i, g, r] @ k[b, j, g] * inputs.shape.query_scale for j in exact}
        similar = {j: fq[b, i, g, r] @ fk[b, j, g] for j in seen if j not in exact}
        weight = np.exp(inputs.mix[b, i, g, r])
        near = sum(np.exp(score) * v[b, j, g] for j, score in scores.items())
        far = sum((weight * s * v[b, j, g] for j, s in similar.items()), np.zeros(v.shape[-1]))
        total = sum(map(np.exp, scores.values())) + weight * max(sum(similar.values()), 0)
        out[b, i, g, r] = (near + far) / total
    return out


@pytest.mark.parametrize("name", MAPS)
@given(case=cases())
def test_the_quadratic_form_is_the_equation(name, case):
    size, window, seed, masked, _, _ = case
    inputs = Inputs(name, {**size, "length": min(size["length"], 15)}, window, seed, masked)
    out = np.asarray(jax.jit(lambda: inputs.run(windowed.quadratic)[0])())
    real = np.ones(out.shape[:2], bool) if inputs.mask is None else inputs.mask
    np.testing.assert_allclose(out[real], equation(inputs)[real], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", MAPS)
@given(case=cases(), data=st.data())
def test_two_pieces_with_the_state_between_them_are_the_whole(name, case, data):
    *case, chunk = case
    inputs, length = Inputs(name, *case), case[0]["length"]
    cut = data.draw(st.integers(1, length))
    real = np.ones((case[0]["batch"], length), bool) if inputs.mask is None else inputs.mask

    def in_two_pieces(form, **options):
        state, pieces = None, []
        for part in (slice(0, cut), slice(cut, None))[: 1 + (cut < length)]:
            out, state = inputs.run(form, part=part, state=state, **options)
            pieces.append(out)
        return jnp.where(real[..., None, None, None], jnp.concatenate(pieces, 1), 0), state

    @jax.jit
    def all_forms():
        out, state = inputs.run(windowed.quadratic)
        forms = [(windowed.quadratic, {}), (windowed.chunked, {"chunk": chunk}), (windowed.recurrent, {})]
        whole = jnp.where(real[..., None, None, None], out, 0), state
        return whole, [in_two_pieces(form, **options) for form, options in forms]

    whole, pieced = all_forms()
    for result in pieced:
        assert error(result, whole) < 1e-5


@pytest.mark.parametrize("form", sorted(FORMS))
def test_masked_keys_have_no_effect(form):
    """Output and state are those of the sequence without the masked keys, whose gradients are zero."""
    size, window = dict(batch=1, length=30, groups=2, per_group=2, dim=8), dict(size=4, sinks=2)
    inputs, unpadded = Inputs("t2r", size, window, 3, True), Inputs("t2r", size, window, 3, True)
    real, masked = np.flatnonzero(inputs.mask[0]), np.flatnonzero(~inputs.mask[0])
    inputs.k[:, masked] = 50.0  # values of masked keys must not matter
    (out, state), (_, _, dk, dv) = jax.jit(lambda: value_and_gradient(inputs, FORMS[form]))()
    for name in ("q", "mix", "k", "v"):
        setattr(unpadded, name, getattr(unpadded, name)[:, real])
    unpadded.mask = None
    expected = jax.jit(lambda: unpadded.run(windowed.quadratic))()
    assert error((out[:, real], state), expected) < 1e-5
    assert not np.asarray(dk)[:, masked].any() and not np.asarray(dv)[:, masked].any()


def test_a_window_over_the_whole_sequence_is_softmax():
    size = dict(batch=2, length=20, groups=2, per_group=2, dim=8)
    inputs = Inputs("t2r", size, dict(size=20, sinks=0), 1)
    q, k, v = inputs.q, inputs.k, inputs.v
    scores = np.einsum("bngrd,bmgd->bgnrm", q * inputs.shape.query_scale, k)
    scores = np.where(np.tri(20, dtype=bool)[:, None, :], scores, -np.inf)
    expected = np.einsum("bgnrm,bmgd->bngrd", np.asarray(jax.nn.softmax(scores)), v)
    for form in FORMS.values():
        assert error(jax.jit(lambda form=form: inputs.run(form)[0])(), expected) < 1e-5


def test_the_state_has_one_size_and_holds_each_key_once():
    """With φ = 1 everywhere, z counts the distant keys: all but the window and the sinks."""
    size = dict(batch=1, length=50, groups=1, per_group=1, dim=4)
    inputs = Inputs("t2r", size, dict(size=6, sinks=2), 0)
    ones = lambda k: Features(jnp.ones((*k.shape[:-1], 1)))  # noqa: E731
    window = inputs.window._replace(key_features=ones)
    k, v = jnp.asarray(inputs.k), jnp.asarray(inputs.v)
    after = lambda n: windowed.append(windowed.initial_state(k, v, window), k[:, :n], v[:, :n], window)  # noqa: E731
    for length in (1, 2, 8, 9, 50):
        state = jax.jit(after, static_argnums=0)(length)
        assert state.k.shape == (1, 1, 8, 4) and int(state.count[0]) == length
        assert float(state.z[0, 0, 0]) == max(length - 8, 0)
        expected = sorted([*range(min(length, 2)), *range(max(2, length - 6), length)])
        kept = sorted(np.abs(np.asarray(k[0, :, 0]) - x).sum(-1).argmin() for x in np.asarray(state.k[0, 0])[:length])
        assert kept == expected


def test_a_mixture_far_above_the_exact_scores_stays_finite():
    size = dict(batch=1, length=30, groups=1, per_group=1, dim=4)
    inputs = Inputs("t2r", size, dict(size=4, sinks=1), 0)
    inputs.mix = inputs.mix + 1e4
    (out, _), gradient = jax.jit(lambda: value_and_gradient(inputs, windowed.chunked))()
    assert all(np.isfinite(x).all() for x in (out, *gradient))


@pytest.mark.parametrize("form", sorted(FORMS))
def test_bfloat16_is_within_one_percent(form):
    size = dict(batch=2, length=100, groups=2, per_group=1, dim=16)
    inputs = Inputs("t2r", size, dict(size=8, sinks=2), 5)
    q, mix, k, v = (jnp.asarray(x) for x in (inputs.q, inputs.mix, inputs.k, inputs.v))

    @jax.jit
    def both():
        half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
        exact = [x.astype(jnp.float32) for x in half]
        run = lambda q, k, v: FORMS[form](inputs.queries(q, mix), k, v, inputs.window)  # noqa: E731
        return run(*half), run(*exact)

    (out, state), (expected, expected_state) = both()
    assert out.dtype == state.k.dtype == jnp.bfloat16 and state.S.dtype == state.z.dtype == jnp.float32
    assert error(out, expected) < 1e-2
    assert error((state.S, state.z), (expected_state.S, expected_state.z)) < 1e-2


def test_dropout_falls_on_the_normalised_weights():
    """With one-hot values the output is the weights: each is dropped, or divided by the rate at which they are kept."""
    size = dict(batch=1, length=12, groups=1, per_group=1, dim=12)
    inputs = Inputs("t2r", size, dict(size=3, sinks=1), 2)
    inputs.v = np.eye(12, dtype=np.float32)[None, :, None]

    @jax.jit
    def both():
        drops = dict(dropout=0.5, key=jax.random.key(0))
        return [inputs.run(windowed.causal_attention, **options)[0][0, :, 0, 0] for options in ({}, drops)]

    weights, dropped = map(np.asarray, both())
    kept = dropped != 0
    assert 0.2 < kept[np.tril_indices(12)].mean() < 0.8
    np.testing.assert_allclose(dropped[kept], 2 * weights[kept], rtol=1e-5)
