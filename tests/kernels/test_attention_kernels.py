"""The attention kernels: interpreted, against plain JAX; and lowered for GPU and TPU."""

import contextlib
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from conftest import error
from t2r.attention import linear, softmax
from t2r.attention.feature_map import Features
from t2r.attention.linear import LinearState
from t2r.benchmark.compile import topology_devices
from t2r.kernels import attention_chunked as chunks
from t2r.kernels import attention_pairs as pairs
from t2r.kernels import attention_step as steps
from t2r.normalizer import Normalizer
from t2r.training.sharding import make_mesh

CLAMPED, ADDED = Normalizer(clamp=True, value=2.0), Normalizer(clamp=False, value=1e-2)


def arrays(batch, length, groups, per_group, features, size, dtype=np.float32):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(dtype)  # noqa: E731
    q, k = normal(batch, length, groups, per_group, features), normal(batch, length, groups, features)
    v, upstream = normal(batch, length, groups, size), normal(batch, length, groups, per_group, size)
    return np.maximum(q, 0), np.maximum(k, 0), v, upstream


def output_and_gradients(function, q, k, v, upstream):
    out, pullback = jax.vjp(function, q, k, v)
    return out, *pullback(upstream)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "length, per_group, normalizer",
    [(80, 1, CLAMPED), (50, 3, ADDED), (20, 2, CLAMPED)],
    ids=["whole chunks", "part of a chunk", "one segment"],
)
def test_the_chunked_kernel_equals_linear_attention(platform, length, per_group, normalizer):
    """In value and gradient: over several segments, for a length that chunks do not divide, and within one segment."""
    inputs = arrays(2, length, 2, per_group, 8, 16)
    kernel = functools.partial(
        chunks.attention, normalizer=normalizer, platform=platform, interpret=True, chunk=16, segment=32
    )
    plain = lambda q, k, v: linear.quadratic(Features(q), Features(k), v, normalizer)[0]  # noqa: E731
    results, expected = (jax.jit(functools.partial(output_and_gradients, f))(*inputs) for f in (kernel, plain))
    for result, reference in zip(results, expected):
        assert error(result, reference) < 1e-5


@pytest.mark.parametrize("normalizer", [None, CLAMPED, ADDED], ids=["softmax", "clamped", "added"])
def test_the_kernel_of_pairs_equals_attention_with_dropout(normalizer):
    """In value and gradient; it drops the same weights as plain JAX."""
    inputs = arrays(2, 300, 1, 2, 16, 16)
    rate, key = 0.3, jax.random.key(3)

    def kernel(q, k, v):
        scale = 0.3 if normalizer is None else 1.0
        settings = dict(scale=scale, normalizer=normalizer, dropout=rate, key=key)
        return pairs.attention(q, k, v, **settings, interpret=True, block=32)

    def plain(q, k, v):
        if normalizer is None:
            return softmax.causal_attend(q, k, v, 0.3, dropout=rate, key=key)
        return linear.causal_attention(Features(q), Features(k), v, normalizer, dropout=rate, key=key)[0]

    results, expected = (jax.jit(functools.partial(output_and_gradients, f))(*inputs) for f in (kernel, plain))
    for result, reference in zip(results, expected):
        assert error(result, reference) < 1e-5


def test_the_step_kernel_equals_a_recurrent_step():
    q, k, v, _ = (jnp.asarray(x[:, :1]) for x in arrays(3, 2, 2, 3, 8, 16))
    rng = np.random.default_rng(1)
    arrays_of_state = (np.abs(rng.standard_normal(shape, np.float32)) for shape in ((3, 2, 8, 16), (3, 2, 8)))
    state = LinearState(*map(jnp.asarray, arrays_of_state))
    expected, new_state = linear.recurrent(Features(q), Features(k), v, CLAMPED, state=state)
    out, S, z = steps.step(q[:, 0], k[:, 0], v[:, 0], state.S, state.z, CLAMPED, interpret=True)
    assert error((out, S, z), (expected[:, 0], new_state.S, new_state.z)) < 1e-6


def test_kernels_are_sharded_by_sequences_and_heads():
    """Four devices compute the same values, and drop the same weights, as one."""
    inputs = arrays(4, 40, 2, 1, 16, 16)
    kernels = [
        functools.partial(chunks.attention, normalizer=CLAMPED, interpret=True, chunk=16, segment=32),
        functools.partial(pairs.attention, scale=0.3, dropout=0.3, key=jax.random.key(1), interpret=True, block=32),
    ]
    both = lambda *inputs: [output_and_gradients(kernel, *inputs) for kernel in kernels]  # noqa: E731
    expected = jax.jit(both)(*inputs)
    with jax.set_mesh(make_mesh(ConfigDict({"data": 2, "tensor": 2}))):
        results = jax.jit(both)(*inputs)
    assert error(results, expected) < 1e-5
    assert len(results[0][0].sharding.device_set) == 4


def imagined_gpu():
    """A mesh of one GPU, for lowering without a GPU: newer versions of JAX need to know the device."""
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=auto, abstract_device=gpu)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_kernels_lower_for_their_devices(platform):
    """At the paper's sizes, in bfloat16, forward and backward."""
    q, k, v, upstream = (jnp.asarray(x, jnp.bfloat16) for x in arrays(1, 1024, 2, 1, 32, 128))
    kernels = [functools.partial(chunks.attention, normalizer=CLAMPED, platform="tpu" if platform == "tpu" else "gpu")]
    if platform == "cuda":
        kernels.append(functools.partial(pairs.attention, normalizer=CLAMPED, dropout=0.1, key=jax.random.key(0)))
    for kernel in kernels:
        step = jax.jit(functools.partial(output_and_gradients, kernel))
        with imagined_gpu() if platform == "cuda" else contextlib.nullcontext():
            text = step.trace(q, k, v, upstream).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("custom_call") >= 2
    if platform == "tpu":
        state = jnp.zeros((1, 2, 32, 128)), jnp.zeros((1, 2, 32))
        step = jax.jit(functools.partial(steps.step, normalizer=CLAMPED)).trace(q[:, 0], k[:, 0], v[:, 0], *state)
        assert "custom_call" in step.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler, libtpu, is not installed")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_kernels_compile_for_real_tpus(topology):
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding) for x in arrays(1, 1024, 2, 1, 32, 128)]
    kernel = functools.partial(chunks.attention, normalizer=CLAMPED, platform="tpu")
    lowered = jax.jit(functools.partial(output_and_gradients, kernel)).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert lowered.compile().as_text().count("tpu_custom_call") >= 4
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)  # noqa: E731
    inputs = array(16, 8, 1, 32), array(16, 8, 32), array(16, 8, 128), array(16, 8, 32, 128), array(16, 8, 32)
    step = jax.jit(functools.partial(steps.step, normalizer=CLAMPED)).trace(*inputs)
    assert "tpu_custom_call" in step.lower(lowering_platforms=("tpu",)).compile().as_text()
