"""Data sets written as ArrayRecord from local files, and read by a process that cannot import TensorFlow."""

import gzip
import os
import subprocess
import sys

import pytest

from t2r.data import tfds_source
from t2r.data.pairs import load_pairs, number_pairs
from t2r.data.prepared import prepare_tokens
from t2r.data.sources import load_documents
from t2r.data.tfds_builders import articles
from t2r.data.tokenizer import Words
from t2r.errors import InputError
from tests.training.runs import ROOT, environment

ARTICLE = (
    " \n = Title {i} = \n \n Text of <unk> , number {i} = {i} . \n \n = = Section = = \n \n More , of {split} . \n"
)


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    return tmp_path / "tfds"


def test_prepared_wikitext_equals_its_files(tmp_path, data_dir, call):
    files = tmp_path / "wiki"
    files.mkdir()
    texts = {}
    for split, count in (("train", 40), ("valid", 3), ("test", 2)):
        texts[split] = "".join(ARTICLE.format(i=i, split=split) for i in range(count))
        (files / f"wiki.{split}.tokens.gz").write_bytes(gzip.compress(texts[split].encode()))
    status, result = call("prepare", "--name=wikitext103", f"--files={files}")
    assert status == 0 and (result["train"], result["validation"], result["test"]) == (40, 3, 2)
    for split, text in texts.items():
        assert "".join(load_documents("tfds:wikitext103", split)) == text
    (tmp_path / "whole.txt").write_text(texts["train"])
    words = Words.train(texts["train"], 0)
    tokens = [prepare_tokens(tmp_path / "run", spec, split, words)[0].tolist()
             for spec, split in (("tfds:wikitext103", "train"), (f"text:{tmp_path}/whole.txt", "all"))]  # fmt: skip
    assert tokens[0] == tokens[1]


def test_the_newest_version_is_the_greatest_number(tmp_path):
    for version in ("1.9.0", "1.10.0", "1.2.11"):
        (tmp_path / "pairs" / version).mkdir(parents=True)
        (tmp_path / "pairs" / version / "dataset_info.json").touch()
    (tmp_path / "pairs" / "2.0.0").mkdir()  # not finished
    assert tfds_source._newest_version(tmp_path, "pairs").name == "1.10.0"


def test_articles_begin_at_titles_only():
    text = " \n = One = \n \n x = y \n = not a title = \n \n = = Section = = \n \n = Two = \n \n z \n"
    parts = list(articles(text))
    assert "".join(parts) == text and [article.split("=")[1].strip() for article in parts] == ["One", "Two"]


@pytest.mark.slow
def test_training_on_prepared_pairs_does_not_import_tensorflow(tmp_path, data_dir, call):
    """Two training corpora; languages in either order; a training process in which TensorFlow cannot be imported."""
    files, pairs = tmp_path / "files", number_pairs(1000)
    files.mkdir()
    parts = {"train.a": pairs[:500], "train.b": pairs[500:900], "valid": pairs[900:950], "test": pairs[950:]}
    for name, part in parts.items():
        for side, language in enumerate(("en", "de")):
            (files / f"{name}.{language}").write_text("".join(pair[side] + "\n" for pair in part))
    status, result = call("prepare", "--name=sentence_pairs/en-de", f"--files={files}")
    assert status == 0 and result["train"] == 900
    assert list(load_pairs("tfds:sentence_pairs/en-de,en,de", "train")) == pairs[:900]
    assert load_pairs("tfds:sentence_pairs/en-de,de,en", "test")[3] == pairs[953][::-1]

    forbidden = tmp_path / "forbidden"
    forbidden.mkdir()
    (forbidden / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')\n")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(forbidden), env["PYTHONPATH"]])
    run = subprocess.run(
        [sys.executable, "-m", "t2r", "train", "--config=configs/number_words.py", f"--workdir={tmp_path}/run",
         "--config.data.source=tfds:sentence_pairs/en-de,en,de", "--config.steps=2", "--config.model.layers=1",
         "--config.model.encoder_layers=1", "--config.model.width=32", "--config.data.buckets=1"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "900 pairs" in run.stderr


def test_errors_name_what_is_missing(tmp_path, data_dir, call):
    with pytest.raises(InputError, match="run launch/prepare_data --name=wikitext103"):
        load_documents("tfds:wikitext103", "train")
    for flags, message in [
        (["--name=sentence_pairs", f"--files={tmp_path}"], "name the two languages"),
        (["--name=no_such_set"], "use wikitext103"),
        (["--name=wikitext103", f"--files={tmp_path}/none"], "is not a folder"),
        (["--name=wikitext103", f"--files={tmp_path}"], "has neither wiki.train.tokens"),
        (["--name=sentence_pairs/en-de", f"--files={tmp_path}"], "has no train*.en, valid*.en, test*.en"),
    ]:
        (tmp_path / "something").touch()
        status, printed = call("prepare", *flags)
        assert status == 2 and message.lower() in printed.lower(), printed
