"""Other libraries in the same run: models of the same size, and what is said when one is missing; not their speed."""

import importlib.util
import json

import pytest

from t2r.benchmark import decode, peers
from t2r.benchmark.floor import measure_machine
from t2r.benchmark.models import abstract_inference_model
from t2r.model.config import preset
from t2r.model.parameters import arrays_of, parameter_count

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


def test_a_library_that_is_missing_is_one_line(call, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "measure_machine", lambda: measure_machine(2**16))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    flags = ["--preset=micro_llama", "--dtype=float32", "--batch=1", "--seconds=0", "--steps=2", "--rows=t2r"]
    flags += ["--lengths=4", "--peers", "--peer_names=flash_linear_attention", f"--output={tmp_path}"]
    status, _ = call("benchmark", "decode", *flags)
    notes = json.loads((tmp_path / "decode.json").read_text())["notes"]
    assert status == 0 and notes == ["flash_linear_attention is skipped: torch and fla cannot be imported"]
