"""Meshes: eight devices give the same losses, parameters and generated tokens as one, with less memory on each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from conftest import WINDOW, error, make_model, micro, micro_mt, random_tokens, slow_but
from t2r.batch import Batch
from t2r.conversion.swap import swap
from t2r.decode.generate import generate_tokens, prefill
from t2r.errors import InputError
from t2r.evaluation.perplexity import perplexity
from t2r.layout import dimensions_of, partition_spec, shardings
from t2r.model.parameters import arrays_of, trainable_names, with_arrays
from t2r.training.config import default_config
from t2r.training.optimizer import make_optimizer
from t2r.training.sharding import batch_ways, make_mesh
from t2r.training.step import Objective, init_state, make_step

MESHES = [dict(data=8), dict(fsdp=8), dict(tensor=4), dict(data=2, fsdp=2, tensor=2)]


def hybrid(window=None, **fields):
    """A T2R layer and a softmax layer; with dropout, so that random masks must agree too."""
    model = make_model(micro(adaptive_cutoffs=(), vocab_size=256, heads=4, dropout=0.1, **fields))
    return swap(model, features=8, keep="1", **(window or {}))


def run(model, axes, batch_of, steps=3):
    mesh = make_mesh(ConfigDict(axes))
    options = default_config().optimizer
    # A large eps: where a gradient is nearly 0, Adam would otherwise divide one rounding error by another.
    options.update(warmup_steps=1, learning_rate=0.01, eps=1e-3)
    optimizer = make_optimizer(options, steps)
    state = init_state(jax.tree.map(jnp.copy, arrays_of(model)), trainable_names(model, "all"), optimizer, 0)
    state = jax.device_put(state, shardings(state, mesh))
    step, losses = make_step(Objective(model), optimizer, mesh, state), []
    for i in range(steps):
        state, result = step(state, [batch_of(i)])
        losses.append(float(result["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def one_device():
    losses, state = run(hybrid(), dict(data=1), lambda i: Batch(random_tokens(8, 13, i)))
    return losses, jax.tree.map(np.asarray, state.trained)


SLOW = [pytest.param(axes, marks=pytest.mark.slow) for axes in MESHES[:-1]]  # the last has all three axes


@pytest.mark.parametrize("axes", [*SLOW, MESHES[-1]], ids=str)
def test_many_devices_equal_one_and_each_holds_its_share(axes, one_device):
    losses, state = run(hybrid(), axes, lambda i: Batch(random_tokens(8, 13, i)))
    np.testing.assert_allclose(losses, one_device[0], rtol=1e-5)
    assert error(state.trained, one_device[1]) < 1e-5
    ways = axes.get("fsdp", 1) * axes.get("tensor", 1)
    total_bytes = device_bytes = 0
    for leaf in jax.tree.leaves((state.trained, state.optimizer)):
        total_bytes += leaf.nbytes
        device_bytes += leaf.addressable_shards[0].data.nbytes
    # Norms, biases of the residual stream, and arrays that cannot be divided evenly are on every device.
    assert 1 / ways <= device_bytes / total_bytes < 1 / ways + 0.12


@pytest.mark.slow
def test_windowed_attention_on_a_mesh_of_three_axes_is_the_same():
    batch_of = lambda i: Batch(random_tokens(8, 13, i))  # noqa: E731
    expected, actual = (run(hybrid(WINDOW), axes, batch_of) for axes in (dict(data=1), MESHES[-1]))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    assert error(actual[1].trained, jax.tree.map(np.asarray, expected[1].trained)) < 1e-5
    mixture = actual[1].trained["blocks.0.attention.mixture.weight"]
    assert mixture.sharding.shard_shape(mixture.shape) == (2, 1, 8), "heads are sharded"


@pytest.mark.slow
def test_a_translation_model_on_a_mesh_of_three_axes_is_the_same():
    model = swap(make_model(micro_mt(layers=1)), features=4, cross_features=8)
    pairs = lambda i: Batch(random_tokens(4, 7, i, vocab=60), random_tokens(4, 6, i + 9, vocab=60))  # noqa: E731
    expected, actual = (run(model, axes, pairs, steps=2) for axes in (dict(data=1), dict(data=2, fsdp=2, tensor=2)))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    assert error(actual[1].trained, jax.tree.map(np.asarray, expected[1].trained)) < 1e-5


@pytest.mark.parametrize("window", slow_but([None, WINDOW], None), ids=["linear", "windowed"])
def test_decoding_and_evaluation_are_sharded_too(window):
    model, prompts = hybrid(window), [[3, 5, 7], [2], [9, 9], [1, 4]]
    expected = generate_tokens(model, prefill(model, prompts, 8), 8, end=-1)[1]
    scores = perplexity(model, np.arange(200) % 250, window=32, quiet=True)
    mesh = make_mesh(ConfigDict(dict(data=2, tensor=2)))
    arrays = arrays_of(model)
    with jax.set_mesh(mesh):
        sharded = with_arrays(model, jax.device_put(arrays, shardings(arrays, mesh)))
        generation, tokens = generate_tokens(sharded, prefill(sharded, prompts, 8), 8, end=-1)
        assert perplexity(sharded, np.arange(200) % 250, window=32, quiet=True).total == pytest.approx(scores.total)
    assert tokens == expected
    linear, cache = generation.state.layers
    assert linear.S.sharding.shard_shape(linear.S.shape) == (2, 2, 8, 8)
    assert cache.k.sharding.shard_shape(cache.k.shape)[:2] == (2, 2)
    if window:
        assert linear.k.sharding.shard_shape(linear.k.shape) == (2, 2, 4, 8)


def test_layouts_by_name():
    sizes = dict(data=2, fsdp=4, tensor=8)
    spec = lambda name, shape: partition_spec(dimensions_of(name), shape, sizes)  # noqa: E731
    assert spec("blocks.0.attention.query.kernel", (1024, 8, 128)) == P("fsdp", "tensor", None)
    assert spec("blocks.0.cross.out.kernel", (8, 128, 1024)) == P("tensor", None, "fsdp")
    assert spec("blocks.0.attention.feature_map.weight", (8, 32, 128)) == P("tensor", None, None)
    assert spec("blocks.0.attention.feature_map.weight", (2, 32, 128)) == P(None, "tensor", None)
    assert spec("blocks.0.feedforward.down.kernel", (4096, 1024)) == P("tensor", "fsdp")
    assert spec("embedding.tables.2", (207_735, 64)) == P(None, "fsdp"), "a size that cannot be divided is not sharded"
    assert partition_spec(("batch", None), (16, 5), sizes) == P(("data", "fsdp"), None)
    assert dimensions_of("blocks.0.attention_norm.scale") == ()


def test_every_matrix_of_every_model_has_a_layout():
    for model in (
        hybrid(),
        hybrid(WINDOW),
        make_model(micro()),
        make_model(micro_mt(shared_embedding=False, positions="learned", max_positions=9)),
    ):
        for name, array in arrays_of(model).items():
            replicated = array.ndim < 2 or name.endswith("classes")
            assert replicated or len(dimensions_of(name)) == array.ndim, name


def test_invalid_meshes_are_refused():
    assert make_mesh(ConfigDict(dict(data=-1, fsdp=2, tensor=2))).shape == dict(data=2, fsdp=2, tensor=2)
    assert batch_ways(make_mesh(ConfigDict(dict(data=2, fsdp=2, tensor=2)))) == 4
    for axes, message in [
        (dict(data=3, fsdp=3), "does not fit 8 devices"),
        (dict(data=-1, fsdp=3), "does not fit 8 devices"),
        (dict(data=-1, fsdp=-1), "one may be -1"),
        (dict(data=0), "at least 1"),
    ]:
        with pytest.raises(InputError, match=message):
            make_mesh(ConfigDict(axes))
