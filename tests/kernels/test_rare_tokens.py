"""The loss kernels of rare tokens, interpreted where there is no GPU, against the loop that they replace."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from t2r.kernels import rare_tokens, support
from t2r.model import cross_entropy as loss_module
from t2r.model.cross_entropy import LogitInputs, cross_entropy
from t2r.training.sharding import make_mesh
from tests.conftest import error, make_model, micro, random_tokens, slow_but
from tests.kernels.test_attention_kernels import imagined_gpu

POSITIONS, VOCABULARY = 200, 1100


@pytest.mark.parametrize("width, count", [(16, 150), (16, 0), (256, 3), (256, 200)])
def test_the_kernels_equal_the_loop_in_value_and_gradient(width, count):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (POSITIONS, width), jnp.bfloat16)
    table = jax.random.normal(keys[1], (VOCABULARY, width)) * width**-0.5
    targets = jax.random.randint(keys[2], (POSITIONS,), 0, VOCABULARY)
    weights = jax.random.normal(keys[3], (POSITIONS,))
    is_counted = jnp.arange(POSITIONS) < count

    def kernels(x, table):
        losses = rare_tokens.losses(x, table, targets, jnp.int32(count), jax.default_backend() != "gpu")
        return (weights * losses).sum(), losses

    def loop(x, table):
        losses = cross_entropy(LogitInputs(x[None], table), targets[None], is_counted[None], rare=True)[0]
        return (weights * losses).sum(), losses

    forms = [jax.jit(jax.value_and_grad(form, (0, 1), has_aux=True)) for form in (kernels, loop)]
    (values, gradients), (expected_values, expected_gradients) = (form(x, table) for form in forms)
    assert error(values, expected_values) < 1e-4
    assert error(gradients, expected_gradients) < 1e-2  # gradients of bfloat16 vectors are bfloat16
    np.testing.assert_array_equal(values[1][count:], 0)
    np.testing.assert_array_equal(gradients[0][count:].astype(np.float32), 0)


def test_the_kernels_lower_for_a_gpu():
    shapes = jax.ShapeDtypeStruct((300, 64), jnp.bfloat16), jax.ShapeDtypeStruct((VOCABULARY, 64), jnp.float32)
    others = jax.ShapeDtypeStruct((300,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    gradient = jax.jit(jax.grad(lambda *args: rare_tokens.losses(*args).sum(), (0, 1)))
    with imagined_gpu():
        text = gradient.trace(*shapes, *others).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_they_are_used_on_gpus_for_supported_widths():
    vectors = lambda width, dtype=jnp.bfloat16: jnp.zeros((2, width), dtype)  # noqa: E731
    gpu = support.Device("gpu", "NVIDIA H100", (9, 0))
    for device in (support.Device("cpu", "cpu"), gpu, support.Device("tpu", "TPU v4")):
        assert support.has_rare_token_kernels("auto", vectors(64), device) == (device == gpu)
    assert not support.has_rare_token_kernels("off", vectors(64), gpu)
    assert not any(support.has_rare_token_kernels("auto", vectors(width), gpu) for width in (8, 48, 512))
    assert not support.has_rare_token_kernels("auto", vectors(64, jnp.float32), gpu)


def test_with_many_positions_the_vocabulary_has_fewer_parts(monkeypatch):
    """Each part has its own partial sums for all positions, whose memory is limited."""
    x, table = jnp.zeros((1000, 64)), jnp.zeros((VOCABULARY, 64))
    assert rare_tokens._Blocks.of(x, table, True).parts == rare_tokens.MOST_PARTS
    monkeypatch.setattr(rare_tokens, "MOST_PARTIAL_SUMS", 3 * x.size)
    assert rare_tokens._Blocks.of(x, table, True).parts == 3


@pytest.mark.slow
@pytest.mark.parametrize("axes", slow_but([{}, {"data": 4, "fsdp": 2}, {"tensor": 2, "data": 4}], {}))
def test_the_adaptive_softmax_uses_them(axes, monkeypatch):
    """On one device, and on each device's own sequences; not if the vocabulary is sharded."""
    monkeypatch.setattr(loss_module, "has_rare_token_kernels", lambda kernels, x: kernels != "off")
    calls, losses = [], rare_tokens.losses
    monkeypatch.setattr(rare_tokens, "losses", lambda *args: calls.append(1) or losses(*args, True))
    tokens, results = random_tokens(8, 9), []
    for kernels in ("auto", "off"):
        graph, arrays = nnx.split(make_model(micro(width=64, kernels=kernels, dtype="bfloat16")))

        def loss(arrays, graph=graph):
            return nnx.merge(graph, arrays).losses(tokens[:, :-1], tokens[:, 1:]).mean()

        with jax.set_mesh(make_mesh(ConfigDict(axes))) if axes else contextlib.nullcontext():
            results.append(jax.jit(jax.value_and_grad(loss))(arrays))
    assert error(*results) < 1e-3
    assert len(calls) == (0 if "tensor" in axes else 2)  # two rarer bands
