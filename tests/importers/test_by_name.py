"""Models of the Hugging Face hub by name, wherever a model is named: imported once, and read from there afterwards."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import t2r
from t2r.store import model_dir
from tests.importers.test_hub import COMMIT, OLDER, ROOT, endpoint, repository, run, serving  # noqa: F401

pytest.importorskip("huggingface_hub")
LOAD = """
import json, sys, t2r
for name in sys.argv[1:]:
    loaded = t2r.load(name)
    print(json.dumps([loaded.provenance["history"][0], float(abs(loaded.model.embedding.table[...]).sum())]))
"""
DATA = "--data=builtin:stories"
COMMANDS = [
    ("generate",),
    ("evaluate", DATA),
    ("chat",),
    ("serve", "--port=0"),
    ("translate",),
    ("damage", DATA),
    ("convert", "--output=swapped"),
    ("convert", "--output=rnn", "--finetune"),
    ("export", "--output=exported"),
    ("export", "--output=exported", "--format=huggingface"),
    ("analyze", DATA, "--output=analysis"),
    ("benchmark", "decode", "--output=speed"),
    ("benchmark", "memory", "--output=memory"),
    ("benchmark", "serve"),
    ("benchmark", "translate", "--input=lines.txt"),
]


@pytest.fixture
def models(tmp_path):
    return tmp_path / "models"


def folder_of(models: Path, commit: str) -> Path:
    return models / "org" / "llama" / f"{commit}-{t2r.__version__}"


def loaded_by(run, *names: str, program: str = LOAD, **environment: str) -> tuple[list, str]:  # noqa: F811
    """What a program prints of each model that it loads, and what it says."""
    done = run("-c", program, *names, **environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.slow
def test_a_model_of_the_hub_is_imported_once(repository, run, models):  # noqa: F811
    with serving({"org/llama": repository}) as server:
        found = dict(**endpoint(server), T2R_MODELS=str(models))
        (first, second), said = loaded_by(run, "org/llama", "org/llama@v1", **found)
        assert [entry["commit"] for entry, _ in (first, second)] == [COMMIT, OLDER]
        assert f"org/llama is read from {folder_of(models, COMMIT)}" in said.splitlines()
        assert f"org/llama@v1 is read from {folder_of(models, OLDER)}" in said.splitlines()
        times = {path: path.stat().st_mtime_ns for path in models.rglob("*")}
        server.requests.clear()
        (again,), _ = loaded_by(run, "org/llama", **found)
        assert again == first and times == {path: path.stat().st_mtime_ns for path in times}
        assert not [path for path in server.requests if path.endswith("safetensors")]


@pytest.mark.slow
def test_what_was_imported_needs_neither_the_network_nor_the_original(repository, run, models, tmp_path):  # noqa: F811
    with serving({"org/llama": repository}) as server:
        (first,), _ = loaded_by(run, "org/llama", **endpoint(server), T2R_MODELS=str(models))
    offline = dict(HF_HUB_OFFLINE="1", T2R_MODELS=str(models))
    assert loaded_by(run, "org/llama", **offline)[0] == [first]
    shutil.rmtree(tmp_path / "home")
    assert loaded_by(run, f"org/llama@{COMMIT}", **offline)[0] == [first]


@pytest.mark.slow
def test_the_user_s_cache_and_two_processes_at_once(repository, run, tmp_path):  # noqa: F811
    """Both load the model, one imports it; what a killed process left is removed."""
    folder = folder_of(tmp_path / "cache" / "t2r" / "models", COMMIT)
    folder.with_name(f"{folder.name}.999999999.unfinished").mkdir(parents=True)
    with serving({"org/llama": repository}) as server, ThreadPoolExecutor() as pool:
        found = dict(**endpoint(server), XDG_CACHE_HOME=str(tmp_path / "cache"))
        results = list(pool.map(lambda name: loaded_by(run, name, **found), ["org/llama"] * 2))
    assert results[0][0] == results[1][0]
    assert sum("from the Hugging Face hub, or its cache" in said for _, said in results) == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


# A file system without locks, on which two processes import when both have seen that the model is not there.
UNLOCKED = """
import os, time
from pathlib import Path
from types import SimpleNamespace
from t2r import files
from t2r.importers import source

def flock(*_):
    raise OSError("no locks")

def together(*arguments, import_model=source.import_model):
    there = Path(os.environ["BOTH"])
    (there / str(os.getpid())).touch()
    while len(list(there.iterdir())) < 2:
        time.sleep(0.01)
    import_model(*arguments)

files.fcntl, source.import_model = SimpleNamespace(flock=flock, LOCK_EX=0, LOCK_NB=0), together
"""


@pytest.mark.slow
def test_two_processes_at_once_without_locks(repository, run, models, tmp_path):  # noqa: F811
    (tmp_path / "both").mkdir()
    folder = folder_of(models, COMMIT)
    with serving({"org/llama": repository}) as server, ThreadPoolExecutor() as pool:
        found = dict(**endpoint(server), T2R_MODELS=str(models), BOTH=str(tmp_path / "both"))
        load = lambda name: loaded_by(run, name, program=UNLOCKED + LOAD, **found)  # noqa: E731
        results = list(pool.map(load, ["org/llama"] * 2))
    assert results[0][0] == results[1][0]
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


@pytest.mark.slow
def test_a_path_goes_first_even_if_it_was_being_replaced(run, tmp_path, models):  # noqa: F811
    """A process that was killed while it replaced a directory leaves it under another name."""
    (tmp_path / "org").mkdir()
    model_dir.save(tmp_path / "org" / "tiny.999999999.old", model_dir.load("builtin:tiny_lm"))
    done = run("-c", LOAD, "org/tiny", folder=tmp_path, HF_HUB_OFFLINE="1", T2R_MODELS=str(models))
    assert done.returncode == 0 and not models.exists(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_names_of_the_hub(command, run, tmp_path):  # noqa: F811
    """Without a network each says the same."""
    (tmp_path / "lines.txt").write_text("a\n")
    environment = dict(HF_HUB_OFFLINE="1", T2R_MODELS=str(tmp_path / "models"))
    done = run("-m", "t2r", *command, "--model=org/none", folder=tmp_path, **environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "error: org/none is not on this machine, and the Hugging Face hub cannot be reached, and its cache does not "
        "have the model: check the name or the path, connect (HF_HUB_OFFLINE must not be 1), or download the model "
        "elsewhere and give its directory"
    )


@pytest.mark.slow
def test_errors_say_what_to_do(repository, run, models, tmp_path):  # noqa: F811
    without = "import sys; sys.modules['huggingface_hub'] = None; " + LOAD
    last = run("-c", without, "org/llama", T2R_MODELS=str(models)).stderr.splitlines()[-1]
    assert last.endswith("this needs the package huggingface_hub: pip install 't2r[hub]'")
    (tmp_path / "file").write_text("")
    with serving({"org/llama": repository}) as server:
        done = run("-c", LOAD, "org/llama", **endpoint(server), T2R_MODELS=str(tmp_path / "file"))
    assert done.stderr.splitlines()[-1].startswith(f"t2r.errors.InputError: cannot write {tmp_path / 'file'}/org/llama")


@pytest.mark.slow
def test_a_command_runs_with_a_name(repository, run, models):  # noqa: F811
    with serving({"org/llama": repository}) as server:
        found = dict(**endpoint(server), T2R_MODELS=str(models))
        named = run("-m", "t2r", "generate", "--model=org/llama", "--prompt=a b", "--length=4", **found)
    there = f"--model={folder_of(models, COMMIT)}"
    command = [sys.executable, "-m", "t2r", "generate", there, "--prompt=a b", "--length=4"]
    direct = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    text = lambda output: json.loads(output.splitlines()[-1])["text"]  # noqa: E731
    assert text(named.stdout) == text(direct.stdout) and text(direct.stdout)
