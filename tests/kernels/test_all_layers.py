"""The kernel of all layers for many architectures, on a CPU that emulates a GPU's threads, against the model's step."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from t2r.attention.softmax import KVCache
from t2r.batch import PADDING
from t2r.kernels.decoding import all_layers, cuda, fused_model, launch, layers_packing, support
from t2r.kernels.support import Device
from t2r.model.config import AttentionSpec
from t2r.model.loss import source_states
from t2r.model.parameters import abstract_model, arrays_of, with_arrays
from t2r.model.rows import for_decoding
from tests.conftest import error, make_model, micro, micro_mt, random_tokens
from tests.kernels.emulation import emulate

T2R = AttentionSpec("linear", "t2r", 16)
HEDGEHOG = AttentionSpec("linear", "hedgehog", 24)
HEDGEHOG_WINDOWED = AttentionSpec("windowed", "hedgehog", 24, window=3, sinks=1)
MERGED = AttentionSpec("merged", "t2r", 16)
WINDOWED = AttentionSpec("windowed", "t2r", 16, window=3, sinks=1)
SOFTMAX = AttentionSpec()
LLAMA = dict(
    norm="rms", activation="swish", gated=True, bias=False, positions="rotary", heads=6, kv_heads=2, head_dim=16,
    width=48, feedforward=200, layers=2, adaptive_cutoffs=(), final_norm=False,
)  # fmt: skip
PAPER = dict(heads=2, head_dim=32, width=64, feedforward=128, layers=2, adaptive_cutoffs=(), final_norm=False)
LONG_PROMPT = 300  # more than the warps of a block read at once from a cache
CASES = {  # fields of the model, batch, clusters, ranks
    "llama": (dict(LLAMA, attention=(T2R,)), 5, 3, 2),
    "one sequence": (dict(LLAMA, attention=(T2R,)), 1, 2, 4),
    "more layers": (dict(LLAMA, layers=4, attention=(T2R,)), 2, 2, 2),
    "more clusters than units": (dict(LLAMA, feedforward=30, attention=(T2R,)), 2, 3, 2),
    "many sequences": (dict(LLAMA, attention=(T2R,)), 19, 2, 2),
    "more heads than clusters": (dict(LLAMA, kv_heads=6, attention=(T2R, WINDOWED)), 3, 2, 2),
    "clusters share heads": (dict(LLAMA, attention=(T2R, WINDOWED)), 5, 7, 2),
    "clusters share heads, hybrid": (dict(LLAMA, attention=(SOFTMAX, WINDOWED, T2R), layers=3), 3, 6, 2),
    "window": (dict(LLAMA, attention=(WINDOWED,)), 5, 3, 2),
    "hybrid": (dict(LLAMA, attention=(T2R, SOFTMAX, WINDOWED), layers=3), 5, 3, 2),
    "softmax, ranks share sequences": (dict(LLAMA, attention=(SOFTMAX, WINDOWED)), 3, 5, 4),
    "own lengths, hybrid": (dict(LLAMA, attention=(WINDOWED, SOFTMAX)), 6, 3, 2),
    "long cache": (dict(LLAMA, attention=(SOFTMAX, T2R)), 2, 2, 2),
    "many queries, long cache": (dict(LLAMA, heads=12, kv_heads=1, attention=(SOFTMAX, WINDOWED)), 2, 2, 2),
    "query norm": (dict(LLAMA, query_norm=True, attention=(T2R,), rope_size=8), 2, 2, 2),
    "two rotary bases": (dict(LLAMA, attention=(T2R, dataclasses.replace(T2R, rope_theta=100.0))), 2, 2, 2),
    "paper": (dict(PAPER, attention=(MERGED,)), 16, 3, 2),
    "paper, 75%": (dict(PAPER, attention=(MERGED, SOFTMAX)), 4, 2, 2),
    "norms after": (dict(PAPER, norm_placement="after", attention=(MERGED, T2R), activation="gelu"), 4, 2, 2),
    "gated GELU": (dict(PAPER, gated=True, activation="gelu_exact", attention=(T2R,)), 4, 2, 2),
    "wide": (dict(LLAMA, width=2112, feedforward=48, layers=1, attention=(T2R,)), 17, 2, 2),  # the stream in two rounds
    "large chunks": (dict(LLAMA, width=1152, feedforward=400, layers=1, attention=(WINDOWED,)), 3, 2, 2),
    "pairs of outputs": (dict(LLAMA, width=448, feedforward=400, attention=(T2R, SOFTMAX)), 5, 3, 2),
    "hedgehog": (dict(LLAMA, layers=3, attention=(HEDGEHOG, HEDGEHOG_WINDOWED, SOFTMAX)), 5, 3, 2),
    "few features": (dict(LLAMA, attention=(dataclasses.replace(T2R, features=4), WINDOWED)), 3, 2, 2),
}  # fmt: skip
TRANSLATION = dict(heads=2, head_dim=32, width=64, feedforward=128, layers=2, encoder_layers=1)
CROSS_CASES = {  # fields of a translation model, sentences, beams, clusters, ranks
    "paper": (dict(attention=(dataclasses.replace(MERGED, features=4),), cross_attention=(MERGED,)), 3, 1, 3, 4),
    "beams, not merged": (dict(norm_placement="before", attention=(WINDOWED, T2R), cross_attention=(T2R,)), 2, 3, 2, 2),
    "swish": (dict(activation="swish", attention=(SOFTMAX, MERGED), cross_attention=(T2R, MERGED)), 2, 1, 3, 2),
    "softmax, beams": (dict(attention=(T2R, WINDOWED), cross_attention=(SOFTMAX, T2R)), 2, 3, 5, 4),
    "all softmax": (dict(attention=(SOFTMAX,), cross_attention=(SOFTMAX,), activation="swish"), 3, 1, 3, 2),
}  # fmt: skip
needs_nvrtc = pytest.mark.skipif(cuda.nvrtc() is None, reason="needs NVRTC (nvidia-cuda-nvrtc)")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_equals_the_models_step(case, tmp_path):
    """For a batch of which one sequence has ended, after prompts longer than the window."""
    fields, batch, clusters, ranks = CASES[case]
    length = LONG_PROMPT if "long" in case else 7
    model = make_model(micro(**fields))
    half = with_arrays(make_model(micro(**fields, dtype="bfloat16")), arrays_of(model))
    tokens = random_tokens(batch, length)
    mask = jnp.arange(length) >= (jnp.arange(batch) % 4)[:, None]
    _, state = compiled(half)(tokens, half.init_state(batch, length + 5), mask)
    if "own lengths" in case:  # the last sequence's cache is full
        state = state._replace(layers=tuple(map(with_own_lengths, state.layers)))
    active = (jnp.arange(batch) != 1)[:, None]
    positions = state.position + active[:, 0] - 1
    hidden, expected = compiled(model)(tokens[:, :1], jax.tree.map(as_float, state), active)
    x = model.embed(tokens[:, :1], positions[:, None])[:, 0]
    out, states = run_emulated(tmp_path, model, x, state.layers, active[:, 0], positions, clusters, ranks)
    if model.config.norm_placement == "after":
        out = model.blocks[-1].feedforward_norm(jnp.asarray(out))
    rows = np.flatnonzero(active)
    assert error(out[rows] - x[rows], hidden[rows, 0] - x[rows]) < 0.01  # the kernel's matrices are in bfloat16
    for actual, wanted in zip(states, expected.layers):
        assert type(actual) is type(wanted)
        assert error(actual, wanted) < 0.01


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", CROSS_CASES)
def test_the_kernel_equals_the_step_of_translation(case, tmp_path):
    """Of several translations of each source, one of which has ended."""
    fields, sentences, beams, clusters, ranks = CROSS_CASES[case]
    fields, batch = TRANSLATION | fields, sentences * beams
    model = make_model(micro_mt(**fields))
    half = with_arrays(make_model(micro_mt(**fields, dtype="bfloat16")), arrays_of(model))
    tokens, sources = random_tokens(batch, 6, vocab=50), random_tokens(sentences, 5, 1, vocab=50)
    sources = sources.at[1, 3:].set(PADDING)
    encoded = jax.jit(lambda sources: source_states(half, sources))(sources)
    _, state = compiled(half)(tokens, half.init_state(batch, 9, encoded), jnp.ones(tokens.shape, bool))
    active = (jnp.arange(batch) != 1)[:, None]
    positions = state.position + active[:, 0] - 1
    hidden, expected = compiled(model)(tokens[:, :1], jax.tree.map(as_float, state), active)
    x = model.embed(tokens[:, :1], positions[:, None])[:, 0]
    arguments = (model, x, state.layers, active[:, 0], positions, clusters, ranks)
    out, states = run_emulated(tmp_path, *arguments, sources=encoded)
    if model.config.norm_placement == "after":
        out = model.blocks[-1].feedforward_norm(jnp.asarray(out))
    if model.final_norm is not None:
        out = model.final_norm(jnp.asarray(out))
    rows = np.flatnonzero(active)
    assert error(out[rows], hidden[rows, 0]) < 0.01
    for actual, wanted in zip(states, expected.layers):
        assert error(actual, wanted) < 0.01


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", ["llama", "norms after", "pairs of outputs", "large chunks"])
def test_8_bit_weights(case, tmp_path):
    """The kernel with 8-bit weights is as near to the model as their rounding, and nearer to the rounded model."""
    fields, batch, clusters, ranks = CASES[case]
    model = make_model(micro(**fields))
    rounded, half = for_decoding(model, "int8"), make_model(micro(**fields, dtype="bfloat16"))
    tokens = random_tokens(batch, 7)
    active = jnp.ones((batch, 1), bool)
    half = with_arrays(half, arrays_of(model))
    _, state = compiled(half)(tokens, half.init_state(batch, 12), jnp.ones(tokens.shape, bool))
    exact, _ = compiled(model)(tokens[:, :1], jax.tree.map(as_float, state), active)
    x = model.embed(tokens[:, :1], state.position[:, None])[:, 0]
    arguments = (x, state.layers, active[:, 0], state.position, clusters, ranks)
    kernel, _ = run_emulated(tmp_path, rounded, *arguments)
    if model.config.norm_placement == "after":
        kernel = model.blocks[-1].feedforward_norm(jnp.asarray(kernel))
    assert error(kernel - x, exact[:, 0] - x) < 0.03
    (tmp_path / "plain").mkdir()
    plain, _ = run_emulated(tmp_path / "plain", model, *arguments)
    assert layers_packing.pack(rounded, batch, all_layers.Grid(clusters, ranks)).tiles[0].dtype == jnp.int8
    assert error(kernel, plain) > 0  # it was not the same kernel


def as_float(x):
    """bfloat16 as float32; other types as they are."""
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def with_own_lengths(state):
    """A cache in which sequences have read different numbers of tokens; other states as they are."""
    if not isinstance(state, KVCache):
        return state
    batch, capacity = state.valid.shape
    index = (state.index - jnp.arange(batch) % 3).at[-1].set(capacity)
    return state._replace(index=index, valid=state.valid & (jnp.arange(capacity) < index[:, None]))


def compiled(model):
    """The model as one program, which is compiled faster than its operations one by one."""
    return jax.jit(lambda tokens, state, mask: model(tokens, state=state, mask=mask))


def run_emulated(folder, model, x, states, keep, positions, clusters, ranks, sources=()):
    """The results of the kernel on an emulated GPU, where each warp's ring of weights is as small as it may be."""
    batch, grid = len(x), all_layers.Grid(clusters, ranks, warps=4 + clusters, slots=3)
    count = len(sources[0][0]) if sources else None
    own_lengths = all_layers.have_own_lengths(states)
    macros = all_layers.definitions(model, batch, grid, source_count=count, own_lengths=own_lengths)
    layers = layers_packing.pack(model, batch, grid)
    arguments = all_layers.arguments(x, layers, states, keep, positions, model, grid, sources=sources)
    updated = emulate(folder, launch.source(*all_layers.PARTS), macros, *arguments, grid.blocks)
    out, new_states, _ = all_layers.results(updated, x.shape, states, all_layers.phases(model))
    return out, new_states


@pytest.mark.slow
@needs_nvrtc
def test_a_llama_with_a_window_lowers_for_gpus():
    """It is compiled from CUDA for 120 thread blocks, and all states are updated in place."""
    config = micro(**dict(LLAMA, width=192, head_dim=64, attention=(WINDOWED, SOFTMAX), dtype="bfloat16"))
    graph, arrays = nnx.split(abstract_model(config))

    def step(arrays):
        model = nnx.merge(graph, arrays)
        fast = fused_model.FusedModel(model, fused_model.pack_model(model, "all", 16))
        return fast(jnp.zeros((16, 1), jnp.int32), state=model.init_state(16, 8), mask=jnp.ones((16, 1), bool))

    text = jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.ptx") == 1 and "decode_step" in text
    assert text.count("#stablehlo.output_operand_alias") == 1 + 5 + 4  # the stream, a window, a cache


@pytest.mark.slow
@needs_nvrtc
def test_beams_of_a_translation_lower_for_gpus():
    """Three beams of each source; only the states of causal attention are updated in place."""
    fields = TRANSLATION | dict(attention=(MERGED,), cross_attention=(MERGED,), width=256, dtype="bfloat16")
    graph, arrays = nnx.split(abstract_model(micro_mt(**fields)))

    def step(arrays):
        model = nnx.merge(graph, arrays)
        fast = fused_model.FusedModel(model, fused_model.pack_model(model, "all", 6))
        state = model.init_state(6, 8, source_states(model, jnp.zeros((2, 5), jnp.int32)))
        return fast(jnp.zeros((6, 1), jnp.int32), state=state)

    text = jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.ptx") == 1
    assert text.count("#stablehlo.output_operand_alias") == 1 + 2 * 2  # the stream, and S and z of two layers


def test_no_cluster_has_two_heads_if_it_can_be_avoided():
    heads = {kv_heads: support.grid_for(abstract_model(micro(**dict(LLAMA, heads=kv_heads, kv_heads=kv_heads))))
             for kv_heads in (3, 15, 16, 30, 31)}  # fmt: skip
    assert [(grid.clusters, grid.ranks) for grid in heads.values()] == [(15, 8), (15, 8), (30, 4), (30, 4), (15, 8)]


def test_which_models_are_supported():
    for fields, *_ in CASES.values():
        assert not support.all_layers_problems(abstract_model(micro(**fields)))
    for fields, *_ in CROSS_CASES.values():
        assert not support.all_layers_problems(abstract_model(micro_mt(**TRANSLATION | fields)))
    supported = dict(LLAMA, attention=(T2R,))
    for fields in (
        dict(norm_placement="both"), dict(parallel=True), dict(head_dim=24), dict(width=40),
        dict(query_norm=True, query_norm_heads=True), dict(attention=(AttentionSpec("linear", "elu"),)),
        dict(attention=(T2R, HEDGEHOG)),
        dict(attention=(AttentionSpec("linear", "t2r", 6),)), dict(attention=(T2R, AttentionSpec(window=4))),
        dict(attention=(WINDOWED, dataclasses.replace(WINDOWED, window=4))),
    ):  # fmt: skip
        assert support.all_layers_problems(abstract_model(micro(**{**supported, **fields}))), fields


def test_it_runs_on_hopper_in_bfloat16(monkeypatch):
    monkeypatch.setattr(cuda, "clusters_at_once", lambda *sizes: 2 * support.CLUSTERS)
    half = dict(LLAMA, attention=(T2R,), dtype="bfloat16")
    hopper, ampere = Device("gpu", "NVIDIA H200", (9, 0)), Device("gpu", "NVIDIA A100", (8, 0))
    assert support.all_layers_available(abstract_model(micro(**half)), 32, hopper)
    assert not support.all_layers_available(abstract_model(micro(**half)), 33, hopper)
    assert not support.all_layers_available(abstract_model(micro(**half, kernels="on")), 16, ampere)
    assert not support.all_layers_available(abstract_model(micro(**half, kernels="off")), 16, hopper)
    assert not support.all_layers_available(abstract_model(micro(**dict(half, dtype="float32"))), 16, hopper)
    assert support.choice(abstract_model(micro(**half)), 16) is None  # on this machine


def test_it_is_used_by_itself_where_it_is_faster():
    smol = dict(LLAMA, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, feedforward=1536)
    llama = dict(LLAMA, layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, feedforward=8192)
    recurrent, softmax = AttentionSpec("linear", "t2r", 32), AttentionSpec()
    assert not support.all_layers_slower(micro(**smol, attention=(recurrent,) * 30))
    assert not support.all_layers_slower(micro(**smol, attention=(softmax,) * 8 + (recurrent,) * 22))
    assert not support.all_layers_slower(micro(**llama, attention=(recurrent,) * 16))
    (problem,) = support.all_layers_slower(micro(**dict(llama, feedforward=16384), attention=(recurrent,) * 16))
    assert "128 MiB of weights" in problem
    (problem,) = support.all_layers_slower(micro(**smol, attention=(softmax,) * 30))
    assert "softmax" in problem


def test_one_line_says_why_a_model_decodes_without_kernels(capsys):
    model = abstract_model(micro(**dict(LLAMA, width=40, heads=2, kv_heads=2, parallel=True)))
    for _ in range(2):
        assert not support.all_layers_available(model, 33, Device("gpu", "NVIDIA H200", (9, 0)))
    (line,) = (text for text in "".join(capsys.readouterr()).splitlines() if "without kernels" in text)
    for problem in ("parallel", "width is not a multiple of 16", "more than 32 sequences", "float32, not in bfloat16"):
        assert problem in line
