"""Dropout: as often as asked, the same in parts as in the whole, and backwards where it fell forwards."""

import jax
import jax.numpy as jnp
import numpy as np

from t2r.dropout import dropout, relu_and_dropout

KEY = jax.random.key(5)


def test_entries_are_dropped_at_their_rate_and_the_rest_make_up_for_them():
    found = np.asarray(jax.jit(lambda: dropout(jnp.ones((300, 400)), 0.3, KEY))())
    assert abs((found == 0).mean() - 0.3) < 0.01 and np.allclose(found[found > 0], 1 / 0.7)
    rows, columns = (found == 0).mean(0), (found == 0).mean(1)
    assert rows.std() < 0.04 and columns.std() < 0.04, "no row or column is spared"
    assert (found != dropout(jnp.ones((300, 400)), 0.3, KEY, 1)).any()
    part = dropout(jnp.ones((100, 50)), 0.3, KEY, within=(300, 400), first=(20, 30))
    np.testing.assert_array_equal(part, found[20:120, 30:80])


def test_gradients_fall_where_values_did():
    x, upstream = (jax.random.normal(jax.random.key(i), (40, 50)) for i in range(2))

    @jax.jit
    def both(x):
        plain, pull = jax.vjp(lambda x: dropout(x, 0.4, KEY), x)
        rectified, pull_relu = jax.vjp(lambda x: relu_and_dropout(x, 0.4, KEY), x)
        undropped, pull_undropped = jax.vjp(lambda x: relu_and_dropout(x, 0.0, None), x)
        gradients = pull(upstream)[0], pull_relu(upstream)[0], pull_undropped(upstream)[0]
        return plain, rectified, undropped, gradients

    plain, rectified, undropped, (dx, d_relu, d_undropped) = both(x)
    kept = np.asarray(plain != 0) / 0.6
    np.testing.assert_allclose(plain, x * kept, rtol=1e-6)
    np.testing.assert_allclose(dx, upstream * kept, rtol=1e-6)
    np.testing.assert_allclose(rectified, np.maximum(x, 0) * kept, rtol=1e-6)
    np.testing.assert_allclose(d_relu, upstream * kept * (x > 0), rtol=1e-6)
    np.testing.assert_array_equal(undropped, np.maximum(x, 0))
    np.testing.assert_allclose(d_undropped, upstream * (x > 0), rtol=1e-6)
