"""Other libraries in the same run: models of the same size, and what is said when one is missing; not their speed."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import t2r
from t2r.benchmark import decode, peers
from t2r.benchmark.floor import measure_machine
from t2r.benchmark.models import abstract_inference_model, make_request
from t2r.model.config import preset
from t2r.model.parameters import arrays_of, parameter_count
from tests.commands.test_import import with_tokenizer
from tests.importers.make_references import FOLDER

LIBRARIES = ("torch", "transformers")
needs_hugging_face = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in LIBRARIES), reason="torch or transformers is not installed"
)


@needs_hugging_face
@pytest.mark.parametrize("name", ["smollm2_135m", "llama_1b", "micro_llama"])
def test_hugging_faces_llama_has_as_many_parameters(name):
    import torch

    config = preset(name)
    with torch.device("meta"):
        model = peers._softmax_model(config, 512)
    counted = sum(weight.numel() for weight in model.parameters())
    assert counted == parameter_count(arrays_of(abstract_inference_model(config, "bfloat16")))


@needs_hugging_face
def test_hugging_faces_translation_model_has_as_many_heads():
    model = peers._softmax_model(preset("micro_mt"), 16)
    assert model.config.encoder_attention_heads == model.config.decoder_attention_heads == preset("micro_mt").heads


@pytest.mark.slow
@needs_hugging_face
def test_peers_are_measured_beside_our_models(call, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "measure_machine", lambda: measure_machine(2**16))
    flags = ["--preset=micro_llama", "--dtype=float32", "--batch=2", "--seconds=0", "--steps=2", "--rows=t2r"]
    flags += ["--lengths=8,16", "--peers", "--peer_lengths=8,16", f"--output={tmp_path}"]
    status, result = call("benchmark", "decode", *flags)
    notes = json.loads((tmp_path / "decode.json").read_text())["notes"]
    assert status == 0, notes
    for name in ("hugging_face", "hugging_face_static"):
        assert result["peers_tokens_per_second"][name].keys() == {"8", "16"}, notes


@pytest.mark.parametrize(
    "name, note",
    [
        ("flash_linear_attention", "flash_linear_attention is skipped: torch and fla cannot be imported"),
        ("llama_cpp", "llama_cpp is skipped: it reads a GGUF file only, --peer_model=FILE"),
    ],
)
def test_a_library_that_cannot_run_is_one_line(name, note, call, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "measure_machine", lambda: measure_machine(2**16))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: "here" if name == "llama_cpp" else None)
    flags = ["--preset=micro_llama", "--dtype=float32", "--batch=1", "--seconds=0", "--steps=2", "--rows=t2r"]
    flags += ["--lengths=4", "--peers", f"--peer_names={name}", f"--output={tmp_path}"]
    status, _ = call("benchmark", "decode", *flags)
    notes = json.loads((tmp_path / "decode.json").read_text())["notes"]
    assert status == 0 and notes == [note]


@pytest.mark.slow
@needs_hugging_face
def test_hugging_face_generates_the_same_tokens_from_the_same_weights(call, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "measure_machine", lambda: measure_machine(2**16))
    original = shutil.copytree(FOLDER / "llama", tmp_path / "original")
    with_tokenizer(original)
    status, _ = call("import", f"--source={original}", f"--output={tmp_path / 'model'}")
    assert status == 0
    flags = [f"--model={tmp_path / 'model'}", "--dtype=float32", "--batch=2", "--seconds=0", "--steps=2"]
    flags += ["--lengths=16", "--peers", "--peer_lengths=16,60", "--peer_names=hugging_face,hugging_face_static"]
    flags += ["--rows=t2r_hybrid", f"--peer_model={original}", f"--output={tmp_path / 'out'}"]
    status, _ = call("benchmark", "decode", *flags)
    written = json.loads((tmp_path / "out" / "decode.json").read_text())
    lines = [line for line in written["lines"] if line["asked"]["what"] == "peer"]
    assert status == 0 and len(lines) == 4, written["notes"]
    for line in lines:
        compared = min(line["asked"]["length"], peers.COMPARED)
        assert (line["same_tokens"], line["compared_tokens"]) == (compared, compared)

    settings = {"eos_token_id": 2, "repetition_penalty": 1.7, "use_cache": False}
    (original / "generation_config.json").write_text(json.dumps(settings))
    status, result = call("benchmark", "decode", *flags, "--again")
    assert status == 0 and result["peers_same_tokens"]["hugging_face"] == {"16": 16, "60": 60}

    arrays = load_file(original / "model.safetensors")
    arrays["model.norm.weight"][3] += 1
    save_file(arrays, original / "model.safetensors", {"format": "pt"})
    status, error = call("benchmark", "decode", *flags)
    assert status == 2 and "1 of 21 arrays have other values, such as final_norm.scale" in error, error
    settings = json.loads((original / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (original / "config.json").write_text(json.dumps(settings))
    status, error = call("benchmark", "decode", *flags)
    assert status == 2 and "norm_eps is 0.001 there, and 1e-06 in" in error, error


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_llama_cpp_generates_the_same_tokens_from_the_same_file(batch, call, tmp_path, monkeypatch):
    """With several sequences it is skipped, and says so."""
    pytest.importorskip("gguf")
    if batch == 1:
        pytest.importorskip("llama_cpp")
    from tests.importers.gguf_files import TOKENIZER, read_folder, write

    monkeypatch.setattr(decode, "measure_machine", lambda: measure_machine(2**16))
    monkeypatch.setattr(peers, "_absent", lambda *names: False)
    architecture, metadata, tensors = read_folder(FOLDER / "llama")
    tokens = TOKENIZER["tokens"] + [f"word{i}" for i in range(4, metadata["vocab_size"])]  # llama.cpp counts them
    tokenizer = TOKENIZER | {"tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1)}
    original = write(tmp_path / "model.gguf", architecture, metadata, tensors, tokenizer)
    assert call("import", f"--source={original}", f"--output={tmp_path / 'model'}")[0] == 0
    flags = [f"--model={tmp_path / 'model'}", "--dtype=float32", f"--batch={batch}", "--seconds=0", "--steps=2"]
    flags += ["--lengths=16", "--peers", "--peer_lengths=16,60", "--peer_names=llama_cpp", "--rows=transformer"]
    status, result = call("benchmark", "decode", *flags, f"--peer_model={original}", f"--output={tmp_path / 'out'}")
    notes = json.loads((tmp_path / "out" / "decode.json").read_text())["notes"]
    if batch == 1:
        assert status == 0 and result["peers_same_tokens"]["llama_cpp"] == {"16": 16, "60": 60}, notes
    else:
        assert status == 0
        assert notes == ["llama_cpp is skipped: it is measured with one sequence, --batch=1, not 2"]


@pytest.mark.parametrize("rows", [["t2r", "t2r_unmerged", "t2r_75"], ["transformer", "model"]])
def test_rows_have_the_weights_of_the_transformer(rows, tmp_path):
    """Not those that φ is merged into, whose shape is another."""
    transformer = t2r.load("builtin:stories")
    t2r.save(transformer, tmp_path / "model")
    request = make_request(model=str(tmp_path / "model"), rows=rows, lengths=[4], dtype="float32")
    expected = arrays_of(transformer.model)
    for name in rows:
        model = request._replace(own_weights=True).model(name)
        merged = {layer for layer, spec in enumerate(model.config.attention) if spec.kind == "merged"}
        for path, array in arrays_of(model).items():
            layer, of_queries = path.split(".")[1], ".query." in path or ".key." in path
            new = "feature_map" in path or (of_queries and layer.isdigit() and int(layer) in merged)
            assert new or np.array_equal(array, expected[path]), path
        assert not np.array_equal(arrays_of(request.model(name))["embedding.table"], expected["embedding.table"])


def test_an_original_needs_the_model_that_was_imported_from_it(call, tmp_path):
    flags = ["--lengths=4", "--peers", f"--peer_model={tmp_path / 'none'}"]
    status, error = call("benchmark", "decode", "--preset=micro_mt", "--peer_names=vllm", *flags)
    assert status == 2
    for problem in ("vllm", "--model=DIRECTORY, instead of a preset", "t2r benchmark translate", "does not exist"):
        assert problem in error, error
    status, error = call("benchmark", "decode", "--preset=micro_lm", "--lengths=4", "--peer_model=x")
    assert status == 2 and "--peer_model needs --peers" in error
    flags = ["--lengths=4", f"--peer_model={tmp_path}", "--peers", "--peer_names="]
    status, error = call("benchmark", "decode", "--model=builtin:stories", "--field=dropout=0.5", *flags)
    assert status == 2
    for problem in ("--peer_names is empty", "--field=dropout=0.5 makes", "has no config.json"):
        assert problem in error, error


def test_other_libraries_need_positions_and_a_device(call):
    flags = ["--preset=micro_lm", "--lengths=4", "--peers", "--field=positions=learned", "--field=max_positions=64"]
    status, error = call("benchmark", "decode", *flags, "--peer_lengths=8,65")
    assert status == 2 and "--peer_lengths=65: this model has positions for 64 tokens" in error
    status, error = call("benchmark", "decode", *flags, "--topology=v2:2x2")
    assert status == 2 and "--peers measures, and --topology only compiles" in error
