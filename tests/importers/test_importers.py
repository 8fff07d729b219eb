"""Imported models equal the original library's, in logits and in generation; and they can be converted."""

import importlib.util
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import WINDOW, error, slow_but
from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.decode.generate import generate_tokens, prefill, prefill_translation
from t2r.errors import InputError
from t2r.evaluation.logits import logits_of
from t2r.importers import hugging_face
from t2r.model.parameters import abstract_model, with_arrays
from t2r.store.tensors import Tensors
from tests.importers.make_references import CASES, FOLDER, make


def load(folder):
    config, arrays, original = hugging_face.load_checkpoint(folder)
    return with_arrays(abstract_model(config), jax.tree.map(jnp.asarray, arrays)), original


def compare(folder):
    """Compares logits of a forward pass, and greedy generation token by token."""
    model, original = load(folder)
    reference = dict(np.load(folder / "reference.npz"))
    logits, greedy = reference.pop("logits"), reference.pop("greedy").tolist()
    assert error(logits_of(model, reference), logits) < 1e-6
    ids = reference["input_ids"][:1]
    if model.config.encoder_layers:
        generation, prompt_length = prefill_translation(model, ids, 8, start=original["decoder_start_token_id"]), 1
    else:
        generation, prompt_length = prefill(model, ids.tolist(), 8), ids.shape[1]
    _, sequences = generate_tokens(model, generation, 8, end=original["eos_token_id"])
    expected = greedy[prompt_length:]
    assert sequences[0] == (expected[: expected.index(2)] if 2 in expected else expected)


NEW = [
    "phi3_long", "olmo2", "granite", "smollm3", "gemma", "stablelm_parallel", "gptj", "falcon_new", "pegasus", "m2m100",
]  # fmt: skip
QUICK = ("llama3", "mistral", "gemma3", "gpt2", "gpt_neox", "opt", "marian", "olmo2", "gptj")


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_an_imported_model_equals_the_original(name):
    compare(FOLDER / name)


@pytest.mark.skipif(
    not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")),
    reason="torch and transformers are not installed; the committed references are compared above",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt_neox", "marian", *NEW])
def test_an_imported_model_equals_the_original_live(name, tmp_path):
    make(name, tmp_path, seed=1)
    compare(tmp_path)


CONVERTED = ["mistral", "qwen2", "gemma3", "gpt2", "gpt_neox", "opt", "marian", "bart", "mbart", *NEW]


@pytest.mark.parametrize(
    ("name", "window"),
    slow_but([(name, window) for window in ({}, WINDOW) for name in CONVERTED], ("gpt2", {}), ("marian", {})),
    ids=lambda value: value if isinstance(value, str) else "windowed" if value else "linear",
)
def test_every_family_converts(name, window):
    """The converted model gives the same outputs at once and in pieces; merging is refused with rotary positions, and
    with a window."""
    model, _ = load(FOLDER / name)
    converted = swap(model, feature_map="t2r", features=4, **window)
    ids = jnp.asarray(np.load(FOLDER / name / "reference.npz")["input_ids"], jnp.int32)

    @jax.jit
    def run(model):
        source = model.source_states(ids, jnp.ones(ids.shape, bool)) if model.config.encoder_layers else None
        state, pieces = model.init_state(len(ids), 12, source), []
        for piece in (ids[:, :7], ids[:, 7:]):
            out, state = model(piece, state=state)
            pieces.append(out)
        return model(ids, source=source)[0], jnp.concatenate(pieces, 1)

    whole, pieces = run(converted)
    assert error(pieces, whole) < 1e-5
    if window:
        assert {spec.kind for spec in converted.config.attention} == {"windowed"}
        with pytest.raises(InputError, match="attention with a window"):
            merge(converted)
    elif model.config.positions == "rotary":
        with pytest.raises(InputError, match="rotary"):
            merge(converted)
    else:
        assert error(run(merge(converted))[0], whole) < 1e-5


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDER / "llama", tmp_path / "model")


def test_weights_may_be_in_several_files_and_other_types(folder):
    import ml_dtypes

    arrays = load_file(folder / "model.safetensors")
    names = sorted(arrays)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in halves.items():
        save_file({name: arrays[name].astype(ml_dtypes.bfloat16) for name in chosen}, folder / file)
    weight_map = {name: file for file, chosen in halves.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    model, _ = load(folder)
    reference = np.load(folder / "reference.npz")
    assert error(logits_of(model, {"input_ids": reference["input_ids"]}), reference["logits"]) < 3e-2
    (folder / "b.safetensors").unlink()
    with pytest.raises(InputError, match="lacks some of its weight files"):
        load(folder)


def damage(folder, kind):
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    arrays = load_file(path)
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "no header":
        path.write_bytes(b"\x00" * 50)
    elif kind == "wrong type":
        save_file({**arrays, "model.norm.weight": np.ones(16, np.int64)}, path)
    elif kind == "another vocabulary":
        config["vocab_size"] = 77
    elif kind == "missing and unknown":
        del arrays["model.norm.weight"], arrays["model.layers.1.mlp.up_proj.weight"]
        save_file({**arrays, "model.layers.0.extra.weight": np.ones(3, np.float32)}, path)
    elif kind == "unknown architecture":
        config["model_type"] = "perceiver"
    elif kind == "relative positions":
        config["model_type"] = "t5"
    elif kind == "unknown rotary":
        config["rope_parameters"] = {"rope_type": "longrope"}
    elif kind == "a field is missing":
        del config["intermediate_size"]
    elif kind == "a pickle":
        path.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/should-not-exist'\ntR.")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("cut short", ["damaged or cut short", "copy it again"]),
        ("no header", ["model.safetensors is damaged"]),
        ("wrong type", ["model.norm.weight has type I64"]),
        ("another vocabulary", ["embed_tokens.weight has shape (61, 16)", "lm_head.weight"]),
        ("missing and unknown", ["norm.weight is missing", "1.mlp.up_proj.weight is missing", "0.extra.weight is"]),
        ("unknown architecture", ["unknown model_type 'perceiver'", "llama"]),
        ("relative positions", ["t5 is not supported", "relative position biases"]),
        ("unknown rotary", ["rope_type='longrope'"]),
        ("a field is missing", ["has no 'intermediate_size'"]),
        ("a pickle", ["pytorch_model.bin is a pickle, which may run code"]),
    ],
)  # fmt: skip
def test_damaged_directories_get_one_clear_error(folder, kind, messages):
    damage(folder, kind)
    with pytest.raises(InputError) as caught:
        load(folder)
    for message in messages:
        assert message in str(caught.value)


def test_weights_are_memory_mapped(folder):
    tensors = Tensors(folder)
    assert all(isinstance(tensors[name], np.memmap) for name in tensors)
