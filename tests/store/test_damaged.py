"""Each file of a model directory damaged in many ways: a clear error or a right answer, and no file is changed."""

import shutil

import numpy as np
import pytest

from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from tests.conftest import make_model, micro, slow_but
from tests.damages import DAMAGES, snapshot

FILES = ("config.json", "model.safetensors", "tokenizer.model", "provenance.json")
HISTORY = {"history": [{"action": "train", "steps": 3, "valid_perplexity": 1.5}]}
QUICK = ("cut", "a list", "a loop", "not a number", "newer")
HARMLESS = (
    "strings for numbers",
    "not a number",
    "huge",
    "negative",
    "numbers for strings",
    "lists for everything",
    "newer",
)
CASES = [(file, damage) for file in FILES for damage in DAMAGES if file != "provenance.json" or damage not in HARMLESS]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("models") / "lm"
    lm = make_model(micro(vocab_size=tokenizer.vocab_size, layers=1, adaptive_cutoffs=()))
    model_dir.save(path, LoadedModel(lm, tokenizer, HISTORY))
    return path


def commands(model, folder):
    """Every command that reads a model directory; `folder` is for what they write."""
    ids = folder / "ids.npz"
    np.savez(ids, input_ids=np.arange(8).reshape(1, 8))
    text = folder / "text.txt"
    text.write_text("The quick fox counts two boats.\n" * 20)
    given = f"--model={model}"
    return {
        "convert": ["convert", given, f"--output={folder}/rnn"],
        "generate": ["generate", given, "--length=1"],
        "evaluate": ["evaluate", given, f"--data=text:{text}", "--window=16"],
        "logits": ["evaluate", given, f"--logits={ids}:{folder}/logits.npz"],
        "export": ["export", given, f"--output={folder}/exported", "--capacity=8"],
        "translate": ["translate", given, f"--input={text}"],
        "benchmark decode": ["benchmark", "decode", given, "--rows=model", "--lengths=4", "--steps=1", "--seconds=0"],
        "benchmark memory": ["benchmark", "memory", given, "--rows=model", "--lengths=4", "--batch=1"],
        "import": ["import", f"--source={model}", f"--output={folder}/imported"],
        "train": ["train", "--config=convert:data_free", f"--config.init_from={model}", f"--workdir={folder}/run"],
    }


@pytest.mark.parametrize("file, damage", slow_but(CASES, *[case for case in CASES if case[1] in QUICK]))
def test_a_damaged_model_directory_gives_one_clear_error(model, tmp_path, call, file, damage):
    check(model, tmp_path, call, file, damage, ["convert", "generate"])


@pytest.mark.slow
@pytest.mark.parametrize("file, damage", CASES)
def test_every_command_refuses_a_damaged_model_directory(model, tmp_path, call, file, damage):
    check(model, tmp_path, call, file, damage, [])


def check(model, tmp_path, call, file, damage, names):
    """Runs commands (none named: all) on a damaged copy."""
    broken, outputs = shutil.copytree(model, tmp_path / "lm"), tmp_path / "outputs"
    DAMAGES[damage](broken / file)
    outputs.mkdir()
    arguments = commands(broken, outputs)
    if file != "config.json":  # benchmarks read nothing else
        arguments = {name: given for name, given in arguments.items() if not name.startswith("benchmark")}
    (outputs / "run" / "checkpoints").mkdir(parents=True)  # the empty folders of a run that has not begun
    before = snapshot(tmp_path)
    for name in names or arguments:
        status, printed = call(*arguments[name])
        assert status == 2 and printed.startswith("error: ") and str(broken) in printed, (name, printed)
        assert snapshot(tmp_path) == before, name


@pytest.mark.parametrize("damage", slow_but(HARMLESS, "not a number"))
def test_values_in_the_history_are_only_kept(model, tmp_path, call, damage):
    broken = shutil.copytree(model, tmp_path / "lm")
    DAMAGES[damage](broken / "provenance.json")
    before = snapshot(broken)
    (_, right), (status, result) = (call("generate", f"--model={path}", "--length=3") for path in (model, broken))
    assert status == 0 and result["text"] == right["text"] and snapshot(broken) == before
