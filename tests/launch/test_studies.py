"""launch/enwik8 and launch/tatoeba: from the raw corpus to tables and figures, at the smallest size."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import QUICK_TO_COMPILE
from tests.workflow.test_study import PAIRS_CONFIG

ROOT = Path(__file__).parents[2]
CONFIG = """
from t2r.training.config import architecture, default_config, pretrained

ROWS = dict.fromkeys(("transformer", "t2r_scratch", "t2r", "phi_frozen"))

def get_config(row="transformer"):
    config = default_config()
    config.convert.update(feature_map="" if row == "transformer" else "t2r", features=8)
    config.data.update(vocab_size=300, length=16, batch=2)
    config.optimizer.warmup_steps, config.steps = 1, 2
    if row in ("transformer", "t2r_scratch"):
        config.model = architecture("tiny_lm", vocab_size=300, layers=1, width=16, heads=1, feedforward=16)
    else:
        config.init_from, config.model = "none", pretrained()
        config.trainable = "all_but_feature_maps" if row == "phi_frozen" else "all"
    return config
"""
PROSE = "The river runs past the old town, and people have crossed it by a bridge of stone since the year {}.\n"


def launch(script: str, corpus: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Runs a script; what it trains goes to folder/out, its results to folder/results."""
    given = dict(PYTHON=str(ROOT / ".venv/bin/python"), RESULTS=str(folder / "results"), JOBS="2") | variables
    environment = {**os.environ, "XLA_FLAGS": QUICK_TO_COMPILE, **given}
    command = [str(ROOT / "launch" / script), str(corpus), str(folder / "out")]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["enwik8", "tatoeba"])
def test_a_corpus_that_is_not_there_is_named(script, tmp_path):
    done = launch(script, tmp_path / "none.gz", tmp_path)
    assert done.returncode == 2 and "there is no file" in done.stderr and not list(tmp_path.iterdir())
    usage = subprocess.run([ROOT / "launch" / script], capture_output=True, text=True)
    assert usage.returncode == 2 and f"launch/{script} " in usage.stdout and "set -" not in usage.stdout


STAND_IN = """#!/bin/bash
# A Python whose `t2r study` writes a table at once. Everything else is done by the real one, but for the page.
case "$*" in
    "-m t2r study"*)
        mkdir -p study; printf %s "$TABLE" >study/study.json; echo new >study/study.md; exit "${STATUS:-0}" ;;
    "-m t2r analyze"*) mkdir -p analysis; echo new | tee analysis/analysis.json >analysis/a.png ;;
    */results_page) touch "$PAGE" ;;
    *) exec "$REAL" "$@" ;;
esac
"""


def table_of(rows: list[tuple[str, int]], scale: float = 1.0, config: str = "enwik8") -> str:
    return json.dumps({"config": config, "scale": scale, "rows": [{"row": row, "seed": seed} for row, seed in rows]})


@pytest.fixture
def clone(tmp_path):
    """A clone with a table of two rows in results, and a function that runs a script in it, RESULTS being unset."""
    shutil.copytree(ROOT / "launch", tmp_path / "clone" / "launch")
    python = tmp_path / "clone" / ".venv" / "bin" / "python"  # found without PYTHON
    python.parent.mkdir(parents=True)
    for name in ("t2r", "configs"):
        (tmp_path / "clone" / name).symlink_to(ROOT / name)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    article = "".join(PROSE.format(year) for year in range(12))
    (tmp_path / "wiki").write_text(f'<text xml:space="preserve">{article}</text>')
    (tmp_path / "wiki.gz").write_bytes(gzip.compress((tmp_path / "wiki").read_bytes()))
    (tmp_path / "pairs.txt").write_text("house\tHaus\n")
    for name in ("enwik8", "tatoeba"):
        (tmp_path / "clone" / "results" / name).mkdir(parents=True)
        content = table_of([("transformer", 0), ("t2r", 1)], 0.5, name)
        (tmp_path / "clone" / "results" / name / "study.json").write_text(content)

    def run(script: str, corpus: str, **variables: str) -> subprocess.CompletedProcess:
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {"REAL": sys.executable, "PAGE": str(tmp_path / "page"), "TABLE": "", **variables}
        command = [str(tmp_path / "clone" / "launch" / script), corpus, variables.get("OUT", "out")]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def one_error(done: subprocess.CompletedProcess) -> str:
    """The one line that a script has said before it ended with status 2."""
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
    return done.stderr


CORPUS = {"enwik8": "wiki", "tatoeba": "pairs.txt"}
COMPLETE = [("transformer", 0), ("t2r", 1), ("elu", 0)]


@pytest.mark.parametrize("script", CORPUS)
@pytest.mark.parametrize(
    "rows, scale, status, reason",
    [
        (COMPLETE, 1.0, 2, "something failed"),
        (COMPLETE[:1], 1.0, 0, "the new table lacks t2r (seed 1)"),
        ([("transformer", 0), ("t2r", 0)], 1.0, 0, "the new table lacks t2r (seed 1)"),
        (COMPLETE, 0.25, 0, "SCALE=0.25, that one with 0.5"),
    ],
)
def test_a_table_that_is_less_replaces_none(script, rows, scale, status, reason, clone, tmp_path):
    results = tmp_path / "clone" / "results" / script
    before = (results / "study.json").read_text()
    given = dict(TABLE=table_of(rows, scale, script), STATUS=str(status))
    done = clone(script, CORPUS[script], **given)
    assert done.returncode == status and done.stderr.count("\n") == 1, done.stderr
    assert reason in done.stderr and "out/study/study.md" in done.stderr and "RESULTS=FOLDER" in done.stderr
    assert (results / "study.json").read_text() == before and [path.name for path in results.iterdir()] == [
        "study.json"
    ]
    assert not (tmp_path / "page").exists()
    elsewhere = clone(script, CORPUS[script], RESULTS="elsewhere", **given)
    assert elsewhere.returncode == status and elsewhere.stderr == ""
    assert json.loads((tmp_path / "elsewhere" / "study.json").read_text())["scale"] == scale


@pytest.mark.parametrize("script", CORPUS)
def test_a_complete_table_replaces_another(script, clone, tmp_path):
    done = clone(script, CORPUS[script], TABLE=table_of(COMPLETE, 0.5, script))
    results = tmp_path / "clone" / "results" / script
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "page").exists()
    assert len(json.loads((results / "study.json").read_text())["rows"]) == 3
    assert (results / "analysis" / "analysis.json").exists() == (script == "enwik8")


@pytest.mark.parametrize("script", CORPUS)
def test_a_study_that_wrote_no_table_leaves_nothing_to_copy(script, clone, tmp_path):
    done = clone(script, CORPUS[script], STATUS="2")
    assert done.returncode == 2 and done.stderr == "" and not (tmp_path / "page").exists()


def test_flags_are_refused_before_anything_runs(clone, tmp_path):
    said = clone("enwik8", "wiki", ROWS="transformer,foo", AGAIN="bar,t2r_swapped", SIZES="64 7").stderr
    assert [said.count(f"unknown row '{row}'") for row in ("foo", "bar", "t2r_7", "t2r_swapped")] == [1, 1, 1, 0]
    assert "SEQUENCES=0: give a whole number" in one_error(clone("enwik8", "wiki", SEQUENCES="0"))
    assert "no config file none" in one_error(clone("enwik8", "wiki", CONFIG="none"))
    assert not list((tmp_path / "out").iterdir())
    assert clone("enwik8", "--help").stderr == "" and clone("tatoeba", "--help").returncode == 0


def test_a_corpus_that_the_study_refuses_does_not_keep_another_one_out(tmp_path):
    (tmp_path / "no_pairs.txt").write_text("hello\n")
    done = launch("tatoeba", tmp_path / "no_pairs.txt", tmp_path)
    assert done.returncode == 2 and "deu.txt has lines with fewer than 2" in done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_corpus_that_cannot_be_read_is_one_error(clone, tmp_path):
    (tmp_path / "hello.gz").write_bytes(gzip.compress(b"hello"))
    (tmp_path / "bad.gz").write_bytes(b"hello")
    (tmp_path / "cut.gz").write_bytes((tmp_path / "wiki.gz").read_bytes()[:-20])
    (tmp_path / "bad.zip").write_bytes(b"hello")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("fra.txt", "house\tmaison\n")
    for script, corpus, reason in [
        ("enwik8", "hello.gz", "there is no article in it"),
        ("enwik8", "bad.gz", "Not a gzipped file"),
        ("enwik8", "cut.gz", "ended before"),
        ("tatoeba", "bad.zip", "not a zip file"),
        ("tatoeba", "other.zip", "no item named 'deu.txt'"),
    ]:
        error = one_error(clone(script, corpus))
        assert corpus in error and reason in error and "; give " in error
        assert not list((tmp_path / "out").iterdir()), "the right file can be given next"
    assert clone("enwik8", "wiki.gz", TABLE=table_of(COMPLETE)).returncode == 0
    assert "river" in (tmp_path / "out" / "wikipedia.txt").read_text()


@pytest.mark.parametrize("script, text", [("enwik8", "wikipedia.txt"), ("tatoeba", "deu.txt")])
def test_a_folder_belongs_to_one_corpus(script, text, clone, tmp_path):
    first, table = tmp_path / CORPUS[script], table_of(COMPLETE, config=script)
    other = tmp_path / f"other{first.suffix}"
    other.write_text(first.read_text().replace("o", "u") + "\n")
    assert clone(script, first.name, TABLE=table).returncode == 0
    made = (tmp_path / "out" / text).read_text()
    assert f"out: it was made from {first.name}; give that file, or another OUT" in one_error(clone(script, other.name))
    first.rename(tmp_path / f"moved{first.suffix}")
    assert clone(script, f"moved{first.suffix}", TABLE=table).returncode == 0, "the same file by another name"
    (tmp_path / "out" / f"{text}.source").unlink()  # as earlier versions left it
    assert "it was made from another file" in one_error(clone(script, other.name))
    assert (tmp_path / "out" / text).read_text() == made and not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.parametrize("script", CORPUS)
def test_an_output_that_is_no_folder_is_one_error(script, clone, tmp_path):
    (tmp_path / "file").write_text("kept")
    assert "file: it is a file, not a folder" in one_error(clone(script, CORPUS[script], OUT="file"))
    assert "cannot be made or written" in one_error(clone(script, CORPUS[script], OUT="file/below"))
    assert "another RESULTS" in one_error(clone(script, CORPUS[script], RESULTS="file"))
    assert (tmp_path / "file").read_text() == "kept" and "none" in one_error(clone(script, "wiki", PYTHON="none"))


def test_the_page_names_the_steps_of_conversions_and_survives_a_table_with_few_rows(tmp_path):
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    path, page = tmp_path / "results" / "enwik8" / "study.json", tmp_path / "results" / "README.md"
    study = json.loads(path.read_text())
    for row in study["rows"]:
        row["steps"] = 50 if row["row"] in ("t2r", "elu", "rfa") else 1070
    path.write_text(json.dumps(study))
    command = [sys.executable, tmp_path / "launch" / "results_page"]
    subprocess.run(command, check=True)
    text = page.read_text("utf-8")
    assert "1,070 steps, conversions 50, 1 to 2 seeds" in text
    assert "one seed, models trained again, scored on 256 windows, not the whole test split" in text
    (path.parent / "analysis" / "study.json").unlink()  # then the models are those of the table
    path.write_text(json.dumps(study | {"rows": [row for row in study["rows"] if row["row"] != "transformer"]}))
    subprocess.run(command, check=True)
    assert "conversions 50" not in page.read_text("utf-8"), "older tables are shown"


@pytest.mark.slow
def test_wikipedia_becomes_a_table_and_figures(tmp_path):
    (tmp_path / "rows.py").write_text(CONFIG)
    pages = [
        f'<text xml:space="preserve">{"".join(PROSE.format(100 * a + b) for b in range(12))}</text>' for a in range(9)
    ]
    (tmp_path / "enwik8").write_text("\n".join(pages))
    rows = "transformer,t2r_scratch,t2r,phi_frozen,t2r_swapped"
    few = dict(CONFIG=str(tmp_path / "rows.py"), ROWS=rows, AGAIN="transformer", SIZES="", SEQUENCES="2")
    done = launch("enwik8", tmp_path / "enwik8", tmp_path, **few)
    assert done.returncode == 0, done.stderr
    study = json.loads((tmp_path / "results" / "study.json").read_text())
    assert [(row["row"], row["seed"]) for row in study["rows"]] == [
        ("transformer", 0), ("transformer", 1), ("t2r_scratch", 0), ("t2r", 0), ("phi_frozen", 0), ("t2r_swapped", 0)
    ]  # fmt: skip
    assert study["data"] == "text:wikipedia.txt" and study["failed"] == {}
    analysis = json.loads((tmp_path / "results" / "analysis" / "analysis.json").read_text())
    series = {"transformer", "before finetuning", "finetuned", "finetuned, φ frozen", "random initialisation"}
    assert {model["series"] for model in analysis["models"]} == series
    assert (tmp_path / "results" / "analysis" / "entropy.png").exists()
    texts = [path.read_text() for path in (tmp_path / "results").rglob("*.json")]
    assert not [text for text in texts if str(tmp_path) in text], "no path of this machine"
    again = launch("enwik8", tmp_path / "enwik8", tmp_path, **few)
    assert again.returncode == 0 and "begun" not in again.stderr


@pytest.mark.slow
def test_a_zip_of_pairs_becomes_a_table(tmp_path):
    pytest.importorskip("sacrebleu")
    (tmp_path / "rows.py").write_text(PAIRS_CONFIG)
    words = ["house", "table", "river", "garden", "street", "window", "letter", "bridge", "mountain", "doctor"]
    with zipfile.ZipFile(tmp_path / "deu-eng.zip", "w") as file:
        file.writestr("deu.txt", "".join(f"the {a} and the {b}\tdas {a} und {b}\n" for a in words for b in words))
    few = dict(CONFIG=str(tmp_path / "rows.py"), ROWS="transformer,t2r_75", SCALE="0.1")
    done = launch("tatoeba", tmp_path / "deu-eng.zip", tmp_path, SEEDS="0", **few)
    assert done.returncode == 0, done.stderr
    study = json.loads((tmp_path / "results" / "study.json").read_text())
    assert [(row["row"], row["steps"], row["cross_k"]) for row in study["rows"]] == [
        ("transformer", 1, None), ("t2r_75", 4, 32)
    ]  # fmt: skip
    assert study["data"] == "tsv:deu.txt" and "bleu" in (tmp_path / "results" / "study.md").read_text()
