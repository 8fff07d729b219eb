"""The notebooks of colab/: tidy, executed, named by the README's badges, and running from top to bottom."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.test_import import with_tokenizer
from tests.importers.make_references import FOLDER

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
LARGEST = 400_000  # bytes
ON_A_MACHINE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|Users|usr|opt|mnt|content)/")  # the start of such a path
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def images(notebook: dict) -> list[bytes]:
    """The plots among the outputs, as PNG files."""
    shown = [output.get("data", {}) for cell in code_cells(notebook) for output in cell["outputs"]]
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


def check_outputs(notebook: dict) -> None:
    """No cell failed, each was run once, in order, and there are plots that are not empty."""
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    drawn = images(notebook)
    assert drawn and all(image.startswith(b"\x89PNG") and len(image) > 2000 for image in drawn)


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["attention", "convert", "speed"]


@each_notebook
def test_is_executed_and_tidy(path):
    text, notebook = path.read_text("utf-8"), read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert text == json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert len(text) < LARGEST
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}  # no widgets, nothing of a machine
    assert not [cell["id"] for cell in notebook["cells"] if cell["metadata"]]
    assert not ON_A_MACHINE.findall(text)
    check_outputs(notebook)


@each_notebook
def test_says_why_before_each_code_cell(path):
    kinds = [cell["cell_type"] for cell in read(path)["cells"]]
    assert kinds == ["markdown", *["markdown", "code"] * (len(kinds) // 2)]


@each_notebook
def test_code_passes_the_linter(path):
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run([sys.executable, "-m", "ruff", *command, path], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_badges_lead_to_the_notebooks_of_the_repository_they_install():
    badge = r"https://colab\.research\.google\.com/github/([\w./-]+)/blob/main/(colab/\w+\.ipynb)"
    in_readme = re.findall(badge, (ROOT / "README.md").read_text("utf-8"))
    assert sorted(name for _, name in in_readme) == [f"colab/{path.name}" for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        notebook = read(path)
        (repository,) = re.findall(r'^REPOSITORY = "https://github.com/(\S+)"', _source(code_cells(notebook)[0]), re.M)
        assert re.findall(badge, _source(notebook["cells"][0])) == [(repository, f"colab/{path.name}")]
        assert (repository, f"colab/{path.name}") in in_readme


def _source(cell: dict) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_model_of_the_hub_is_imported_or_the_built_in_one_is_used(is_cached, tmp_path):
    """convert.ipynb without a network: a small Llama is in the hub's cache under the model's name, or nothing is."""
    pytest.importorskip("huggingface_hub")
    cells = [_source(cell) for cell in code_cells(read(ROOT / "colab/convert.ipynb"))]
    (hub_name,) = {name for cell in cells for name in re.findall(r'NAME = "([^"]+)"', cell)}
    if is_cached:
        repository = tmp_path / "hub" / "hub" / f"models--{hub_name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        with_tokenizer(shutil.copytree(FOLDER / "llama", repository / "snapshots" / ("0" * 40)))
    (find,) = [cell for cell in cells if "def find_model" in cell]
    program = f"from pathlib import Path\nimport t2r\nNAME = {hub_name!r}\nFOLDER = Path('runs/it')\n{find}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    last = run.stdout.splitlines()[-1]
    assert last.startswith("runs/it/transformer 2 layers" if is_cached else "builtin:stories 6 layers")
    assert ("cannot be downloaded" in run.stdout) != is_cached


@pytest.mark.slow
@each_notebook
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    """In an empty folder, on the CPU, where the Hugging Face hub cannot be reached."""
    reason = "the notebooks are executed by nbclient and ipykernel: pip install -r tests/requirements.txt"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    # One device, as on Colab, and the compiler as people have it: not with the flags of conftest.py.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    offline = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    for name, value in (offline | {"PYTHONPATH": os.pathsep.join(paths)}).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    check_outputs(notebook)
