"""The command line, as a user meets it: real processes, their last line, their errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import make_model, micro
from t2r.convert import model_dir
from t2r.data.sources import load_documents

ROOT = Path(__file__).parents[2]


QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def t2r(*arguments, timeout=300, xla_flags=QUICK_TO_COMPILE):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags}
    return subprocess.run(
        [sys.executable, "-m", "t2r", *map(str, arguments)], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


def result(run):
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from conftest import PROSE
    from t2r.data.tokenizer import SentencePiece

    path = tmp_path_factory.mktemp("models") / "transformer"
    content = model_dir.Model(make_model(micro(vocab_size=300)), SentencePiece.train(PROSE, 300), {"history": []})
    model_dir.save(path, content)
    return path


def test_convert_evaluate_generate_merge(tmp_path, text_file):
    """The path of the README, on the model that ships: a random one would write half characters."""
    options = ["--model=builtin:tiny_lm", f"--output={tmp_path}/swapped", "--features=8", "--keep=1"]
    swapped = result(t2r("convert", *options))
    assert swapped["linear_layers"] == [0, 2, 3] and swapped["softmax_layers"] == [1]
    result(t2r("convert", f"--model={tmp_path}/swapped", f"--output={tmp_path}/merged", "--merge"))
    scores = result(t2r("evaluate", f"--model={tmp_path}/merged", f"--data=text:{text_file}", "--window=64"))
    assert {"perplexity", "perplexity_all", "bits_per_byte", "word_perplexity", "tokens"} <= scores.keys()

    state = tmp_path / "state"
    options = [f"--model={tmp_path}/merged", "--temperature=0.9", "--seed=3"]
    whole = t2r("generate", *options, "--prompt=The old", "--length=20")
    first = t2r("generate", *options, "--prompt=The old", "--length=8", f"--save_state={state}")
    second = t2r("generate", *options, f"--load_state={state}", "--length=12")
    assert result(first)["text"] + result(second)["text"] == result(whole)["text"]
    assert result(whole)["tokens_per_second"] > 0
    assert whole.stdout.startswith("The old" + result(whole)["text"]), "the text is streamed"
    both = result(t2r("generate", *options, "--prompt=The", "--prompt=A lazy fox", "--length=5"))
    assert len(both["text"]) == 2


def test_the_quickstart_runs_from_end_to_end(tmp_path):
    """On a text it has not seen, with few steps and short lengths; the page has everything inside."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(load_documents("builtin:pydoc", "test")))
    options = [f"--workdir={tmp_path}/run", f"--data=text:{text}", "--steps=4", "--lengths=8,16", "--batch=2"]
    run = t2r("quickstart", *options, xla_flags="")
    found = result(run)
    assert found["transformer_perplexity"] < found["t2r_perplexity"] < found["swapped_perplexity"]
    assert found["speedup"].keys() == {"8", "16"} == found["state_bytes"].keys()
    assert len(set(found["state_bytes"].values())) == 1
    page = Path(found["report"]).read_text()
    assert page.count("<svg") == 2 and "<table>" in page
    assert not any(outside in page for outside in ("<script src", "<link", 'src="http', "@import"))
    assert "merge" in (tmp_path / "run" / "t2r" / "provenance.json").read_text()


@pytest.mark.parametrize("command", ["train", "convert", "evaluate", "generate", "quickstart"])
def test_help_is_enough(command):
    run = t2r(command, "--help")
    assert run.returncode == 0 and f"python -m t2r {command}" in run.stdout and "--" in run.stdout
    listing = t2r("--help")
    assert listing.returncode == 0 and command in listing.stdout


def test_bad_input_gets_one_clear_error(model, tmp_path):
    def refused(*arguments):
        run = t2r(*arguments)
        assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
        return run.stderr

    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\0\1\2")
    given = f"--model={model}"
    assert "unknown command 'trian'" in refused("trian")
    assert "'t2rr'" in refused("convert", given, f"--output={tmp_path}/x", "--feature_map=t2rr")
    assert "features=0" in refused("convert", given, f"--output={tmp_path}/x", "--features=0")
    assert "exists already" in refused("convert", given, f"--output={tmp_path}")
    assert "binary" in refused("evaluate", given, f"--data=text:{binary}")
    assert "lenght" in refused("generate", given, "--lenght=5")
    assert "temperature=-1" in refused("generate", given, "--temperature=-1")
    assert "GiB are free" in refused("generate", given, "--prompt=The", "--length=999999999999")
    assert "--model" in refused("generate", "--prompt=The")
    assert not (tmp_path / "x").exists()
