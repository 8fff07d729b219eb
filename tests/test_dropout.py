"""Dropout: its rate, parts of an array against the whole, and the gradient against the forward mask."""

import jax
import jax.numpy as jnp
import numpy as np

from t2r.dropout import dropout, relu_and_dropout

KEY = jax.random.key(5)


def test_elements_are_dropped_at_the_rate_and_the_rest_are_scaled():
    dropped = np.asarray(jax.jit(lambda: dropout(jnp.ones((300, 400)), 0.3, KEY))())
    assert abs((dropped == 0).mean() - 0.3) < 0.01 and np.allclose(dropped[dropped > 0], 1 / 0.7)
    column_rates, row_rates = (dropped == 0).mean(0), (dropped == 0).mean(1)
    assert column_rates.std() < 0.04 and row_rates.std() < 0.04, "all rows and columns are dropped from alike"
    assert (dropped != dropout(jnp.ones((300, 400)), 0.3, KEY, 1)).any()
    part = dropout(jnp.ones((100, 50)), 0.3, KEY, within=(300, 400), first=(20, 30))
    np.testing.assert_array_equal(part, dropped[20:120, 30:80])


def test_gradients_have_the_mask_of_the_forward_pass():
    x, upstream = (jax.random.normal(jax.random.key(i), (40, 50)) for i in range(2))

    @jax.jit
    def values_and_gradients(x):
        plain, pull = jax.vjp(lambda x: dropout(x, 0.4, KEY), x)
        rectified, pull_relu = jax.vjp(lambda x: relu_and_dropout(x, 0.4, KEY), x)
        undropped, pull_undropped = jax.vjp(lambda x: relu_and_dropout(x, 0.0, None), x)
        gradients = pull(upstream)[0], pull_relu(upstream)[0], pull_undropped(upstream)[0]
        return plain, rectified, undropped, gradients

    plain, rectified, undropped, (dx, d_relu, d_undropped) = values_and_gradients(x)
    mask = np.asarray(plain != 0) / 0.6
    np.testing.assert_allclose(plain, x * mask, rtol=1e-6)
    np.testing.assert_allclose(dx, upstream * mask, rtol=1e-6)
    np.testing.assert_allclose(rectified, np.maximum(x, 0) * mask, rtol=1e-6)
    np.testing.assert_allclose(d_relu, upstream * mask * (x > 0), rtol=1e-6)
    np.testing.assert_array_equal(undropped, np.maximum(x, 0))
    np.testing.assert_allclose(d_undropped, upstream * (x > 0), rtol=1e-6)
