"""Exported models compute the same without this package as with it."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from conftest import error, make_model, micro, micro_mt, slow_but
from t2r.attention.feature_map import FEATURE_MAPS
from t2r.data.tokenizer import KINDS, FairseqSubwords, FairseqWords, TokenizerPair, Words
from t2r.export import formulas
from t2r.export.directory import EXAMPLES, example
from t2r.export.names import weight_rows
from t2r.export.readme import LIBRARIES
from t2r.model.config import AttentionSpec
from t2r.model.loss import source_states
from t2r.model.parameters import abstract_model, arrays_of
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel

TOKENS = np.random.default_rng(0).integers(4, 300, (2, 8)).astype(np.int32)
T2R, MERGED, SOFTMAX = AttentionSpec("linear", "t2r", 8), AttentionSpec("merged", "t2r", 8), AttentionSpec()
# Runs a script in which t2r cannot be imported.
WITHOUT_T2R = "import runpy, sys; sys.modules['t2r'] = None; sys.argv.pop(0); runpy.run_path(sys.argv[0])"


def run_example(folder: Path, *arguments: str) -> tuple[str, list[int]]:
    """The text and the tokens that example.py prints, in a process without t2r."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", WITHOUT_T2R, str(folder / "example.py"), *arguments]
    run = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    *text, ids = run.stdout.splitlines()
    return "\n".join(text), json.loads(ids)


@pytest.mark.parametrize("translates", [False, True])
def test_the_example_explains_itself(tmp_path, tokenizer, translates):
    (tmp_path / "example.py").write_text(example(TokenizerPair(tokenizer, tokenizer) if translates else tokenizer))
    run = subprocess.run([sys.executable, tmp_path / "example.py"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.startswith("usage: python example.py " + ("SENTENCE" if translates else "PROMPT TOKENS"))
    assert 'python example.py "' in run.stderr and len(run.stderr.splitlines()) == 1


def loaded(folder: Path, first: str) -> tuple:
    """The weights, the function that makes the initial state, and the step, with only jax and safetensors."""
    functions = [jax.export.deserialize((folder / f"{name}.stablehlo").read_bytes()) for name in (first, "step")]
    assert all(function.platforms == ("cpu", "cuda", "tpu") for function in functions)
    return load_file(folder / "model.safetensors"), *(jax.jit(function.call) for function in functions)


def step_by_step(step, weights, state, tokens):
    outputs = []
    for token in tokens.T:
        logits, state = step(weights, state, token)
        outputs.append(logits)
    return np.stack(outputs, 1), state


def logits_of(model):
    """The logits of whole sequences (2, 8), for translation given their sources."""

    def logits(tokens, source):
        return model.logits(model(tokens, source=None if source is None else source_states(model, source))[0])

    compiled = jax.jit(logits)
    return lambda tokens, source=None: np.asarray(compiled(tokens, source))


def check_greedy(logits, prompt: list[int], generated: list[int], stop: int, **inputs) -> None:
    """Asserts that each generated token is the likeliest after those before it, and that none follows a stop token."""
    sequence = [*prompt, *generated]
    tokens = np.zeros(TOKENS.shape, np.int32)
    tokens[0, : len(sequence) - 1] = sequence[:-1]
    likeliest = logits(tokens, **inputs)[0].argmax(-1)[len(prompt) - 1 : len(sequence) - 1]
    assert generated == likeliest.tolist() and stop not in generated[:-1]


LANGUAGE_MODELS = {
    "recurrent": (micro(vocab_size=300, attention=(MERGED, AttentionSpec("linear", "performer", 8))), []),
    "rotary": (
        micro(vocab_size=300, adaptive_cutoffs=(), positions="rotary", kv_heads=1, attention=(T2R, SOFTMAX)),
        ["--capacity=32"],
    ),
    "limited": (  # as Phi-3's, in which positions from 6 on have other frequencies
        micro(
            vocab_size=300,
            adaptive_cutoffs=(),
            positions="rotary",
            max_positions=6,
            rope_scaling="factors",
            rope_gain=1.2,
            rope_factors=(1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
            attention=(T2R,),
        ),
        [],
    ),
    "softmax": (
        micro(vocab_size=300, adaptive_cutoffs=(), positions="learned", max_positions=6),
        ["--capacity=6", "--batch=2", "--dtype=bfloat16"],
    ),
}


@pytest.mark.parametrize("kind", slow_but(LANGUAGE_MODELS, "recurrent"))
def test_an_exported_language_model_equals_the_original(kind, tmp_path, tokenizer, call):
    """Two kinds of linear attention; a rotary hybrid; few positions; a transformer with a batch of two, in bfloat16."""
    config, flags = LANGUAGE_MODELS[kind]
    model, out = make_model(config), tmp_path / "out"
    model_dir.save(tmp_path / "model", LoadedModel(model, tokenizer, {"history": []}))
    status, result = call("export", f"--model={tmp_path}/model", f"--output={out}", *flags)
    assert status == 0, result
    assert result["files"].keys() == {path.name for path in out.iterdir()} >= {"tokenizer.model", "README.md"}
    assert os.fsencode(Path(__file__).parents[2]) not in (out / "step.stablehlo").read_bytes()

    weights, start, step = loaded(out, "start")
    state = start(weights, TOKENS[:, 0])
    described = json.loads((out / "export.json").read_text())["arrays"]["state"]
    signatures = {name: ([2 if n == "b" else n for n in a["shape"]], a["dtype"]) for name, a in described.items()}
    assert signatures == {name: (list(array.shape), array.dtype.name) for name, array in state.items()}
    logits, state = step_by_step(step, weights, state, TOKENS)
    longest = 6 if kind in ("softmax", "limited") else 8
    expected = logits_of(model)
    assert error(logits[:, :longest], expected(TOKENS)[:, :longest]) < (3e-2 if kind == "softmax" else 1e-5)
    assert np.isnan(logits[:, longest:]).all(), "beyond the maximal length, logits are NaN"
    if kind == "softmax":
        assert result["files"]["model.safetensors"] < 2.2 * result["parameters"] + 4000
        assert result["state_bytes"] == sum(array.nbytes for array in state.values())
    if kind == "rotary":
        assert error(logits, documented(weights, TOKENS)) < 1e-5
        text, ids = run_example(out, "The", "5")
        prompt = tokenizer.encode("The")
        assert len(prompt) + len(ids) <= 9 and text == tokenizer.decode(ids)
        check_greedy(expected, prompt, ids, tokenizer.stop)


def documented(weights, tokens) -> np.ndarray:
    """The rotary hybrid, implemented from its README: a T2R and a softmax layer, two query heads and one key head."""
    w = {name: np.asarray(array) for name, array in weights.items()}
    outputs = []
    for sequence in tokens:
        S, z, keys, values, logits = np.zeros((8, 16)), np.zeros(8), [], [], []
        for position, token in enumerate(sequence):

            def rotated(a, t=position * 10_000.0 ** (-np.arange(8) / 8)):
                a, b = a[..., :8], a[..., 8:]
                return np.concatenate([a * np.cos(t) - b * np.sin(t), b * np.cos(t) + a * np.sin(t)], -1)

            x = w["embedding.table"][token] * 32**0.5
            for layer in ("blocks.0.", "blocks.1."):
                y = normed(x, w, layer + "attention_norm")
                q, k, v = (
                    np.tensordot(y, w[f"{layer}attention.{name}.kernel"], 1) + w[f"{layer}attention.{name}.bias"]
                    for name in ("query", "key", "value")
                )
                q, k, v = rotated(q), rotated(k)[0], v[0]
                if layer == "blocks.0.":
                    W, b = (w[f"{layer}attention.feature_map.{name}"][0] for name in ("weight", "bias"))
                    q, k = np.maximum(q @ W.T / 4 + b, 0), np.maximum(W @ k + b, 0)
                    S, z = S + np.outer(k, v), z + k
                    o = q @ S / np.maximum(q @ z, 0.01)[:, None]
                else:
                    keys, values = [*keys, k], [*values, v]
                    scores = np.exp(q @ np.array(keys).T / 4)
                    o = scores / scores.sum(1, keepdims=True) @ np.array(values)
                x = x + np.tensordot(o, w[layer + "attention.out.kernel"], 2) + w[layer + "attention.out.bias"]
                y, up, down = (
                    normed(x, w, layer + "feedforward_norm"),
                    layer + "feedforward.up",
                    layer + "feedforward.down",
                )
                hidden = np.maximum(y @ w[up + ".kernel"] + w[up + ".bias"], 0)
                x = x + hidden @ w[down + ".kernel"] + w[down + ".bias"]
            logits.append(w["embedding.table"] @ x)
        outputs.append(logits)
    return np.array(outputs)


def normed(x, w, name):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w[name + ".scale"] + w[name + ".bias"]


@pytest.mark.slow
def test_an_exported_translation_model_equals_the_original(tmp_path, tokenizer, call):
    """Linear and softmax layers, causal and cross; sources of two lengths; separate tokenizers."""
    model = make_model(micro_mt(vocab_size=300, attention=(T2R, SOFTMAX), cross_attention=(T2R, SOFTMAX)))
    pair, out = TokenizerPair(tokenizer, type(tokenizer)(tokenizer._model)), tmp_path / "out"
    model_dir.save(tmp_path / "model", LoadedModel(model, pair, {"history": []}))
    status, result = call("export", f"--model={tmp_path}/model", f"--output={out}", "--capacity=8")
    assert status == 0 and result["longest"] == 8, result
    weights, encode, step = loaded(out, "encode")
    sources = np.where(np.arange(8) < [[5], [8]], TOKENS, -1)
    logits, _ = step_by_step(step, weights, encode(weights, sources), TOKENS)
    expected = logits_of(model)
    assert error(logits, expected(TOKENS, jnp.asarray(sources))) < 1e-5

    _, ids = run_example(out, "The old")
    source = np.full((2, 8), -1, np.int32)
    ids_of_source = pair.encode_source("The old")
    source[:, : len(ids_of_source)] = ids_of_source
    check_greedy(expected, [tokenizer.start], ids, tokenizer.stop, source=jnp.asarray(source))


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SUBWORDS = [*SPECIAL, "low@@", "er", "low", ".", "ne@@", "w", "n@@", "e", "&apos;s", "new"]
NEW_CODES, OLD_CODES = "#version: 0.2\nl o\nlo w</w>\nlo w\ne r</w>\nn e\n", "n e\nl o\nlo w\nw </w>\nlow </w>\n"


@pytest.mark.parametrize(
    "words",
    [
        Words.train("low new\nc d er", 0),
        FairseqWords([*SPECIAL, "low", "new", "er"]),
        FairseqSubwords(SUBWORDS),
        FairseqSubwords(SUBWORDS, NEW_CODES),
        FairseqSubwords(SUBWORDS, OLD_CODES),
        FairseqSubwords(SUBWORDS, NEW_CODES, "en"),
    ],
)
def test_the_example_tokenizes_words_as_t2r_does(tmp_path, words):
    if getattr(words, "_language", None):
        pytest.importorskip("sacremoses")
    words.save(tmp_path)
    program, names = example(words), {"json": json, "pairwise": pairwise}
    exec(program[program.index("def tokenizer") : program.index("if len(sys.argv)")], names)
    encode, decode = names["tokenizer"](tmp_path)
    text = "lower zz low low's new.\nlow@@ new er\n"
    ids = encode(text)
    assert ids == words.encode(text) and len(set(ids)) > 3 and decode(ids) == words.decode(ids)


def test_every_kind_of_tokenizer_has_an_example():
    for kind in KINDS:
        assert (EXAMPLES / f"tokenizer_{kind.kind}.py").is_file() and kind.kind in LIBRARIES


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [FairseqWords([*SPECIAL, "low", "new", "er"]), FairseqSubwords(SUBWORDS)])
def test_an_import_from_fairseq_is_exported(tmp_path, call, tokenizer):
    model = make_model(micro(vocab_size=tokenizer.vocab_size, adaptive_cutoffs=()))
    model_dir.save(tmp_path / "model", LoadedModel(model, tokenizer, {"history": []}))
    status, result = call("export", f"--model={tmp_path}/model", f"--output={tmp_path}/out", "--capacity=9")
    assert status == 0, result
    text, ids = run_example(tmp_path / "out", "low new", "4")
    assert ids and text == tokenizer.decode(ids)


def test_every_array_of_every_model_is_documented():
    maps = tuple(AttentionSpec("linear", name, None) for name in FEATURE_MAPS)
    odd = dict(positions="learned", max_positions=9, tied_output=False, output_bias=True, gated=True, bias=False)
    norms = dict(embedding_norm=True, norm="rms", norm_placement="both", query_norm=True)
    for config in (
        micro(layers=len(maps), attention=maps),
        micro(adaptive_cutoffs=(), **norms, **odd),
        micro(norm_placement="output", query_norm=True, query_norm_heads=True, projection_bias=False),
        micro_mt(shared_embedding=False, final_norm=True, attention=(MERGED, SOFTMAX), cross_attention=(MERGED,)),
    ):
        arrays, documented_names = arrays_of(abstract_model(config)), set()
        for row in weight_rows(config, arrays):
            first, _, last = row.layers.partition("–")
            layers = range(int(first), int(last or first) + 1) if first else [""]
            documented_names |= {row.name.format(layer=layer) for layer in layers}
        assert documented_names == arrays.keys()
        text = formulas.write(config)
        for name in arrays:
            assert name.split(".")[-1] in text or ".feature_map." not in name, name


def test_failed_exports_give_an_error_and_leave_no_files(tmp_path, tokenizer, call):
    path = tmp_path / "model"
    model_dir.save(path, LoadedModel(make_model(micro(vocab_size=300)), tokenizer, {"history": []}))

    def refused(*flags: str) -> str:
        status, printed = call("export", *flags)
        assert status == 2, printed
        return printed

    flags = [f"--model={path}", f"--output={tmp_path}/out"]
    assert "2 of 2 layers have softmax attention (0, 1)" in refused(*flags)
    assert "--batch" in refused(*flags, "--capacity=9", "--batch=0")
    assert "exists already" in refused(f"--model={path}", f"--output={path}", "--capacity=9")
    assert "cannot write" in refused(f"--model={path}", f"--output={path}/config.json/out", "--capacity=9")
    assert "give a t2r model directory" in refused(f"--model={tmp_path}/none", f"--output={tmp_path}/out")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "damaged" in refused(*flags, "--capacity=9")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
