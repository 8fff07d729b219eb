"""Which device gets which kernel: decisions about descriptions of devices, none of which is here."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from conftest import micro, micro_mt
from t2r.kernels.decoding import support as decoding
from t2r.kernels.support import Device, gpu_has_kernels, has_flash_attention, kernel_platform, this_device
from t2r.model.config import AttentionSpec
from t2r.model.parameters import abstract_model
from t2r.model.rows import for_decoding

H200, A100, A10 = (Device("gpu", f"NVIDIA {n}", c) for n, c in (("H200", (9, 0)), ("A100", (8, 0)), ("A10", (8, 6))))
V100, B200 = Device("gpu", "Tesla V100", (7, 0)), Device("gpu", "NVIDIA B200", (10, 0))
MI300 = Device("gpu", "AMD Instinct MI300X")
CPU, TPU_V3, TPU_V4 = Device("cpu", "cpu"), Device("tpu", "TPU v3"), Device("tpu", "TPU v4")


def queries(size, dtype=jnp.bfloat16):
    return jnp.zeros((1, 2, 1, 1, size), dtype)


@pytest.mark.parametrize(
    ("device", "auto", "on"),
    [(H200, True, True), (A100, False, True), (A10, False, True), (B200, False, True), (V100, False, False),
     (MI300, False, False), (CPU, False, False), (TPU_V4, False, False)],
)  # fmt: skip
def test_gpu_kernels_run_on_what_they_were_written_for(device, auto, on):
    assert [gpu_has_kernels(kernels, device) for kernels in ("auto", "on", "off")] == [auto, on, False]
    array = jnp.zeros((2, 64), jnp.bfloat16)
    assert (kernel_platform("auto", array, device=device) == "gpu") == auto
    # Sizes of `ONE_KERNEL_SIZES`' kind, small: what the decoding kernels accept.
    sizes = dict(width=256, heads=2, head_dim=128, feedforward=1024, attention=(AttentionSpec("merged", "t2r", 32),))
    for kernels, expected in (("auto", auto), ("on", on), ("off", False)):
        model = abstract_model(micro(**sizes, kernels=kernels, dtype="bfloat16", adaptive_cutoffs=()))
        assert decoding.available(model, 4, device) == expected
        assert not decoding.available(model, 65, device)


def test_matrices_in_8_bits_have_the_kernel_that_takes_them(monkeypatch):
    """Not those that would read a rounded copy in bfloat16, which is not smaller."""
    monkeypatch.setattr(decoding.cuda, "clusters_at_once", lambda *sizes: 2 * decoding.CLUSTERS)
    monkeypatch.setattr(decoding, "this_device", lambda: H200)
    sizes = dict(width=256, heads=2, head_dim=128, feedforward=1024, attention=(AttentionSpec("merged", "t2r", 32),))
    model = abstract_model(micro(**sizes, dtype="bfloat16", adaptive_cutoffs=()))
    rounded = nnx.eval_shape(lambda model: for_decoding(model, "int8"), model)
    assert decoding.choice(model, 4) == "layers" and decoding.choice(rounded, 4) == "all"


def test_translation_has_the_kernel_of_all_layers_where_it_is_faster(monkeypatch):
    """With T2R, on an H100 or H200, for small batches; otherwise the kernels of each layer. Nothing is said of it."""
    monkeypatch.setattr(decoding.cuda, "clusters_at_once", lambda *sizes: 2 * decoding.CLUSTERS)
    monkeypatch.setattr(decoding, "say", pytest.fail)
    merged = AttentionSpec("merged", "t2r", 32)
    sizes = dict(width=256, heads=2, head_dim=128, feedforward=1024, dtype="bfloat16", kernels="on")
    t2r = abstract_model(micro_mt(**sizes, attention=(merged,), cross_attention=(merged,)))
    transformer = abstract_model(micro_mt(**sizes | dict(kernels="auto")))
    monkeypatch.setattr(decoding, "this_device", lambda: H200)
    assert [decoding.choice(model, 20) for model in (t2r, transformer)] == ["all", "layers"]
    assert decoding.choice(t2r, 33) == "layers"
    monkeypatch.setattr(decoding, "this_device", lambda: A100)
    assert decoding.choice(t2r, 20) == "layers"


def test_tpu_kernels_are_asked_for():
    array = jnp.zeros((2, 64), jnp.bfloat16)
    assert kernel_platform("on", array, device=TPU_V4) == "tpu"
    assert kernel_platform("on", array, device=TPU_V3) is kernel_platform("auto", array, device=TPU_V4) is None


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        (H200, {8, 64, 128, 256}),
        (A100, {8, 64, 128}),
        (B200, {8, 64, 128}),
        (V100, set()),
        (MI300, set()),
        (CPU, set()),
    ],
)
def test_cudnn_attends_with_supported_heads_on_ampere_and_later(device, sizes):
    assert {size for size in (8, 20, 64, 128, 256, 264) if has_flash_attention(queries(size), device)} == sizes
    assert not has_flash_attention(queries(64, jnp.float32), device)


def test_this_device_is_described():
    device = this_device()
    assert (device.platform, device.kind) == (jax.devices()[0].platform, jax.devices()[0].device_kind)
    assert (device.capability is not None) == ("NVIDIA" in device.kind)
