"""t2r study: rows in processes of their own, and what a kill leaves of them."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from t2r.errors import InputError
from t2r.files import exclusive
from t2r.workflow import study
from t2r.workflow.study import Row, Study, markdown, rows_of, training_seconds
from tests.training.runs import ROOT, environment

CONFIG = """
from t2r.training.config import architecture, default_config, pretrained

ROWS = {"transformer": "", "t2r": "t2r", "elu_scratch": "elu"}

def get_config(row="transformer"):
    config = default_config()
    config.convert.feature_map = ROWS[row]
    config.data.update(vocab_size=300, length=16, batch=2)
    config.optimizer.warmup_steps = 1
    config.log_every, config.checkpoint_every = 2, 2
    config.steps = 4
    if row == "t2r":
        config.init_from, config.model, config.steps = "none", pretrained(), 40
    else:
        config.model = architecture("tiny_lm", layers=1, width=16, heads=1, feedforward=16)
    return config
"""

PAIRS_CONFIG = """
from t2r.training.config import architecture, default_config, pretrained
from t2r.training.rows import ROWS, translation_row

EVALUATE = ("--beam=1",)

def get_config(name="transformer"):
    config = default_config()
    row = translation_row(config, name)
    config.data.update(vocab_size=290, length=40, batch_tokens=256, buckets=1)
    config.optimizer.warmup_steps = 1
    config.log_every, config.checkpoint_every = 2, 2
    config.average_checkpoints = 2
    if row.from_scratch:
        config.model, config.steps = architecture("micro_mt"), 4
    else:
        config.init_from, config.model, config.steps = "none", pretrained(), 40
    return config
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "rows.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def pairs_config(tmp_path):
    path = tmp_path / "pairs_rows.py"
    path.write_text(PAIRS_CONFIG)
    return str(path)


@pytest.fixture
def pairs_file(tmp_path):
    """100 pairs, some of them in each split."""
    colors = ["red", "blue", "green", "old", "new", "big", "small", "fast", "slow", "warm"]
    things = ["house", "table", "river", "garden", "street", "window", "letter", "bridge", "mountain", "doctor"]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"the {a} {b}\t{b} {a} the\n" for a in colors for b in things))
    return path


def test_the_rows_of_a_config():
    rows = rows_of("enwik8")
    assert rows[0] == "transformer" and {"t2r_swapped", "elu_swapped", "t2r_75", "softmax", "t2r_window"} <= set(rows)
    assert "t2r_75_swapped" not in rows and Row("t2r_swapped", 2).variant == "t2r"
    table_2 = rows_of("tatoeba")
    assert {"elu_scratch", "rfa_scratch", "t2r_scratch", "elu", "rfa", "t2r", "t2r_75", "performer"} <= set(table_2)
    assert {"softmax", "t2r_swapped", "performer_swapped"} <= set(table_2)
    with pytest.raises(InputError, match="has no table ROWS"):
        rows_of("tiny_lm")


def test_the_transformer_comes_first_and_what_waits_for_it_last(config, tmp_path):
    rows = Study(config, "text:x", tmp_path / "out")
    assert rows._with_bases(["t2r", "elu_scratch"]) == ["transformer", "elu_scratch", "t2r"]
    assert rows._with_bases(["elu_scratch"]) == ["elu_scratch"]


def test_seconds_are_those_of_the_logged_speeds(tmp_path):
    lines = [{"step": 2, "steps_per_second": 2}, {"step": 2, "valid_perplexity": 3.0}]
    lines += [{"step": 6, "steps_per_second": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert training_seconds(tmp_path / "metrics.jsonl") == 1 + 4


def test_a_shorter_study_has_fewer_of_all_steps(config, tmp_path):
    half, whole = (Study(config, "text:x", tmp_path / "out", scale=scale) for scale in (0.5, 1.0))
    row = Row("t2r", 0)
    assert half._load(row).steps == 20 and half._load(row).checkpoint_every == 1 and half._load(row).eval_every == 0
    flags = half._train_flags(row, half._load(row))
    assert {"--config.steps=20", "--config.optimizer.warmup_steps=1", "--config.checkpoint_every=1"} <= set(flags)
    assert not [flag for flag in whole._train_flags(row, whole._load(row)) if flag.startswith("--config.steps")]


def test_all_rows_of_a_folder_are_written_whichever_command_finished_them(config, tmp_path):
    rows = [("elu_scratch", 0), ("transformer", 1), ("transformer", 0)]
    for name, seed in rows:
        result = dict.fromkeys(study.COLUMNS, 1) | {"row": name, "seed": seed}
        (tmp_path / f"{Row(name, seed).key}.json").write_text(json.dumps(result))
    for name in ("analysis", "notes"):
        (tmp_path / f"{name}.json").write_text('{"of": "others"')  # is not read
    content = Study(config, "text:x", tmp_path)._write()
    assert [(row["row"], row["seed"]) for row in content["rows"]] == sorted(rows, key=lambda r: (r[0][0] != "t", r[1]))


ROW = dict.fromkeys(study.COLUMNS, 1) | {"row": "transformer", "seed": 0}


@pytest.fixture
def begun(config, text_file, tmp_path):
    """A study of which one row is finished."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "transformer.json").write_text(json.dumps(ROW))
    request = {"config": "rows", "data": f"text:{text_file}", "split": "test", "fields": ["steps=4", "log_every=1"]}
    (out / "request.json").write_text(json.dumps(request | {"scale": 1.0, "files": study._digests(request["data"])}))
    return out


def refusal(config, data, out, fields=("log_every=1", "steps=4")):
    """Why a folder is refused; empty if it is not."""
    try:
        Study(config, data, out, list(fields))._check_request()
    except InputError as error:
        return str(error)
    return ""


def test_a_folder_is_of_one_study(config, text_file, begun):
    """Fields in another order are no other study; a changed text is."""
    data = f"text:{text_file}"
    assert refusal(config, data, begun) == ""
    assert "fields was" in refusal(config, data, begun, ["steps=5", "log_every=1"])
    before = text_file.read_text()
    text_file.write_text(before.replace("e", "a"))
    assert "the data has changed since" in refusal(config, data, begun)
    text_file.write_text(before)
    (begun / "request.json").unlink()
    assert "has rows (transformer), and no request.json" in refusal(config, data, begun)
    (begun / "transformer.json").unlink()
    assert refusal(config, data, begun) == "" and refusal(config, data, begun, ["steps=5"]) == "", "no row has begun"


@pytest.mark.parametrize(
    "content, message",
    [
        ({"row": "transformer", "seed": 0}, "lacks k, perplexity"),
        (ROW | {"row": "t2r"}, "is of row 't2r' with seed 0"),
        (ROW | {"seed": "0"}, "with seed '0'"),
        (ROW | {"perplexity": "many"}, "perplexity is 'many', which is no figure"),
    ],
)
def test_a_damaged_row_is_named_before_anything_runs(content, message, config, text_file, begun):
    (begun / "transformer.json").write_text(json.dumps(content))
    said = refusal(config, f"text:{text_file}", begun)
    assert message in said and "remove it: the row is then done again" in said


def test_a_training_that_outlived_its_study_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "WAIT", 0.02)
    entered = threading.Event()

    def train():
        with exclusive(tmp_path):
            entered.set()
            time.sleep(0.1)

    thread = threading.Thread(target=train)
    thread.start()
    entered.wait()
    study._wait_until_free(tmp_path, threading.Event())
    thread.join(timeout=0.05)
    assert not thread.is_alive() and capsys.readouterr().err.count("waiting") == 1


def test_rows_share_the_memory_of_a_device(monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    assert study.child_environment(3)[name] == "0.300" and name not in study.child_environment(1)
    monkeypatch.setenv(name, "0.1")
    assert study.child_environment(3)[name] == "0.1"


def test_a_table_has_a_line_for_each_row():
    row = dict(row="t2r", seed=0, k=32, perplexity=19.6, valid_perplexity=None, steps=10, trained_tokens=9, seconds=1)
    assert markdown([row]).splitlines()[2] == "| t2r | 0 | 32 | 19.60 |  | 10 | 9 | 1 |"
    row = dict(row="t2r", seed=0, k=4, cross_k=32, bleu=28.7, chrf=60.12, valid_perplexity=3.0, steps=10, seconds=1)
    table = markdown([row], study.columns("tsv:pairs.tsv")).splitlines()
    assert table[0].startswith("| row | seed | k | cross_k | bleu")
    assert table[2].startswith("| t2r | 0 | 4 | 32 | 28.70")


def test_compressed_text_is_text(tmp_path):
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"Once upon a time\n"))
    assert study._data_problems(f"text:{tmp_path / 'text.txt.gz'}", "train") == []


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rows=t3r,elu_scratch,elv"], "unknown row 't3r': did you mean 't2r'?"),
        (["--set=steps=many", "--set=log_every=x"], "log_every=x"),
        (["--rows=elu_scratch_swapped"], "is not converted from the transformer"),
        (["--set=data.bach=3", "--set=log_every=x"], "log_every=x"),
        (["--set=data.bach=3"], "did you mean 'data.batch'?"),
        (["--set=steps=many"], "--set=steps=many: write a whole number such as 4"),
        (["--set=steps"], "give FIELD=VALUE"),
        (["--set==3"], "give FIELD=VALUE"),
        (["--rows=,,"], "--rows names no row"),
        (["--data=text:/nowhere.txt"], "no text file /nowhere.txt: check the path"),
        (["--data=tsv:/nowhere.tsv"], "/nowhere.tsv"),
        (["--data=tsv:{pairs}"], "translation models sentence pairs"),
        (["--config={pairs_config}"], "language models need text"),
        (["--scale=0"], "--scale"),
        (["--scale=nan", "--seeds=x"], "--scale=nan: write a finite number"),
        (["--set=steps=-5"], "config.steps=-5 must be at least 1"),
        (["--data=text:/"], "/ is a folder"),
        (["--data="], "use text:PATH"),
        (["--split=dev"], "unknown split 'dev': choose one of"),
        (["--output="], "the name of the output is empty"),
        (["--set=seed=3"], "--set=seed=3: --seeds chooses it"),
        (["--set=steps=0"], "config.steps=0"),
        (["--seeds=a"], "give whole numbers"),
        (["--jobs=0"], "--jobs=0"),
        (["--config=none"], "no config file none"),
        (["--config=enwik8:t2r"], "leave out the variant"),
        (["--output={text}"], "it is a file, not a folder"),
        (["--config=tiny_lm"], "has no table ROWS"),
    ],
)
def test_bad_input_gets_one_clear_error(config, pairs_config, text_file, pairs_file, tmp_path, call, flags, message):
    given = [f"--config={config}", f"--data=text:{text_file}", f"--output={tmp_path / 'out'}"]
    files = dict(text=text_file, pairs=pairs_file, pairs_config=pairs_config)
    status, printed = call("study", *given, *(flag.format(**files) for flag in flags))
    assert status == 2 and printed.startswith("error: ") and message in printed, printed
    assert "Traceback" not in printed and not list(tmp_path.glob("out/*"))


CHILD = """#!/bin/bash
# In place of `t2r train`: it begins, and after SIGTERM saves, slowly. Ctrl-C ends it at once, before the study.
trap 'sleep 0.5; touch saved; exit 143' TERM
trap 'exit 130' INT
touch begun
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_a_study_that_is_stopped_ends_its_trainings_and_calls_them_no_failures(ended_by, config, text_file, tmp_path):
    (tmp_path / "child").write_text(CHILD)
    (tmp_path / "child").chmod(0o755)
    flags = [f"--config={config}", f"--data=text:{text_file}", "--output=out", "--rows=transformer,t2r", "--jobs=2"]
    program = (
        f"import sys; sys.executable = './child'; from t2r.__main__ import main; sys.exit(main({['study', *flags]}))"
    )
    options = dict(cwd=tmp_path, env=environment() | {"PYTHONPATH": str(ROOT)}, start_new_session=True)
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, **options)
    deadline = time.monotonic() + 120
    while not (tmp_path / "begun").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    if ended_by == signal.SIGINT:
        os.killpg(process.pid, ended_by)  # as a terminal does: to all processes
    else:
        process.send_signal(ended_by)
        process.send_signal(ended_by)  # as `timeout` does: twice
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + ended_by, said
    assert said.rstrip().endswith("run the same command to resume") and "failed" not in said and "t2r:" not in said
    assert (tmp_path / "saved").exists() or ended_by == signal.SIGINT, "the study waits for its trainings"
    assert not (tmp_path / "out" / "study.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_a_killed_study_continues_and_redoes_nothing(kind, config, pairs_config, text_file, pairs_file, tmp_path):
    """kill -9 while a row trains: the row goes on from a checkpoint, and what was finished is not touched."""
    out = tmp_path / "out"
    if kind == "pairs":
        pytest.importorskip("sacrebleu")
    given = [config, f"text:{text_file}"] if kind == "text" else [pairs_config, f"tsv:{pairs_file}"]
    command = [sys.executable, "-m", "t2r", "study", f"--config={given[0]}", f"--data={given[1]}",
               f"--output={out}", "--rows=t2r,t2r_swapped", "--jobs=2"]  # fmt: skip
    options = dict(cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True)
    process = subprocess.Popen(command, **options)
    metrics = out / "t2r" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # a machine that goes down takes all processes with it
    process.wait()
    assert not (out / "t2r.json").exists()
    assert "transformer" in [row["row"] for row in json.loads((out / "study.json").read_text())["rows"]]
    kept = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in finished(out)}
    assert out / "transformer.json" in kept
    again = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in kept} == kept
    assert "transformer: finished before" in again.stderr and "t2r: begun" in again.stderr
    written = json.loads((out / "study.json").read_text())
    rows = {row["row"]: row for row in written["rows"]}
    assert list(rows) == ["transformer", "t2r", "t2r_swapped"] and written["failed"] == {}
    assert (rows["t2r"]["steps"], rows["t2r_swapped"]["steps"]) == (40, 0) and rows["t2r"]["seconds"] > 0
    assert rows["t2r_swapped"]["seconds"] == 0, "of training, not of translating"
    if kind == "text":
        assert rows["t2r"]["trained_tokens"] == 40 * 2 * 16 and rows["t2r"]["perplexity"] > 1
        assert [row["k"] for row in rows.values()] == [None, 32, 32]
    else:
        assert rows["t2r"]["bleu"] == rows["t2r"]["test"]["bleu"] and rows["t2r"]["test"]["beam"] == 1
        assert [(row["k"], row["cross_k"]) for row in rows.values()] == [(None, None), (4, 32), (4, 32)]
    prepared = sorted(path.name.partition("-")[0] for path in (out / "prepared").iterdir())
    assert prepared == ["tokenizer", "tokens", "tokens"], "made once for all rows: a tokenizer, and two splits"
    assert (out / "study.md").read_text().count("\n") == 5
    steps = [line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    assert steps == sorted(set(steps)), "no step was logged twice"
    third = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert third.returncode == 0 and "begun" not in third.stderr
    other = subprocess.run([*command, "--set=steps=6"], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert other.returncode == 2 and "holds another study" in other.stderr


def finished(out: Path) -> list[Path]:
    """The files of rows that are finished: their results, logs and models."""
    rows = [path.stem for path in out.glob("*.json") if path.stem not in ("request", "study")]
    files = [out / f"{row}{suffix}" for row in rows for suffix in (".json", ".log")]
    return files + [Path(folder) / name for row in rows for folder, _, names in os.walk(out / row / "model")
                    for name in names]  # fmt: skip
