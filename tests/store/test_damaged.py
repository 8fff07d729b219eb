"""Each file of a model directory damaged in several ways: a clear error or a right answer, and no file is changed."""

import shutil

import numpy as np
import pytest

from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from tests.conftest import make_model, micro

DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "of a wrong type": lambda path: path.write_text('["config"]'),
    "random bytes": lambda path: path.write_bytes(np.random.default_rng(0).bytes(200)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
}
FILES = ("config.json", "model.safetensors", "tokenizer.model", "provenance.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("models") / "lm"
    lm = make_model(micro(vocab_size=tokenizer.vocab_size, layers=1, adaptive_cutoffs=()))
    model_dir.save(path, LoadedModel(lm, tokenizer, {"history": []}))
    return path


def snapshot(folder):
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_model_directory_gives_one_clear_error(model, tmp_path, call, file, damage):
    broken = shutil.copytree(model, tmp_path / "lm")
    DAMAGES[damage](broken / file)
    before = snapshot(broken)
    for command in (
        ["convert", f"--model={broken}", f"--output={tmp_path}/out"],
        ["generate", f"--model={broken}", "--length=1"],
    ):
        status, printed = call(*command)
        assert status == 2 and printed.startswith("error: ") and str(broken) in printed, (command, printed)
        assert not (tmp_path / "out").exists()
    assert snapshot(broken) == before
