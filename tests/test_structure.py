"""The house as README says it is: what imports what, and what is loaded when."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from t2r import kernels
from t2r.attention import linear
from t2r.attention.feature_map import T2R, Features
from t2r.kernels import support
from tests.conftest import error

ROOT = Path(__file__).parents[1]
# From the top to the bottom: a file imports from its own line or from lines below it.
ORDER = [
    {"__main__"},
    {"commands"},
    {"quickstart", "workflow"},
    {"benchmark", "export", "serve"},
    {"analysis"},
    {"training"},
    {"evaluation"},
    {"conversion", "decode"},
    {"importers"},
    {"store"},
    {"data"},
    {"model"},
    {"attention"},
    {"kernels"},
    {"page"},
    {"batch", "dropout", "normalizer", "layout", "environment", "processes", "files", "extras", "compilation_cache"}
    | {"plots", "user_cache", "integers"},
    {"console", "errors"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def rooms_imported(path: Path) -> set[str]:
    """The folders or files of t2r that a file imports from, wherever the import stands."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "t2r":
            rooms.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("t2r."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("t2r."))
    return rooms


def test_imports_go_one_way():
    wrong = []
    for path in sorted((ROOT / "t2r").rglob("*.py")):
        room = path.relative_to(ROOT / "t2r").parts[0].removesuffix(".py")
        if room in ("__init__", "configs"):  # the API may import all; configs are read by training, and import it
            continue
        wrong += [
            f"{path.relative_to(ROOT)} imports t2r.{other}"
            for other in rooms_imported(path) - {room}
            if LEVEL[other] < LEVEL[room] or (LEVEL[other] == LEVEL[room] and (ROOT / "t2r" / other).is_dir())
        ]
    assert not wrong, wrong


def loaded_by(*imports: str) -> set[str]:
    program = (
        f"import sys, json; {'; '.join(f'import {name}' for name in imports)}; print(json.dumps(list(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(json.loads(run.stdout))


def test_importing_the_package_loads_nothing_else():
    heavy = {"jax", "flax", "orbax", "grain", "numpy", "tensorflow", "tensorflow_datasets", "matplotlib", "torch"}
    assert not heavy & loaded_by("t2r")


def test_generating_on_a_cpu_loads_no_kernel():
    """Nothing of Pallas beyond what JAX and Flax load themselves, and no file that imports private parts of JAX."""
    loaded = loaded_by("t2r.decode.generate") - loaded_by("jax", "flax.nnx", "jax.extend.core")
    assert not [name for name in loaded if "pallas" in name or name.startswith(("jax._src", "jaxlib"))]
    private = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "t2r").rglob("*.py")
        if "jax._src" in path.read_text()
    }
    assert private and not private & loaded


def test_heavy_packages_are_loaded_by_those_who_need_them():
    """Commands that neither plot nor prepare data start without matplotlib and tensorflow-datasets."""
    loaded = loaded_by("t2r.decode.text", "t2r.conversion.directory", "t2r.evaluation.score", "t2r.training.trainer")
    heavy = {"matplotlib", "tensorflow_datasets", "sacrebleu", "tokenizers", "gguf", "torch", "tensorboardX"}
    assert not heavy & loaded


def test_training_changes_nothing_at_import():
    program = """
import logging, sys, threading
before = threading.excepthook, [logging.getLogger(name).level for name in ("absl", "asyncio")]
import t2r.training.trainer
assert (threading.excepthook, [logging.getLogger(name).level for name in ("absl", "asyncio")]) == before
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_where_jax_lacks_what_a_kernel_needs_the_plain_form_is_used(monkeypatch, capsys):
    """With one line that says so, however often the kernel is wanted."""

    def missing(name: str):
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(kernels, "importlib", SimpleNamespace(import_module=missing))
    monkeypatch.setattr(support, "this_device", lambda: support.Device("gpu", "NVIDIA H200", (9, 0)))
    kernels.load.cache_clear()
    q, k = (jax.nn.relu(jax.random.normal(jax.random.key(i), (2, 160, 2, 16), jnp.bfloat16)) for i in range(2))
    v = jax.random.normal(jax.random.key(2), (2, 160, 2, 16), jnp.bfloat16)
    given = Features(q[:, :, :, None]), Features(k), v, T2R.normalizer
    outs = [linear.causal_attention(*given, kernels="auto")[0] for _ in range(2)]
    kernels.load.cache_clear()
    assert error(outs[1], linear.chunked(*given)[0]) == 0
    printed = capsys.readouterr().err
    assert printed.count("computing without them") == 1 and "attention_chunked" in printed


@pytest.mark.parametrize("path", ["requirements.txt", "tests/requirements.txt"])
def test_the_lists_of_packages_agree(path):
    """requirements.txt has the package's dependencies and the extras of its commands; the tests' file has theirs."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if path == "requirements.txt":
        names = ("hub", "gguf", "translation", "data", "export", "serve")
        wanted = project["dependencies"] + [line for name in names for line in extras[name]]
    else:
        wanted = extras["test"]
    wanted = [line for line in wanted if not line.startswith("t2r[")]
    lines = [line.partition("#")[0].strip() for line in (ROOT / path).read_text().splitlines()]
    normal = lambda line: line.replace('"', "'").replace(" ", "")  # noqa: E731
    assert sorted(normal(line) for line in lines if line) == sorted(map(normal, wanted))
