"""Exported models compute the same without this package as with it."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from conftest import WINDOW, error, make_model, micro, micro_mt, slow_but
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
WINDOWED, WINDOWED_PERFORMER = (AttentionSpec("windowed", name, 8, **WINDOW) for name in ("t2r", "performer"))
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
    "windowed": (
        micro(
            vocab_size=300, adaptive_cutoffs=(), positions="rotary", kv_heads=1,
            attention=(WINDOWED, WINDOWED_PERFORMER),
        ),
        [],
    ),
    "windowed hybrid": (micro(vocab_size=300, attention=(WINDOWED, SOFTMAX)), ["--capacity=32"]),
    "softmax": (
        micro(vocab_size=300, adaptive_cutoffs=(), positions="learned", max_positions=6),
        ["--capacity=6", "--batch=2", "--dtype=bfloat16"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", slow_but(LANGUAGE_MODELS, "recurrent"))
def test_an_exported_language_model_equals_the_original(kind, tmp_path, tokenizer, call):
    """Linear attention, without and with a window; hybrids; few positions; a transformer, two sequences, bfloat16."""
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
    if kind in ("rotary", "windowed"):
        assert error(logits, documented(weights, TOKENS, DOCUMENTED[kind])) < 1e-5
    if kind != "softmax":  # which is exported for two sequences
        single = step_by_step(step, weights, start(weights, TOKENS[1:, 0]), TOKENS[1:])[0]
        reached = config.max_positions or TOKENS.shape[1]  # beyond it, logits are not numbers
        assert error(single[:, :reached], logits[1:, :reached]) < 1e-5
    if kind == "windowed":
        page = (out / "README.md").read_text()
        assert "linear attention in all layers, exact for a window of the last tokens in layers 0–1" in page
        for scale in ("", " + max e(q[h]) + log_scale[g]"):  # of T2R, whose φ has no scale, and of Performer
            mixture = f"mixture.weight[g, h mod 2] + mixture.bias[g, h mod 2]{scale} − m, 30)"
            assert page.count(mixture) == 1
    if kind == "rotary":
        text, ids = run_example(out, "The", "5")
        prompt = tokenizer.encode("The")
        assert len(prompt) + len(ids) <= 9 and text == tokenizer.decode(ids)
        check_greedy(expected, prompt, ids, tokenizer.stop)


class DocumentedT2r:
    """A T2R layer, as its README says, with one key head."""

    def __init__(self, weights):
        self.W, self.b = weights["feature_map.weight"][0], weights["feature_map.bias"][0]
        self.S, self.z = np.zeros((8, 16)), np.zeros(8)

    def features_of_query(self, q):
        return np.maximum(q @ self.W.T / 4 + self.b, 0)

    def add(self, k, v):
        features = np.maximum(self.W @ k + self.b, 0)
        self.S, self.z = self.S + np.outer(features, v), self.z + features

    def __call__(self, q, k, v):
        self.add(k, v)
        features = self.features_of_query(q)
        return features @ self.S / np.maximum(features @ self.z, 0.01)[:, None]


class DocumentedSoftmax:
    """A softmax layer, as its README says."""

    def __init__(self, weights):
        self.keys, self.values = [], []

    def __call__(self, q, k, v):
        self.keys, self.values = [*self.keys, k], [*self.values, v]
        scores = np.exp(q @ np.array(self.keys).T / 4)
        return scores / scores.sum(1, keepdims=True) @ np.array(self.values)


class DocumentedWindow(DocumentedT2r):
    """A T2R layer with a window of 3 tokens and 1 sink, as its README says."""

    log_scale = 0.0

    def __init__(self, weights):
        super().__init__(weights)
        self.u, self.bias = weights["mixture.weight"][0], weights["mixture.bias"][0]
        self.slots, self.count = {}, 0

    def log_scale_of_query(self, q):
        return 0.0

    def __call__(self, q, k, v):
        slot = self.count if self.count < 1 else 1 + (self.count - 1) % 3
        if self.count >= 4:
            self.add(*self.slots[slot])
        self.slots[slot] = k, v
        self.count += 1
        keys, values = (np.array(x) for x in zip(*self.slots.values()))
        scores, features, out = q @ keys.T / 4, self.features_of_query(q), []
        for h in range(2):
            near = np.exp(scores[h] - scores[h].max())
            scale = self.log_scale_of_query(q[h]) + self.log_scale
            w = np.exp(min(q[h] @ self.u[h] + self.bias[h] + scale - scores[h].max(), 30))
            total = near.sum() + w * max(features[h] @ self.z, 0)
            out.append((near @ values + w * features[h] @ self.S) / total)
        return np.array(out)


class DocumentedPerformerWindow(DocumentedWindow):
    """The same with Performer's φ."""

    log_scale = -1e30

    def __init__(self, weights):
        self.directions = weights["feature_map.directions"][0]
        super().__init__({**weights, "feature_map.weight": [None], "feature_map.bias": [None]})

    def exponents(self, a):
        a = a / 2
        return a @ self.directions.T - (a**2).sum(-1, keepdims=True) / 2 - np.log(8) / 2

    def log_scale_of_query(self, q):
        return self.exponents(q).max()

    def features_of_query(self, q):
        return np.exp(self.exponents(q) - self.exponents(q).max(-1, keepdims=True))

    def add(self, k, v):
        exponents = self.exponents(k)
        raised = max(self.log_scale, exponents.max())
        factor, features = np.exp(self.log_scale - raised), np.exp(exponents - raised)
        self.S, self.z = factor * self.S + np.outer(features, v), factor * self.z + features
        self.log_scale = raised


DOCUMENTED = {
    "rotary": (DocumentedT2r, DocumentedSoftmax),
    "windowed": (DocumentedWindow, DocumentedPerformerWindow),
}


def documented(weights, tokens, kinds) -> np.ndarray:
    """A rotary model, implemented from its README: layers of these kinds, two query heads and one key head."""
    w = {name: np.asarray(array) for name, array in weights.items()}
    outputs = []
    for sequence in tokens:
        logits, attentions = [], {}
        for layer, kind in enumerate(kinds):
            prefix = f"blocks.{layer}.attention."
            attentions[f"blocks.{layer}."] = kind(
                {name.removeprefix(prefix): array for name, array in w.items() if name.startswith(prefix)}
            )
        for position, token in enumerate(sequence):

            def rotated(a, t=position * 10_000.0 ** (-np.arange(8) / 8)):
                a, b = a[..., :8], a[..., 8:]
                return np.concatenate([a * np.cos(t) - b * np.sin(t), b * np.cos(t) + a * np.sin(t)], -1)

            x = w["embedding.table"][token] * 32**0.5
            for layer, attention in attentions.items():
                y = normed(x, w, layer + "attention_norm")
                q, k, v = (
                    np.tensordot(y, w[f"{layer}attention.{name}.kernel"], 1) + w[f"{layer}attention.{name}.bias"]
                    for name in ("query", "key", "value")
                )
                o = attention(rotated(q), rotated(k)[0], v[0])
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
    windowed_maps = tuple(AttentionSpec("windowed", name, None, **WINDOW) for name in FEATURE_MAPS)
    odd = dict(positions="learned", max_positions=9, tied_output=False, output_bias=True, gated=True, bias=False)
    norms = dict(embedding_norm=True, norm="rms", norm_placement="both", query_norm=True)
    for config in (
        micro(layers=len(maps), attention=maps),
        micro(layers=len(maps), attention=windowed_maps),
        micro(adaptive_cutoffs=(), **norms, **odd),
        micro(norm_placement="output", query_norm=True, query_norm_heads=True, projection_bias=False),
        micro_mt(shared_embedding=False, final_norm=True, attention=(MERGED, SOFTMAX), cross_attention=(MERGED,)),
    ):
        arrays, documented_names = arrays_of(abstract_model(config)), set()
        for row in weight_rows(config, arrays):
            for part in row.layers.split(", "):
                first, _, last = part.partition("–")
                layers = range(int(first), int(last or first) + 1) if first else [""]
                documented_names |= {row.name.format(layer=layer) for layer in layers}
        assert documented_names == arrays.keys()
        text = formulas.write(config)
        for name in arrays:
            new = re.search(r"(feature_map|mixture)\.\w+$", name)
            assert new is None or new[0] in text, name


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
