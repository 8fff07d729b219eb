"""Decoding benchmarks: the compared models, byte counts, predictions, and each command from end to end; not speed."""

import importlib.util
import json
import re

import jax
import pytest

from conftest import make_model, micro, micro_mt
from t2r.benchmark import decode, shared, steps
from t2r.benchmark.compile import topology_of
from t2r.benchmark.floor import (
    Machine,
    measure_machine,
    measured_crossover,
    predicted_crossover,
    step_cost,
)
from t2r.benchmark.models import VARIANTS, abstract_inference_model, converted, default_variants, label, random_model
from t2r.benchmark.shared import DoesNotFit
from t2r.benchmark.steps import Decoder, abstract_generation, attention_bytes, round_down
from t2r.environment import total_bytes
from t2r.errors import InputError
from t2r.model.config import AttentionSpec, preset
from t2r.model.parameters import arrays_of, parameter_count
from t2r.model.state_size import state_bytes

PAPER_LM = preset("paper_lm", vocab_size=32_768, adaptive_cutoffs=(), layers=2)  # of 32 equal ones
# Parameters of a layer without queries and keys: value and output projections, feed-forward, their biases, two norms.
LM_LAYER = 10 * 1024**2 + 2 * 1024 + 4096 + 1024 + 4 * 1024
MACHINE = Machine(bandwidth=1e12)


def abstract_variant(config, row):
    return abstract_inference_model(converted(config, row), "bfloat16")


def test_the_models_of_the_paper():
    """T2R 75% keeps every fourth layer from the top; translation has 32 features for cross, 4 for causal attention."""
    assert default_variants(PAPER_LM) == ["transformer", "t2r", "elu", "rfa", "t2r_75"]
    kept = [
        layer for layer, spec in enumerate(converted(preset("paper_lm"), "t2r_75").attention) if spec.kind == "softmax"
    ]
    assert kept == [3, 7, 11, 15, 19, 23, 27, 31]
    config = preset("paper_mt")
    assert default_variants(config) == ["transformer", "t2r", "elu", "rfa"]
    names = {row: label(row, converted(config, row)) for row in VARIANTS}
    assert names["t2r"] == "T2R 32-4" and names["rfa"] == "RFA 32-4" and names["elu"] == "ELU 64-64"
    kinds = {row: converted(config, row).attention[0].kind for row in VARIANTS}
    assert kinds["t2r"] == "merged" and kinds["t2r_unmerged"] == "linear"
    rotary = converted(micro(positions="rotary"), "t2r")
    assert rotary.attention[0].kind == "linear", "rotary positions cannot be merged"
    assert converted(rotary, "transformer").attention == converted(rotary, "transformer").replace().attention
    assert converted(rotary, "model") == rotary
    windowed = converted(config, "t2r_window")
    assert {(spec.kind, spec.window, spec.sinks) for spec in windowed.attention} == {("windowed", 32, 4)}
    assert {spec.kind for spec in windowed.cross_attention} == {"linear"}
    for row in ("transformer", "t2r"):  # the window belongs to the conversion
        assert converted(windowed, row) == converted(config, row)
    sliding = micro(attention=(AttentionSpec(window=5),))
    assert converted(sliding, "transformer") == sliding, "a sliding window belongs to the transformer"


@pytest.mark.parametrize(
    "name, parameters, kept", [("smollm2_135m", 134_515_008, [5, 13, 21, 29]), ("llama_1b", 1_235_814_400, [7, 15])]
)
def test_the_models_that_people_have(name, parameters, kept):
    """As many parameters as the published models; of the hybrid, every eighth layer is softmax."""
    config = preset(name)
    assert parameter_count(arrays_of(abstract_inference_model(config, "bfloat16"))) == parameters
    assert default_variants(config) == ["transformer", "t2r", "t2r_window", "t2r_hybrid"]
    hybrid = converted(config, "t2r_hybrid", window=16).attention
    assert [layer for layer, spec in enumerate(hybrid) if spec.kind == "softmax"] == kept
    assert {(spec.features, spec.window, spec.sinks) for spec in hybrid if spec.kind == "windowed"} == {(32, 16, 4)}
    kinds = [spec.kind for spec in converted(config, "t2r_hybrid_4th").attention]
    assert (kinds.count("softmax"), kinds[-1], kinds[-2]) == (2 * len(kept), "softmax", "windowed")


@pytest.mark.parametrize(
    "row, weights, read, written",
    [
        # Queries and keys are 8 · 128 wide; the cache has 2 · 1,024 values and a mask byte for each token.
        ("transformer", 2 * 1024**2 + 2 * 1024, 700 * (2 * 1024 * 2 + 1), 2 * 1024 * 2 + 1),
        # Queries and keys are 8 · 32 wide; S and z have 8 · 32 · 129 values of 4 bytes, all of them written back.
        ("t2r", 2 * 1024 * 256 + 2 * 256, 8 * 32 * 129 * 4, 8 * 32 * 129 * 4),
        ("elu", 2 * 1024**2 + 2 * 1024, 8 * 128 * 129 * 4, 8 * 128 * 129 * 4),
        ("rfa", 2 * 1024**2 + 2 * 1024 + 16 * 128 + 8 * 128, 8 * 32 * 129 * 4, 8 * 32 * 129 * 4),
        # φ is not merged; the mixture has 8 · 129 values. Also read: 36 keys and values; written: one of each; a count.
        (
            "t2r_window",
            2 * 1024**2 + 2 * 1024 + 8 * 32 * 129 + 8 * 129,
            8 * 32 * 129 * 4 + 36 * 2 * 1024 * 2 + 4,
            8 * 32 * 129 * 4 + 2 * 1024 * 2 + 4,
        ),
    ],
)
def test_bytes_of_a_step_of_the_papers_language_model_by_hand(row, weights, read, written):
    step = step_cost(abstract_variant(PAPER_LM, row), 16, 700)
    assert step.weight_bytes == 2 * (2 * (LM_LAYER + weights) + 32_768 * 1024)
    assert step.read_bytes == 16 * 2 * read and step.written_bytes == 16 * 2 * written
    assert step.floor(MACHINE) == step.bytes / 1e12
    assert step.least_seconds(MACHINE._replace(flops=1.0)) == step.flops


def test_a_translation_step_reads_the_source_state_but_not_the_encoder():
    config = preset("paper_mt", layers=1, encoder_layers=1)  # of 6 equal ones
    step = step_cost(abstract_variant(config, "t2r"), 16, 100, 100)
    # Causal: values, outputs, queries and keys of 16 · 4 features. Cross: queries of 16 · 32 features, outputs.
    projections = 3 * 1024**2 + 2 * 1024 * 64 + 1024 * 512
    biases = 3 * 1024 + 2 * 64 + 512 + 4096 + 1024 + 6 * 1024  # the last are norms
    assert step.weight_bytes == 2 * (projections + 8 * 1024**2 + biases + 32_768 * 1024)
    causal, cross = 16 * 16 * 4 * 65 * 4, 16 * 16 * 32 * 65 * 4
    assert step.read_bytes == causal + cross and step.written_bytes == causal
    sizes = {
        row: state_bytes(abstract_variant(config, row).config, 16, 512, 512) for row in ("transformer", "t2r", "elu")
    }
    assert sizes["t2r"] == causal + cross < 0.3 * sizes["elu"], "the paper's 70%"
    assert sizes["transformer"] == 16 * 2 * 512 * (2 * 1024 * 2 + 1)


@pytest.mark.parametrize("row", list(VARIANTS))
@pytest.mark.parametrize("config", [micro(kv_heads=1), micro_mt()], ids=["language model", "translation"])
def test_the_formula_gives_the_size_of_the_state(config, row):
    model = abstract_variant(config, row)
    counted = attention_bytes(abstract_generation(model, 3, 40).state)
    assert counted == state_bytes(model.config, 3, 40, 40 if config.encoder_layers else 0)


def test_the_formula_gives_the_size_of_a_window_with_a_scale_in_float32():
    model = make_model(micro(attention=(AttentionSpec("windowed", "performer", 8, window=5, sinks=2),)))
    assert state_bytes(model.config, 3, 40) == total_bytes(model.init_state(3, 40).layers)


def test_the_crossover_is_where_the_bytes_are_equal():
    """T2R has fewer weights, and reads and writes its state; the transformer reads one more cache slot per token."""
    transformer, t2r, elu = (abstract_variant(PAPER_LM, row) for row in ("transformer", "t2r", "elu"))
    fewer = 2 * 2 * 2 * (1024 + 1) * (1024 - 256)
    state, slot = 16 * 2 * 8 * 32 * 129 * 4, 16 * 2 * (2 * 1024 * 2 + 1)
    assert predicted_crossover(transformer, t2r, 16, MACHINE) == (2 * state - fewer - slot) // slot + 1
    assert predicted_crossover(transformer, elu, 16, MACHINE) == (2 * 4 * state - slot) // slot + 1
    assert predicted_crossover(t2r, elu, 16, MACHINE) is None
    assert measured_crossover({100: 1.0, 200: 3.0}, {100: 2.0, 200: 2.0}) == pytest.approx(150)
    assert measured_crossover({100: 3.0}, {100: 2.0}) == "below 100"
    assert measured_crossover({1: 3.0, 100: 1.0, 200: 3.0}, {1: 2.0, 100: 2.0, 200: 2.0}) == pytest.approx(150)
    assert measured_crossover({32: 3.0, 64: 1.0}, {32: 2.0, 64: 2.0}) == "above 64"
    assert measured_crossover({100: 1.0, 300: 1.5}, {100: 2.0, 200: 2.0}) == "above 100"


def test_the_largest_batch_fits_where_the_next_does_not(monkeypatch):
    decoder = Decoder(random_model(converted(micro(), "transformer"), "float32"), repeat_for=0)
    assert [round_down(count) for count in (0, 7, 100, 28_731)] == [0, 7, 96, 28_672]

    def set_memory(free):
        for module in (shared, steps):
            monkeypatch.setattr(module, "available_memory", lambda: free)

    free = shared.peak_bytes(decoder.program(16, 32, 4)[0])
    set_memory(free)
    speed, predicted = decoder.largest_batch(32, 4)
    assert 8 <= speed.batch <= predicted <= 24 and speed.steps == 4
    set_memory(1000)
    with pytest.raises(DoesNotFit):
        decoder.largest_batch(32, 4)


@pytest.fixture
def quick_bandwidth(monkeypatch):
    monkeypatch.setattr(decode, "measure_machine", lambda: measure_machine(2**16))


def test_decode_measures_and_resumes(call, tmp_path, quick_bandwidth):
    flags = ["--preset=micro_lm", "--dtype=float32", "--batch=2", "--seconds=0", "--steps=2", f"--output={tmp_path}"]
    flags += ["--rows=transformer,t2r,t2r_window", "--field=vocab_size=64", "--field=adaptive_cutoffs=()"]
    status, first = call("benchmark", "decode", *flags, "--lengths=8", "--device_report")
    assert status == 0 and first["tokens_per_second"]["t2r"]["8"] > 0 and first["bandwidth"] > 0
    assert {"predicted", "found"} == first["crossover"]["t2r"].keys()
    lines = (tmp_path / "decode.jsonl").read_text()
    with (tmp_path / "decode.jsonl").open("a") as file:
        file.write('{"asked": {"wh')  # killed while it wrote
    status, again = call("benchmark", "decode", *flags, "--lengths=8,16", "--budget_seconds=1e-9")
    assert status == 0 and again["tokens_per_second"] == first["tokens_per_second"] and again["left_out"] == 3
    assert (tmp_path / "decode.jsonl").read_text().startswith(lines)
    content = json.loads((tmp_path / "decode.json").read_text())
    assert content["environment"]["versions"]["jax"] == jax.__version__ and len(content["lines"]) == 4
    assert (tmp_path / "decode.png").exists() and (tmp_path / "decode.svg").exists()


def test_results_of_something_else_are_not_replaced(call, tmp_path):
    (tmp_path / "decode.json").write_text('{"mine": 1}')
    status, printed = call("benchmark", "decode", "--preset=micro_lm", "--lengths=8", f"--output={tmp_path}")
    assert status == 2 and "decode.json was not written by this benchmark, and would be replaced" in printed
    assert (tmp_path / "decode.json").read_text() == '{"mine": 1}'


def test_decode_measures_8_bit_weights_beside_others(call, quick_bandwidth):
    flags = ["--preset=micro_llama", "--dtype=float32", "--batch=2", "--seconds=0", "--steps=2", "--lengths=8"]
    status, result = call("benchmark", "decode", *flags, "--rows=transformer,t2r", "--weights=float32,int8")
    rows = {"transformer", "transformer_int8", "t2r", "t2r_int8"}
    assert status == 0 and result["tokens_per_second"].keys() == result["fraction_of_floor"].keys() == rows


def test_the_floor_of_8_bit_weights_is_a_byte_for_each_and_the_scales():
    config = converted(preset("micro_llama", vocab_size=128), "t2r")
    plain, rounded = (step_cost(abstract_inference_model(config, "bfloat16", kind), 4, 8) for kind in ("", "int8"))
    # A layer's outputs (queries, keys and values, attention, feed-forward) and inputs; φ and norms stay in bfloat16.
    outputs = 2 * (32 + 2 * 16 + 32 + 2 * 64 + 32) + 128
    matrices = 2 * (32 * (32 + 2 * 16 + 32 + 3 * 64)) + 128 * 32
    assert plain.weight_bytes - rounded.weight_bytes == matrices - 4 * outputs
    assert plain.flops == rounded.flops and plain.read_bytes == rounded.read_bytes


def test_encoding_is_measured_separately(call, quick_bandwidth):
    flags = ["--preset=micro_mt", "--dtype=float32", "--batch=2", "--seconds=0", "--lengths=8", "--rows=t2r", "--whole"]
    status, result = call("benchmark", "decode", *flags)
    assert status == 0 and result["prefill_tokens_per_second"]["t2r"]["8"] > 0


@pytest.mark.parametrize("row", ["transformer", "t2r"])
def test_steps_of_beam_search_are_measured_beside_greedy_steps(call, quick_bandwidth, row):
    flags = ["--preset=micro_mt", "--dtype=float32", "--batch=5", "--seconds=0", "--lengths=8", f"--rows={row}"]
    status, result = call("benchmark", "decode", *flags, "--beam=2", "--steps=4")
    assert status == 0 and result["beam_over_greedy"][row]["8"] > 0


def test_memory_is_counted_three_ways(call, tmp_path):
    rows = "--rows=transformer,t2r,t2r_window"
    flags = ["--preset=micro_mt", "--dtype=float32", "--batch=2", rows, f"--output={tmp_path}"]
    status, result = call("benchmark", "memory", *flags, "--lengths=8")
    assert status == 0 and result["state_bytes"] == result["formula_bytes"]
    for row, sizes in result["program_state_bytes"].items():
        assert 0 <= sizes["8"] - result["state_bytes"][row]["8"] < 200, "counters, the last tokens and a random key"
    assert (tmp_path / "memory.png").exists()


def test_attention_is_measured_forward_and_backward(call, tmp_path):
    flags = ["--tokens=32", "--lengths=16", "--heads=2", "--head_dim=8", "--features=4", "--dtype=float32"]
    flags += ["--seconds=0", "--forms=t2r,softmax,t2r_dropout", f"--output={tmp_path}"]
    status, result = call("benchmark", "attention", *flags)
    assert status == 0 and set(result["speedup_over_softmax"]) == {"forward", "forward and backward"}
    forms = {"t2r", "softmax", "t2r_dropout"}
    assert all(set(times) == forms for times in result["milliseconds"].values())
    assert len(result["plots"]) == 4


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "name one architecture"),
        (["--preset=micro_lm", "--rows=t2r,gru,lstm"], "'gru'.*\n.*'lstm'"),
        (["--preset=micro_lm", "--field=vocab_size"], "NAME=VALUE"),
        (["--preset=micro_lm", "--field=vocab=3"], "unknown field 'vocab'"),
        (["--preset=micro_lm", "--field=layers=many"], "layers='many' must be of type int"),
        (["--preset=micro_lm", "--lengths=8,many"], "whole numbers"),
        (["--preset=micro_lm", "--weights=float32,int4"], "--weights=float32, int4: choose from bfloat16.* int8"),
        (["--preset=micro_lm", "--peers", "--peer_names=vllm"], "--peer_names=vllm: choose from hugging_face"),
        (["--preset=micro_lm", "--topology=v1:2x2"], "known TPUs: v2"),
        (["--preset=micro_lm", "--beam=40", "--topology=v2:2x2"], "not estimated.*\n.*language model.*\n.*--batch=40"),
        (["--preset=micro_mt", "--beam=-1"], "beam"),
        (["--preset=micro_mt", "--prompt=5"], "--prompt=5 is for language models"),
        (["--preset=micro_lm", "--peer_lengths=8", "--mesh=data=2"], "--peer_lengths needs --peers(.|\n)*--topology"),
        (["--preset=micro_lm", "--model=builtin:stories"], "not both --preset=micro_lm and --model=builtin:stories"),
    ],
)
def test_bad_flags_get_a_clear_error(call, flags, message):
    status, printed = call("benchmark", "decode", *flags)
    assert status == 2 and re.search(message, printed), printed


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler, libtpu, is not installed")
def test_decoding_compiles_for_a_real_tpu(call):
    flags = ["--preset=micro_mt", "--rows=transformer,t2r", "--lengths=128", "--topology=v2:2x2"]
    status, result = call("benchmark", "decode", *flags)
    assert status == 0 and all(speed["128"] > 0 for speed in result["tokens_per_second"].values())


@pytest.mark.parametrize(
    "name, topology",
    [
        ("v2-8", "v2:2x2"), ("v3-8", "v3:2x2"), ("v3-32", "v3:4x4"), ("v4-8", "v4:2x2x1"), ("v4-16", "v4:2x2x2"),
        ("v4-64", "v4:2x4x4"), ("v5p-8", "v5p:2x2x1"), ("v5p-128", "v5p:4x4x4"), ("v5litepod-8", "v5e:2x4"),
        ("v5litepod-256", "v5e:16x16"), ("v6e-4", "v6e:2x2"), ("v6e-32", "v6e:4x8"), ("v5e:4x4", "v5e:4x4"),
    ],
)  # fmt: skip
def test_slices_have_the_shapes_of_google_cloud(name, topology):
    assert topology_of(name) == topology


@pytest.mark.parametrize("name", ["v5litepod-7", "v5litepod-1", "v2-7", "v7-8", "v5e", "", "v4-12", "v1:2x2", "v2-8:2"])
def test_slices_that_do_not_exist_are_refused(name):
    with pytest.raises(InputError, match=r"known TPUs: v2(.|\n)*v5litepod-4"):
        topology_of(name)
