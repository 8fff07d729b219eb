"""One long generation: that it is the model's, that its pieces cover it, and what it refuses; not its speed."""

import json

import pytest

from conftest import make_model
from t2r.benchmark.long import PIECES, flatness
from t2r.benchmark.models import converted
from t2r.decode.generate import generate_tokens, prefill
from t2r.model.config import preset
from t2r.store import model_dir

TOKENS = 250  # rounded up to 300: a hundred pieces of three


@pytest.fixture(scope="module")
def rnn(tmp_path_factory, tokenizer):
    """(directory, model) of a converted model with rotary positions."""
    model = make_model(converted(preset("micro_llama", vocab_size=300), "t2r"))
    path = tmp_path_factory.mktemp("models") / "rnn"
    model_dir.save(path, model_dir.LoadedModel(model, tokenizer, {"history": []}))
    return path, model


def test_a_models_own_tokens_are_measured_from_the_first_to_the_last(call, tmp_path, rnn, tokenizer):
    path, model = rnn
    flags = [f"--model={path}", f"--tokens={TOKENS}", "--dtype=float32", f"--output={tmp_path}"]
    status, result = call("benchmark", "long", *flags)
    assert status == 0 and result["tokens"] == 300 and not result["random_weights"]
    assert result["first_tokens_per_second"] > 0 and result["last_memory_bytes"] > 0
    _, (tokens,) = generate_tokens(model, prefill(model, [[tokenizer.end]], 300), 300, end=-1)
    assert result["beginning"] == tokenizer.decode(tokens[:3]) and result["end"] == tokenizer.decode(tokens[-3:])
    (line,) = json.loads((tmp_path / "long.json").read_text())["lines"]
    assert [piece["tokens"] for piece in line["pieces"]] == list(range(3, 301, 3)) and len(line["pieces"]) == PIECES
    assert (tmp_path / "long.png").exists()


def test_random_weights_sampled_with_8_bit_matrices(call):
    flags = ["--preset=micro_llama", "--row=t2r_window", "--tokens=20", "--batch=3", "--dtype=float32"]
    status, result = call("benchmark", "long", *flags, "--weights=int8", "--temperature=0.8", "--top_k=5", "--seed=1")
    assert status == 0 and result["random_weights"] and result["tokens"] == 20 and result["plots"] == []


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--preset=micro_mt"], "translation model"),
        (["--preset=micro_llama", "--row=gru"], "unknown model 'gru'"),
        (["--preset=micro_llama", "--weights=int4"], "choose from bfloat16"),
        (["--preset=micro_llama", "--weights=bfloat16,int8"], "choose one type"),
        (["--preset=micro_llama", "--temperature=-1"], "--temperature=-1"),
        (["--preset=micro_llama", "--field=positions=learned", "--field=max_positions=8"], "too many"),
        (["--preset=micro_llama", "--row=transformer", "--tokens=2000000000", "--batch=99"], "GiB are free"),
    ],
)
def test_what_cannot_be_measured_gets_a_clear_error(call, flags, message):
    status, printed = call("benchmark", "long", *flags)
    assert status == 2 and message in printed, printed


def test_flatness_compares_the_ends():
    pieces = [{"seconds": 1 + (i >= 90), "memory_bytes": 100 + i} for i in range(100)]
    found = flatness(pieces, 10)
    assert found["last_over_first"] == 0.5 and found["tokens_per_second"] == 1000 / 110
    assert (found["first_memory_bytes"], found["last_memory_bytes"]) == (109, 199)
    assert flatness([{"seconds": 1, "memory_bytes": None}], 10)["last_memory_bytes"] is None
