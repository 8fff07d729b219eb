"""The translation benchmark from end to end; not its speed."""

import json

import pytest

from conftest import make_model, micro_mt
from t2r.benchmark import translation
from t2r.benchmark.translation import benchmark_translate
from t2r.data.pairs import number_pairs
from t2r.data.tokenizer import SentencePiece, TokenizerPair
from t2r.errors import InputError
from t2r.store import model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translation")
    tokenizer = SentencePiece.train(
        "\n".join(side for pair in number_pairs(1000) for side in pair), 340, sentences=True
    )
    model = make_model(micro_mt(layers=1, vocab_size=340))
    content = model_dir.LoadedModel(model, TokenizerPair(tokenizer, tokenizer), {"history": []})
    model_dir.save(folder / "model", content)
    (folder / "lines").write_text("one\nforty-two\nseven thousand\n")
    return folder


def test_all_are_measured_in_turn(folder, monkeypatch):
    said = []
    monkeypatch.setattr(translation, "say", said.append)
    options = dict(references=str(folder / "lines"), beams=[1, 2], batch=4, rounds=2, output=str(folder / "out"))
    summary = benchmark_translate([str(folder / "model")], str(folder / "lines"), same_lengths=True, **options)
    keys = [(row["weights"], row["beam"]) for row in summary["rows"]]
    assert keys == [("float32", 1), ("float32", 2), ("int8", 1), ("int8", 2)]
    assert all(len(row["seconds"]) == 2 and row["sentences_per_second"] > 0 for row in summary["rows"])
    assert all("bleu" in row and row["relative_to_ctranslate2"] is None for row in summary["rows"])
    rounds = [line.partition(":")[0] for line in said if line.startswith("round")]
    assert rounds[:4] == [line.replace("round 2", "round 1") for line in rounds[4:]]
    stored = json.loads((folder / "out" / "translate.json").read_text())
    assert stored["rows"] == summary["rows"] and "versions" in stored["environment"]


def test_without_ctranslate2_the_rest_is_measured(folder, monkeypatch):
    monkeypatch.setattr(translation, "PEER", "no_such_library")
    options = dict(weights=["int8"], beams=[1], batch=4, rounds=1, peer=str(folder / "none"))
    summary = benchmark_translate([str(folder / "model")], str(folder / "lines"), **options)
    assert len(summary["rows"]) == 1 and "cannot be imported" in summary["notes"][0]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weights=["int4"]), "int4: choose from float32, int8"),
        (dict(weights=[]), "weights is empty"),
        (dict(references="short"), "short has 2 lines, and input=lines 3"),
        (dict(peer="none"), "none/model.bin does not exist"),
    ],
)
def test_wrong_options_are_refused(folder, monkeypatch, options, message):
    monkeypatch.setattr(translation, "PEER", "json")  # which can be imported
    monkeypatch.chdir(folder)
    (folder / "short").write_text("one\ntwo\n")
    with pytest.raises(InputError, match=message):
        benchmark_translate(["model"], "lines", **options)
