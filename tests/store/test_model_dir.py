"""Model directories: saving and loading is lossless, and damaged ones are refused with a clear error."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import WINDOW, make_model, micro, random_tokens
from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.model.parameters import arrays_of, with_arrays
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from t2r.training.config import load_config


@pytest.fixture
def saved(tmp_path, tokenizer):
    model = make_model(micro(vocab_size=300))
    path = tmp_path / "model"
    model_dir.save(path, LoadedModel(model, tokenizer, {"history": [{"action": "test"}]}))
    return path, model


@pytest.mark.parametrize(
    "kind", ["softmax", "t2r", "elu", "rfa", "performer", "merged", "hybrid", "windowed", "windowed_hybrid"]
)
def test_every_kind_of_model_is_saved_and_loaded(kind, tmp_path, tokenizer):
    model = make_model(micro(vocab_size=300))
    if kind != "softmax":
        name = kind if kind in ("elu", "rfa", "performer") else "t2r"
        window = WINDOW if kind.startswith("windowed") else {}
        keep = "0" if kind.endswith("hybrid") else "none"
        model = swap(model, feature_map=name, features=None if name == "elu" else 8, keep=keep, **window)
    model = merge(model) if kind == "merged" else model
    model_dir.save(tmp_path / "m", LoadedModel(model, tokenizer, {"history": []}))
    loaded = model_dir.load(tmp_path / "m")
    tokens = random_tokens(2, 8)
    assert loaded.model.config == model.config
    np.testing.assert_array_equal(*(jax.jit(lambda m=m: m(tokens)[0])() for m in (loaded.model, model)))
    assert loaded.tokenizer.encode("The old boat") == tokenizer.encode("The old boat")


def test_weights_that_are_not_numbers_are_refused(tmp_path, tokenizer):
    model = make_model(micro(vocab_size=300, layers=1, adaptive_cutoffs=()))
    arrays = arrays_of(model)
    name = "blocks.0.feedforward.up.kernel"
    broken = with_arrays(model, {**arrays, name: arrays[name].at[0, 0].set(jnp.nan)})
    model_dir.save(tmp_path / "model", LoadedModel(broken, tokenizer, {"history": []}))
    with pytest.raises(InputError, match=rf"not numbers:(.|\n)*{name}"):
        model_dir.load(tmp_path / "model")


def test_half_precision_weights_are_loaded_as_float32(tmp_path, tokenizer):
    model = make_model(micro(vocab_size=300))
    model_dir.save(tmp_path / "m", LoadedModel(model, tokenizer, {"history": []}), dtype="float16")
    loaded = model_dir.load(tmp_path / "m").model
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model_dir.arrays_of(loaded))} == {"float32"}
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert size < 2.2 * sum(leaf.size for leaf in jax.tree.leaves(model_dir.arrays_of(loaded))) + 4000


def test_runtime_fields_can_be_set_and_others_cannot(saved):
    path, _ = saved
    assert model_dir.load(path, dtype="bfloat16", dropout=0.3).model.config.dropout == 0.3
    with pytest.raises(InputError, match=r"model.layers cannot be set"):
        model_dir.load(path, layers=3)


def test_an_existing_directory_is_overwritten_only_with_replace(saved, tokenizer):
    path, model = saved
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="exists already"):
        model_dir.save(path, LoadedModel(model, tokenizer, {"history": []}))
    assert (path / "model.safetensors").read_bytes() == before
    model_dir.save(path, LoadedModel(model, tokenizer, {"history": [1]}), replace=True)
    assert json.loads((path / "provenance.json").read_text()) == {"history": [1]}
    assert [p.name for p in path.parent.iterdir()] == ["model"], "no temporary directory is left"


def test_missing_weights(saved):
    path, _ = saved
    (path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no .*model\.safetensors"):
        model_dir.load(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(saved, share):
    path, _ = saved
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(InputError, match="damaged or cut short"):
        model_dir.load(path)


def test_all_wrong_tensors_are_listed_at_once(saved):
    path, _ = saved
    arrays = load_file(path / "model.safetensors")
    arrays["blocks.0.attention.query.kernel"] = np.zeros((3, 3), np.float32)
    arrays["blocks.1.feedforward.up.bias"] = np.zeros(5, np.float32)
    arrays["extra.weight"] = np.zeros(1, np.float32)
    del arrays["blocks.1.attention.out.bias"]
    save_file(arrays, path / "model.safetensors")
    with pytest.raises(InputError) as raised:
        model_dir.load(path)
    message = str(raised.value)
    assert "blocks.0.attention.query.kernel has shape (3, 3), the config needs (32, 2, 16)" in message
    assert "blocks.1.feedforward.up.bias has shape (5,)" in message
    assert "extra.weight is unknown" in message and "blocks.1.attention.out.bias is missing" in message


def test_other_directories_are_refused(tmp_path, saved):
    with pytest.raises(InputError, match="give a t2r model directory"):
        model_dir.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="builtin:tiny_lm"):
        model_dir.load("builtin:huge_lm")
    path, _ = saved
    (path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="not a t2r model directory"):
        model_dir.load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        model_dir.load(path)


@pytest.mark.parametrize("name, data", [("tiny_lm", "builtin:pydoc"), ("stories", "text:stories.txt")])
def test_models_that_ship_are_small_and_have_their_provenance(name, data):
    path = model_dir.resolve(f"builtin:{name}")
    assert sum(file.stat().st_size for file in path.iterdir()) < 8_000_000
    entry = model_dir.load(path).provenance["history"][0]
    assert entry["action"] == "train" and entry["config"]["data"]["source"] == data
    assert entry["environment"]["device"] and entry["valid_perplexity"] > 1


def test_the_config_that_trained_the_stories_model_is_the_one_that_ships():
    entry = model_dir.load("builtin:stories").provenance["history"][0]
    for name in ("steps", "data", "model", "optimizer"):
        used, shipped = entry["config"][name], load_config("stories:transformer")[name]
        assert used == shipped if name == "steps" else used.items() <= dict(shipped).items(), name
    assert "51,938 stories written by stories15M" in entry["data"] and "MIT" in entry["data"]
