"""The kernel of all layers, run on a CPU that emulates a GPU's threads, against the model's own step."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from t2r.kernels.decoding import cuda, launch, one_kernel, support
from t2r.kernels.decoding import fused_model as fused
from t2r.model.config import AttentionSpec, preset
from t2r.model.parameters import abstract_model
from t2r.model.transformer import embed
from tests.conftest import error, make_model, micro, random_tokens
from tests.kernels.emulation import emulate

MERGED = AttentionSpec("merged", "t2r", 32)
PAPER_LIKE = dict(
    width=1024, heads=2, head_dim=128, feedforward=800, layers=2, attention=(MERGED,), adaptive_cutoffs=()
)
needs_nvrtc = pytest.mark.skipif(cuda.nvrtc() is None, reason="needs NVRTC (nvidia-cuda-nvrtc)")
CLUSTERS = 3  # of 288 feed-forward units each; 64 of the last are padding


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_kernel_equals_the_models_step(tmp_path):
    """For a batch of fewer than 16 sequences, one of which has ended; one cluster has no head."""
    batch = 13
    model = make_model(micro(**PAPER_LIKE, final_norm=False))
    tokens, active = random_tokens(batch, 3), jnp.arange(batch) != 1
    _, state = model(tokens, state=model.init_state(batch, 8))
    hidden, expected = model(tokens[:, :1], state=state, mask=active[:, None])
    x = embed(model, model.embedding, tokens[:, :1], state.position[:, None] + active[:, None] - 1)[:, 0]
    layers = one_kernel.pack([fused.layer_matrices(block)[:4] for block in model.blocks], 2, 32, CLUSTERS)

    macros = one_kernel.definitions(model.config, 32, batch, model.blocks[0].attention.normalizer, CLUSTERS)
    out, states = run_emulated(tmp_path, macros, x, layers, state.layers, active)
    indices = np.flatnonzero(active)
    assert (
        error(out[indices] - x[indices], hidden[indices, 0] - x[indices]) < 0.01
    )  # the kernel's matrices are in bfloat16
    for state, expected_state in zip(states, expected.layers):
        assert error((state.S, state.z), (expected_state.S, expected_state.z)) < 0.01
        assert error((state.S[1], state.z[1]), (expected_state.S[1], expected_state.z[1])) == 0
    # The variance of equal numbers, computed as E[x²] − E[x]², is negative by rounding for some of these.
    constant = 1000 + 7.77 * jnp.arange(batch)[:, None] * jnp.ones_like(x)
    out, _ = run_emulated(tmp_path, macros, constant, layers, states, active)
    assert np.isfinite(out).all()


def run_emulated(folder, macros, x, layers, states, keep):
    """The results of the kernel on an emulated GPU."""
    arguments, blocks = one_kernel.arguments(x, layers, states, keep), macros["CLUSTERS"] * one_kernel.RANKS
    updated = emulate(folder, launch.source("one_kernel.cu"), macros, *arguments, blocks)
    return one_kernel.results(updated, x.shape, states)


@needs_nvrtc
def test_the_papers_model_lowers_for_gpus():
    """It is compiled from CUDA, and its work space and states are updated in place."""
    config = preset("paper_lm", vocab_size=32_768, adaptive_cutoffs=(), layers=2, attention=(MERGED,))
    graph, arrays = nnx.split(abstract_model(config))
    assert support.suits(nnx.merge(graph, arrays)) and support.suits_one_kernel(nnx.merge(graph, arrays))

    def step(arrays):
        model = nnx.merge(graph, arrays)
        fast = fused.FusedModel(model, fused.pack_model(model, "one"))
        return fast(jnp.zeros((16, 1), jnp.int32), state=model.init_state(16, 8), mask=jnp.ones((16, 1), bool))

    text = jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.ptx") == 1 and "decode_step" in text
    assert text.count("#stablehlo.output_operand_alias") == 1 + 2 * 2


def test_only_the_papers_sizes_are_supported():
    supported = dict(PAPER_LIKE, heads=8, head_dim=0, feedforward=4096)
    assert support.suits_one_kernel(abstract_model(micro(**supported)))
    for fields in (
        dict(attention=(MERGED, AttentionSpec())), dict(feedforward=2048), dict(heads=4), dict(norm_placement="after"),
        dict(attention=(AttentionSpec("merged", "t2r", 16),)),
    ):  # fmt: skip
        assert not support.suits_one_kernel(abstract_model(micro(**{**supported, **fields}))), fields
    assert not support.one_kernel_available(abstract_model(micro(**supported)), 16)  # not on a CPU


def test_without_a_gpu_no_clusters_run():
    assert cuda.clusters_at_once(one_kernel.RANKS, one_kernel.THREADS, one_kernel.SHARED_MEMORY) == 0


@needs_nvrtc
def test_bad_cuda_raises_the_compilers_message():
    with pytest.raises(RuntimeError, match="nonsense"):
        cuda.compile_cuda('extern "C" __global__ void f() { nonsense; }', ["--gpu-architecture=compute_90"])
