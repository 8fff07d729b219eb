"""The kernel of all layers, run by a CPU that imitates a GPU's threads, against the model's own step."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from t2r.kernels.decoding import cuda, one_kernel, support
from t2r.kernels.decoding import fused_model as fused
from t2r.model.config import AttentionSpec, preset
from t2r.model.parameters import abstract_model
from t2r.model.transformer import embed
from tests.conftest import error, make_model, micro, random_tokens

MERGED = AttentionSpec("merged", "t2r", 32)
LIKE_THE_PAPERS = dict(
    width=1024, heads=2, head_dim=128, feedforward=800, layers=2, attention=(MERGED,), adaptive_cutoffs=()
)
needs_nvrtc = pytest.mark.skipif(cuda.nvrtc() is None, reason="needs NVRTC (nvidia-cuda-nvrtc)")
FEEDERS = 3  # clusters, of 288 units each, 64 of which are nobody's


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_it_is_the_models_step(tmp_path):
    """For a batch that does not fill the blocks, one text of which has ended; one cluster has no head."""
    texts = 13
    model = make_model(micro(**LIKE_THE_PAPERS, final_norm=False))
    tokens, going = random_tokens(texts, 3), jnp.arange(texts) != 1
    _, state = model(tokens, state=model.init_state(texts, 8))
    hidden, after = model(tokens[:, :1], state=state, mask=going[:, None])
    x = embed(model, model.embedding, tokens[:, :1], state.position[:, None] + going[:, None] - 1)[:, 0]
    blocks = one_kernel.pack([fused.layer_of(block)[:4] for block in model.blocks], 2, 32, FEEDERS)

    defined = one_kernel.definitions(model.config, 32, texts, model.blocks[0].attention.normalizer, FEEDERS)
    found, states = emulate(tmp_path, defined, x, blocks, state.layers, going)
    alive = np.flatnonzero(going)
    assert error(found[alive] - x[alive], hidden[alive, 0] - x[alive]) < 0.01  # its matrices are in bfloat16
    for one, other in zip(states, after.layers):
        assert error((one.S, one.z), (other.S, other.z)) < 0.01
        assert error((one.S[1], one.z[1]), (other.S[1], other.z[1])) == 0


def emulate(folder, defined, x, blocks, states, keep):
    types = [pointer.rsplit(" ", 1)[0] for pointer in defined["POINTERS"].split(", ")]
    passed = ", ".join(f"({kind}) all[{place}]" for place, kind in enumerate(types))
    grid = defined["FEEDERS"] * one_kernel.RANKS
    program = [f'#include "{Path(__file__).with_name("emulated_gpu.hpp")}"']
    program += [f"#define {name} {value}" for name, value in defined.items()] + [one_kernel.source("one_kernel.cu")]
    program += [f"void call(void** all) {{ decode_step({passed}); }}"]
    program += [f'extern "C" bool go(void** all) {{ return run(call, all, {grid}, RANKS, THREADS, MEMORY); }}']
    (folder / "program.cpp").write_text("\n".join(program))
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-o", "program.so", "program.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    given, changed = ([np.array(array) for array in arrays] for arrays in one_kernel.arguments(x, blocks, states, keep))
    pointers = [array.ctypes.data for array in (*given, *changed, *changed)]
    go = ctypes.CDLL(str(folder / "program.so")).go
    go.restype = ctypes.c_bool
    assert go((ctypes.c_void_p * len(pointers))(*pointers)), "all threads wait for each other"
    return one_kernel.results(changed, x.shape, states)


@needs_nvrtc
def test_the_papers_model_lowers_for_gpus():
    """Compiled from CUDA; what it changes is changed in place."""
    config = preset("paper_lm", vocab_size=32_768, adaptive_cutoffs=(), layers=2, attention=(MERGED,))
    graph, arrays = nnx.split(abstract_model(config))
    assert support.suits(nnx.merge(graph, arrays)) and support.suits_one_kernel(nnx.merge(graph, arrays))

    def step(arrays):
        model = nnx.merge(graph, arrays)
        fast = fused.FusedModel(model, fused.pack_model(model, as_one=True))
        return fast(jnp.zeros((16, 1), jnp.int32), state=model.init_state(16, 8), mask=jnp.ones((16, 1), bool))

    text = jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.ptx") == 1 and "decode_step" in text
    assert text.count("#stablehlo.output_operand_alias") == 1 + 2 * 2


def test_it_is_for_models_of_one_kind():
    known = dict(LIKE_THE_PAPERS, heads=8, head_dim=0, feedforward=4096)
    assert support.suits_one_kernel(abstract_model(micro(**known)))
    for fields in (
        dict(attention=(MERGED, AttentionSpec())), dict(feedforward=2048), dict(heads=4), dict(norm_placement="after"),
        dict(attention=(AttentionSpec("merged", "t2r", 16),)),
    ):  # fmt: skip
        assert not support.suits_one_kernel(abstract_model(micro(**{**known, **fields}))), fields
    assert not support.one_kernel_available(abstract_model(micro(**known)), 16)  # not on a CPU


def test_without_a_gpu_no_clusters_have_room():
    assert cuda.clusters_at_once(one_kernel.RANKS, one_kernel.THREADS, one_kernel.MEMORY) == 0


@needs_nvrtc
def test_bad_cuda_is_refused_with_the_compilers_words():
    with pytest.raises(RuntimeError, match="nonsense"):
        cuda.compile_cuda('extern "C" __global__ void f() { nonsense; }', ["--gpu-architecture=compute_90"])
