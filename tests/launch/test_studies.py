"""launch/enwik8 and launch/tatoeba: from the raw corpus to tables and figures, at the smallest size."""

import json
import os
import subprocess
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
