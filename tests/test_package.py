"""The package as people get it: a wheel, installed in an empty environment, used outside the clone."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The supported version that is farthest from this one, in which the other tests run.
OTHER_PYTHON = "python3.13" if sys.version_info < (3, 12) else "python3.11"
TEN_LINES = """
import t2r

model = t2r.load("builtin:tiny_lm")
assert t2r.__version__ and not isinstance(model.model, str)
config = t2r.load_config("tiny_lm:t2r")
config.steps, config.log_every, config.data.batch = 2, 1, 4
result = t2r.train(config, "runs/tiny_t2r")
rnn = t2r.merge(t2r.load(result["model"]))
text = t2r.generate(rnn, "Return a new", length=5, temperature=0.8)
assert isinstance(text, str)
assert len(t2r.generate(rnn, ["Return", "A"], length=3)) == 2
swapped = t2r.convert(model, features=8, keep="every_4th")
assert [spec.kind for spec in swapped.model.config.attention].count("softmax") == 1
t2r.save(rnn, "runs/tiny_rnn")
assert t2r.generate(t2r.load("runs/tiny_rnn"), "Return a new", length=5) == t2r.generate(rnn, "Return a new", length=5)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the clone."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("t2r", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "source")]
    subprocess.run(command, check=True, cwd=folder)
    return next(folder.glob("t2r-*.whl"))


def find(python: str) -> str | None:
    """A Python of this version that runs: on the path, or one of pyenv's."""
    candidates = [shutil.which(python), *map(str, Path.home().glob(f".pyenv/versions/*/bin/{python}"))]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.mark.slow
def test_a_wheel_works_outside_the_clone(wheel, tmp_path):
    interpreter = find(OTHER_PYTHON)
    if interpreter is None:
        pytest.skip(f"{OTHER_PYTHON} is not installed")
    subprocess.run([interpreter, "-m", "venv", str(tmp_path / "env")], check=True)
    commands = tmp_path / "env" / "bin"
    subprocess.run([commands / "python", "-m", "pip", "install", "-q", "--no-compile", str(wheel)], check=True)
    hidden = ("PYTHONPATH", "XLA_FLAGS", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*arguments: str | Path) -> subprocess.CompletedProcess:
        done = subprocess.run(arguments, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def result(*arguments: str) -> dict:
        return json.loads(run(commands / "t2r", *arguments).stdout.splitlines()[-1])

    made = result("generate", "--model=builtin:stories", "--prompt=Once upon a time", "--length=5")
    assert made["tokens"] <= 5 and made["text"]
    run(commands / "python", "-c", textwrap.dedent(TEN_LINES))
    # What is not installed is named, with the extra that brings it.
    missing = subprocess.run(
        [commands / "t2r", "prepare", "--name=wikitext103"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert missing.returncode == 2 and "pip install 't2r[data]'" in missing.stderr, missing.stderr
