"""`run_or_skip`, which has a derivative of its own, against `jax.lax.cond`."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from conftest import error, make_model, micro, micro_mt, random_tokens, slow_but
from t2r.batch import Batch
from t2r.conversion.swap import swap
from t2r.layout import uninitialized
from t2r.model import transformer
from t2r.model.loss import total_loss
from t2r.training.sharding import make_mesh

SCAN = dict(scan_layers=True)
MODELS = {
    "softmax": (micro, {}, None),
    "t2r": (micro, {}, "t2r"),
    "rfa, scan": (micro, SCAN, "rfa"),
    "t2r, scan and remat": (micro, SCAN | dict(remat=True), "t2r"),
    "translation": (micro_mt, {}, "t2r"),
    "softmax translation": (micro_mt, {}, None),
}


def plain_condition(layer, keep, x, others):
    return jax.lax.cond(keep, layer, lambda x, _: x, x, others)


@pytest.mark.parametrize("name", slow_but(MODELS, "softmax", "t2r, scan and remat"))
def test_it_equals_a_condition_in_value_and_gradient(name, monkeypatch):
    make, fields, feature_map = MODELS[name]
    # Uninitialised memory is filled with NaN, so that the test fails if it is read.
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: (jnp.zeros(shape) + jnp.nan).astype(dtype))
    model = make_model(make(layers=2, layer_dropout=0.5, dropout=0.1, **fields))
    graph, arrays = nnx.split(swap(model, feature_map=feature_map) if feature_map else model)
    batch = Batch(random_tokens(2, 9, vocab=99), random_tokens(2, 7, 1, vocab=99) if make is micro_mt else None)

    def loss(arrays, key):
        return total_loss(nnx.merge(graph, arrays), batch, key=key)[0]

    keys, results = [jax.random.key(seed) for seed in range(3)], []
    for run_or_skip in (transformer.run_or_skip, plain_condition):
        monkeypatch.setattr(transformer, "run_or_skip", run_or_skip)
        step = jax.jit(jax.value_and_grad(lambda *args: loss(*args)))  # a new function, so that it is traced again
        results.append([step(arrays, key) for key in keys])
    assert error(*results) < 1e-5


def test_residuals_that_are_inputs_are_not_copied():
    """Of this layer's residuals, x is an input; the condition returns only those that it computes."""

    def layer(x, weight):
        return x * jnp.sin(weight)

    def gradient(keep, x, weight):
        return jax.grad(lambda x: transformer.run_or_skip(layer, keep, x, weight).sum())(x)

    equations = jax.make_jaxpr(gradient)(True, jnp.ones(5), jnp.float32(2)).jaxpr.eqns
    conditions = [equation for equation in equations if equation.primitive.name == "cond"]
    # Forward: the output, and two residuals computed from the weight. Backward: both gradients.
    assert [len(condition.outvars) for condition in conditions] == [3, 2]


def test_sharded_arrays_are_zeroed_instead_of_uninitialised():
    """For an uninitialised one, the compiler would allocate the whole array on each device."""

    def is_empty():
        return "empty" in str(jax.make_jaxpr(lambda: uninitialized((8, 4), jnp.float32))())

    assert is_empty()
    mesh = make_mesh(ConfigDict({"data": 8}))
    with jax.set_mesh(mesh):
        assert not is_empty()
        per_device = jax.shard_map(
            lambda x: x + uninitialized((1, 4), jnp.float32), in_specs=P("data"), out_specs=P("data")
        )
        assert "empty" in str(jax.make_jaxpr(per_device)(jnp.zeros((8, 4))))
