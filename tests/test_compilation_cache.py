"""Where compiled programs are kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK_TO_COMPILE
from t2r.compilation_cache import LEAST_SECONDS, cache_folder, use_compilation_cache
from tests.damages import snapshot

ROOT = Path(__file__).parents[1]


def test_the_folder_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().parent == tmp_path / "t2r"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # which the standard says to ignore
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder().parent == tmp_path / "home" / ".cache" / "t2r"


def test_what_the_environment_says_goes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(cache_folder())
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == LEAST_SECONDS
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@pytest.mark.slow
def test_commands_keep_their_programs_unless_told_not_to(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": QUICK_TO_COMPILE, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    model = ROOT / "t2r" / "pretrained" / "tiny_lm"
    before = snapshot(model)

    def files_after(folder, **variables):
        command = [sys.executable, "-m", "t2r", "generate", "--model=builtin:tiny_lm", "--length=4"]
        settings = {**environment, "XDG_CACHE_HOME": str(tmp_path / folder), **variables}
        subprocess.run(command, cwd=ROOT, env=settings, check=True, capture_output=True)
        return list((tmp_path / folder).rglob("*-cache"))

    assert files_after("on") and not files_after("off", JAX_ENABLE_COMPILATION_CACHE="false")
    assert snapshot(model) == before
