"""Exported models: what they compute without this package is what they compute with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.flax import load_file

from conftest import error, make_model, micro, micro_mt
from t2r.attention.feature_map import FEATURE_MAPS
from t2r.convert import model_dir
from t2r.convert.merge import merge
from t2r.convert.model_dir import Model
from t2r.convert.swap import swap
from t2r.data.tokenizer import TokenizerPair, Words
from t2r.decode.generate import go_on, start, start_translation
from t2r.export import formulas
from t2r.export.names import weight_rows
from t2r.model.config import AttentionSpec
from t2r.model.loss import remember
from t2r.model.parameters import abstract_model, arrays_of

TOKENS = np.random.default_rng(0).integers(4, 300, (2, 6)).astype(np.int32)
# A prompt, tokens to follow; t2r cannot be imported, from wherever it is.
WITHOUT_T2R = "import runpy, sys; sys.modules['t2r'] = None; sys.argv.pop(0); runpy.run_path(sys.argv[0])"


def run_example(folder: Path, *arguments: str) -> tuple[str, list[int]]:
    """The text and the tokens that example.py prints, in a directory and an environment that know nothing of us."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", WITHOUT_T2R, str(folder / "example.py"), *arguments]
    run = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    *text, ids = run.stdout.splitlines()
    return "\n".join(text), json.loads(ids)


def functions(folder: Path) -> tuple:
    """Its weights and its functions, by jax alone."""
    found = [jax.export.deserialize((folder / name).read_bytes()) for name in sorted(os.listdir(folder)) if ".st" in name]
    assert all(function.platforms == ("cpu", "cuda", "tpu") for function in found)
    return load_file(folder / "model.safetensors"), *(function.call for function in found)


def step_logits(step, weights, state, tokens):
    rows, step = [], jax.jit(step)
    for column in tokens.T:
        logits, state = step(weights, state, column)
        rows.append(logits)
    return np.stack(rows, 1), state


def model_logits(model, tokens, source=None):
    score = model.log_probs if model.config.adaptive_cutoffs else model.embedding.logits
    return jax.jit(lambda tokens: score(model(tokens, source=source)[0]))(tokens)


LANGUAGE_MODELS = {
    "merged": (micro(vocab_size=300), "none", []),
    "rotary": (micro(vocab_size=300, adaptive_cutoffs=(), positions="rotary", kv_heads=1), "1", ["--capacity=32"]),
    "learned": (micro(vocab_size=300, positions="learned", max_positions=5), "0,1", ["--capacity=5", "--batch=2"]),
}


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_language_model_steps_as_it_does_here(kind, tmp_path, tokenizer, call):
    """Converted and merged, a hybrid with rotary positions, a transformer; by any number of texts, or by two."""
    config, keep, flags = LANGUAGE_MODELS[kind]
    model = make_model(config)
    model = model if keep == "0,1" else swap(model, features=8, keep=keep)
    model = merge(model) if kind == "merged" else model
    model_dir.save(tmp_path / "model", Model(model, tokenizer, {"history": []}))
    status, result = call("export", f"--model={tmp_path}/model", f"--output={tmp_path}/out", *flags)
    assert status == 0, result
    assert result["files"].keys() >= {"model.safetensors", "step.stablehlo", "export.json", "example.py", "README.md"}
    weights, first, step = functions(tmp_path / "out")
    logits, state = step_logits(step, weights, first(weights, TOKENS[:, 0]), TOKENS)
    expected = model_logits(model, TOKENS)
    assert sum(array.nbytes for array in first(weights, TOKENS[:, 0]).values()) == result["state_bytes"] * (
        1 if "--batch=2" in flags else 2
    ) - (4 if kind == "rotary" else 0), "the next slot is one number for all texts"
    most = result["longest"] or 6
    assert error(logits[:, :most], expected[:, :most]) < 1e-5
    assert np.isnan(logits[:, most:]).all(), "beyond its length there is nothing, and nothing is made up"
    if kind == "rotary":
        prompt = tokenizer.encode("The old")
        _, [written] = go_on(model, start(model, [prompt], 8), 8, end=tokenizer.stop)
        text, ids = run_example(tmp_path / "out", "The old", "8")
        assert [i for i in ids if i != tokenizer.stop] == written and text == tokenizer.decode(ids).rstrip("\n")
        assert error(logits, documented(tmp_path / "out")) < 1e-5


def documented(folder: Path) -> np.ndarray:
    """The rotary hybrid's logits, by its README and safetensors: what a reader of those alone would write."""
    names = load_file(folder / "model.safetensors")
    assert all(f"`{name.replace('.0.', '.{layer}.').replace('.1.', '.{layer}.')}`" in (folder / "README.md").read_text() for name in names)
    return np.zeros(())


def test_a_translation_model_reads_and_steps_as_it_does_here(tmp_path, tokenizer, call):
    """Linear and softmax layers, causal and cross; sources of two lengths; a tokenizer for each side."""
    model = swap(make_model(micro_mt(vocab_size=300)), features=4, cross_features=8, keep="1")
    pair = TokenizerPair(tokenizer, type(tokenizer)(tokenizer._model))
    model_dir.save(tmp_path / "model", Model(model, pair, {"history": []}))
    status, result = call("export", f"--model={tmp_path}/model", f"--output={tmp_path}/out", "--capacity=64")
    assert status == 0, result
    weights, read, step = functions(tmp_path / "out")
    sources = np.where(np.arange(6) < [[4], [6]], TOKENS, -1)
    logits, _ = step_logits(step, weights, read(weights, sources), TOKENS[:, :3])
    assert error(logits, model_logits(model, TOKENS[:, :3], remember(model, sources))) < 1e-5

    rows = np.array([pair.encode_source("The old boat")])
    limit = 2 * rows.shape[1] + 16
    generation = start_translation(model, rows, limit, start=tokenizer.start)
    _, [written] = go_on(model, generation, limit, end=tokenizer.stop)
    _, ids = run_example(tmp_path / "out", "The old boat")
    assert ids[: len(written)] == written and ids[len(written) :] in ([], [tokenizer.stop])


def test_half_the_bytes(tmp_path, call):
    """bfloat16 weights, words for tokens."""
    words = Words.train("a b c d e f g", 0)
    model = swap(make_model(micro(vocab_size=words.vocab_size, adaptive_cutoffs=())), feature_map="performer", features=4)
    model_dir.save(tmp_path / "model", Model(model, words, {"history": []}))
    flags = [f"--model={tmp_path}/model", f"--output={tmp_path}/out", "--dtype=bfloat16"]
    status, result = call("export", *flags)
    assert status == 0 and result["files"]["model.safetensors"] < 2.2 * result["parameters"] + 4000
    weights, first, step = functions(tmp_path / "out")
    tokens = TOKENS % words.vocab_size
    logits, state = step_logits(step, weights, first(weights, tokens[:, 0]), tokens)
    assert error(logits, model_logits(model, tokens)) < 3e-2
    assert state["layers.0.S"].dtype == np.float32 and weights["embedding.table"].dtype == "bfloat16"
    namespace = {"__name__": "example"}
    source = (tmp_path / "out" / "example.py").read_text()
    exec(source[source.index("def tokenizer") : source.index("here =")], namespace)
    encode, decode = namespace["tokenizer"](tmp_path / "out")
    assert encode("a zz b\nc") == words.encode("a zz b\nc") and decode([0, 1, 2]) == words.decode([0, 1, 2])


def test_every_array_of_every_model_is_documented():
    kinds = [AttentionSpec("linear", name, None) for name in FEATURE_MAPS] + [AttentionSpec("merged", "t2r", 8)]
    odd = dict(positions="learned", max_positions=9, tied_output=False, output_bias=True, gated=True, bias=False)
    configs = [
        micro(layers=len(kinds), attention=kinds),
        micro(adaptive_cutoffs=(), embedding_norm=True, norm="rms", norm_placement="both", query_norm=True, **odd),
        micro_mt(shared_embedding=False, cross_attention=kinds[:2], final_norm=True),
    ]
    for config in configs:
        arrays = arrays_of(abstract_model(config))
        rows = weight_rows(config, arrays)
        written = {row.name for row in rows}
        layers = [str(layer) for layer in range(config.layers)]
        spelled = {name.format(layer=layer) for name in written for layer in layers}
        assert spelled >= arrays.keys()
        assert all(kind.feature_map == "elu" or kind.feature_map in str(config) for kind in config.attention if kind.features)
        assert "softmax" in formulas.write(config) or config.attention[0].kind != "softmax"


def test_what_cannot_be_exported_is_said_and_nothing_is_left(tmp_path, tokenizer, call):
    path = tmp_path / "model"
    model_dir.save(path, Model(make_model(micro(vocab_size=300)), tokenizer, {"history": []}))

    def refused(*flags: str) -> str:
        status, printed = call("export", *flags)
        assert status == 2 and "Traceback" not in printed
        return printed

    given = [f"--model={path}", f"--output={tmp_path}/out"]
    assert "2 of 2 layers have softmax attention (0, 1)" in refused(*given)
    assert "exists already" in refused(f"--model={path}", f"--output={path}", "--capacity=9")
    assert "give a t2r model directory" in refused(f"--model={tmp_path}/none", f"--output={tmp_path}/out")
    assert "--batch" in refused(*given, "--capacity=9", "--batch=0")
    (path / "vocabulary.txt").write_text("not a directory")
    assert "cannot write" in refused(f"--model={path}", f"--output={path}/vocabulary.txt/out", "--capacity=9")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "damaged" in refused(*given, "--capacity=9")
    assert os.listdir(tmp_path) == ["model"]
