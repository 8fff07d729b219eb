"""Feature maps against the formulas and kernels of their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from t2r.attention.feature_map import (
    T2R,
    Elu,
    Hedgehog,
    Performer,
    Rfa,
    RfaFixed,
    T2RElu,
    feature_map_class,
    orthogonal_gaussian,
)
from t2r.attention.module import AttentionShape, make_feature_map
from t2r.errors import InputError


def vectors(seed: int, count: int = 40, dim: int = 8, scale: float = 1.0):
    return scale * jax.random.normal(jax.random.key(seed), (1, count, 1, dim))


def kernel(phi, x, y):
    """φ(x)·φ(y) for all pairs, both treated as keys, which are not scaled."""
    a, b = phi(x, is_query=False), phi(y, is_query=False)
    product = jnp.einsum("bngk,bmgk->nm", a.values, b.values)
    if a.log_scale is not None:
        product *= jnp.exp(a.log_scale[0, :, 0][:, None] + b.log_scale[0, :, 0])
    return product


def test_t2r_is_a_relu_mlp_per_head_shared_by_queries_and_keys():
    phi = T2R(2, 8, 5, query_scale=8**-0.5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 3, 2, 8))
    w, b = phi.weight[...], phi.bias[...]
    for head in range(2):
        expected = jax.nn.relu(x[0, :, head] @ w[head].T + b[head])
        np.testing.assert_allclose(phi(x, is_query=False).values[0, :, head], expected, rtol=1e-5, atol=1e-6)
        scaled = jax.nn.relu(x[0, :, head] * 8**-0.5 @ w[head].T + b[head])
        query = phi(x[:, :, :, None], is_query=True).values[0, :, head, 0]
        np.testing.assert_allclose(query, scaled, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(w).max()) <= 8**-0.5 and float(jnp.abs(b).max()) <= 8**-0.5
    assert phi.normalizer(jnp.array([1e-5, 3.0])).tolist() == pytest.approx([1e-2, 3.0])


def test_elu_is_positive_and_unscaled():
    phi = Elu(1, 8, 8, query_scale=8**-0.5, rngs=nnx.Rngs(0))
    x = vectors(0)
    expected = np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    np.testing.assert_allclose(phi(x, is_query=True).values, expected, rtol=1e-6)
    assert phi.normalizer(jnp.float32(0.0)) == pytest.approx(1e-6)


def errors_by_size(make, exact, x, y, sizes):
    """For each number of features, the RMS error of the kernel, averaged over random draws."""
    errors = []
    for size in sizes:
        draws = [float(jnp.sqrt(jnp.mean((kernel(make(size, seed), x, y) - exact) ** 2))) for seed in range(6)]
        errors.append(np.mean(draws))
    return errors


def test_rfa_approximates_the_gaussian_kernel_better_with_more_features():
    x, y = vectors(0), vectors(1)
    unit = [v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-3) for v in (x, y)]
    distance = jnp.linalg.norm(unit[0][0, :, None, 0] - unit[1][0, None, :, 0], axis=-1)
    exact = 0.64 * jnp.exp(-(distance**2) / 2)  # the same factor with any number of directions

    def make(size: int, seed: int) -> Rfa:
        return Rfa(1, 8, size, query_scale=1.0, rngs=nnx.Rngs(seed))

    errors = errors_by_size(make, exact, x, y, (16, 64, 256, 1024))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 3 * errors[-1] and errors[-1] < 0.05


def test_performer_approximates_the_softmax_kernel_better_with_more_features():
    x, y = vectors(0, scale=0.4), vectors(1, scale=0.4)  # longer vectors have heavy-tailed estimates
    exact = jnp.exp(jnp.einsum("bngd,bmgd->nm", x, y) / 8**0.5)
    make = lambda size, seed: Performer(1, 8, size, query_scale=8**-0.5, rngs=nnx.Rngs(seed))  # noqa: E731
    errors = errors_by_size(make, exact, x, y, (16, 64, 256, 1024))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 3 * errors[-1] and errors[-1] < 0.1


def test_performer_directions_are_orthogonal_in_blocks():
    directions = orthogonal_gaussian(jax.random.key(0), 2, 12, 8)
    for block in (directions[:, :8], directions[:, 8:]):
        products = jnp.einsum("gkd,gld->gkl", block, block)
        off_diagonal = products * (1 - jnp.eye(block.shape[1]))
        assert float(jnp.abs(off_diagonal).max()) < 1e-4


def test_rfa_draws_new_features_in_training_only():
    phi = Rfa(2, 8, 16, query_scale=1.0, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(3), (1, 4, 2, 8))
    evaluated = phi(x, is_query=False).values
    np.testing.assert_array_equal(evaluated, phi(x, is_query=False).values)
    first, second = (phi(x, is_query=False, key=jax.random.key(i)).values for i in (1, 2))
    assert not np.allclose(first, second) and not np.allclose(first, evaluated)
    # Queries and keys of a step must use the same draw: otherwise φ(q)·φ(k) does not approximate the kernel.
    np.testing.assert_allclose(phi(x[:, :, :, None], is_query=True, key=jax.random.key(1)).values[..., 0, :], first)


def test_fixed_random_features_are_the_same_in_training_and_evaluation():
    phi = RfaFixed(2, 8, 16, query_scale=1.0, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(3), (1, 4, 2, 8))
    trained = phi(x, is_query=False, key=jax.random.key(1)).values
    np.testing.assert_array_equal(trained, phi(x, is_query=False).values)


def test_hedgehogs_features_are_a_softmax_of_opposite_exponents():
    """Against the definition; with W = 1 its exponents' products sum to softmax attention's score."""
    phi = Hedgehog(2, 8, 16, query_scale=8**-0.5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jnp.einsum("gkd,gld->gkl", phi.weight[...], phi.weight[...]), [np.eye(8)] * 2, atol=1e-5)
    x = jax.random.normal(jax.random.key(3), (1, 4, 2, 8))
    exponents = np.exp(np.einsum("bngd,gkd->bngk", x, phi.weight[...]) / 8**0.25)
    exact = np.concatenate([exponents, 1 / exponents], -1)
    values = phi(x, is_query=False).values
    np.testing.assert_allclose(values, exact / exact.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(phi(x[:, :, :, None], is_query=True).values[..., 0, :], values)


def test_t2r_with_elus_activation_has_the_same_matrix_and_no_zeros():
    phi, relu = (cls(2, 8, 16, query_scale=8**-0.5, rngs=nnx.Rngs(0)) for cls in (T2RElu, T2R))
    x = jax.random.normal(jax.random.key(3), (1, 40, 2, 8))
    with_elu, with_relu = (map_(x, is_query=False).values for map_ in (phi, relu))
    assert float(with_elu.min()) > 0
    positive = with_relu > 0
    np.testing.assert_allclose(with_elu[positive], with_relu[positive] + 1, rtol=1e-6)
    assert float(with_elu[~positive].max()) <= 1


@pytest.mark.parametrize("name", ["t2r", "t2r_elu", "elu", "rfa", "performer", "hedgehog"])
def test_gradients_are_finite_at_zero(name):
    phi = make_feature_map(AttentionShape(8, 1, 1, 8, True), name, None, rngs=nnx.Rngs(0))
    gradient = jax.grad(lambda x: phi(x, is_query=False).values.sum())(jnp.zeros((1, 2, 1, 8)))
    assert np.isfinite(gradient).all()


def test_invalid_names_and_sizes_are_errors():
    with pytest.raises(InputError, match=r"'t2rr'.*t2r, elu, rfa, rfa_fixed, performer, hedgehog, t2r_elu"):
        feature_map_class("t2rr")
    shape = AttentionShape(8, 1, 1, 8, True)
    cases = [("t2r", 0, "features=0"), ("elu", 4, "features=4"), ("rfa", 7, "features=7")]
    for name, features, message in [*cases, ("hedgehog", 7, "features=7 must be even")]:
        with pytest.raises(InputError, match=message):
            make_feature_map(shape, name, features, rngs=nnx.Rngs(0))
