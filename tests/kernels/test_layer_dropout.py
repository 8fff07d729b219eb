"""A layer is run or skipped, with a derivative of its own, as by JAX's condition."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from conftest import error, make_model, micro, micro_mt, random_tokens
from t2r.batch import Batch
from t2r.conversion.swap import swap
from t2r.layout import uninitialized
from t2r.model import transformer
from t2r.model.loss import total_loss
from t2r.training.sharding import make_mesh

LOOP = dict(scan_layers=True)
MODELS = {
    "softmax": (micro, {}, None),
    "t2r": (micro, {}, "t2r"),
    "rfa as one loop": (micro, LOOP, "rfa"),
    "t2r as one loop, recomputed": (micro, LOOP | dict(remat=True), "t2r"),
    "translation": (micro_mt, {}, "t2r"),
    "translation by a transformer": (micro_mt, {}, None),
}


def condition(layer, keep, x, others):
    return jax.lax.cond(keep, layer, lambda x, _: x, x, others)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("t2r", "translation") else ()) for name in MODELS]
)
def test_it_is_a_condition_and_its_derivative_too(name, monkeypatch):
    make, fields, feature_map = MODELS[name]
    # Memory that is not written to is not zero, and must not be read.
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: (jnp.zeros(shape) + jnp.nan).astype(dtype))
    model = make_model(make(layers=2, layer_dropout=0.5, dropout=0.1, **fields))
    graph, arrays = nnx.split(swap(model, feature_map=feature_map) if feature_map else model)
    batch = Batch(random_tokens(2, 9, vocab=99), random_tokens(2, 7, 1, vocab=99) if make is micro_mt else None)

    def loss(arrays, key):
        return total_loss(nnx.merge(graph, arrays), batch, key=key)[0]

    keys, results = [jax.random.key(seed) for seed in range(3)], []
    for run_or_skip in (transformer.run_or_skip, condition):
        monkeypatch.setattr(transformer, "run_or_skip", run_or_skip)
        step = jax.jit(jax.value_and_grad(lambda *given: loss(*given)))  # a function that was not traced before
        results.append([step(arrays, key) for key in keys])
    assert error(*results) < 1e-5


def test_inputs_are_not_copied_to_be_kept():
    """The layer's input, as large as what it computes, is one of two things that its derivative needs."""

    def layer(x, weight):
        return x * jnp.sin(weight)

    def gradient(keep, x, weight):
        return jax.grad(lambda x: transformer.run_or_skip(layer, keep, x, weight).sum())(x)

    equations = jax.make_jaxpr(gradient)(True, jnp.ones(5), jnp.float32(2)).jaxpr.eqns
    conditions = [equation for equation in equations if equation.primitive.name == "cond"]
    assert [len(condition.outvars) for condition in conditions] == [
        3,
        2,
    ]  # x, two of the weight; both gradients


def test_room_that_is_divided_among_devices_is_zeroed():
    """The compiler would give all of it to each device."""

    def makes_empty():
        return "empty" in str(jax.make_jaxpr(lambda: uninitialized((8, 4), jnp.float32))())

    assert makes_empty()
    mesh = make_mesh(ConfigDict({"data": 8}))
    with jax.set_mesh(mesh):
        assert not makes_empty()
        own = jax.shard_map(lambda x: x + uninitialized((1, 4), jnp.float32), in_specs=P("data"), out_specs=P("data"))
        assert "empty" in str(jax.make_jaxpr(own)(jnp.zeros((8, 4))))
