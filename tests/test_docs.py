"""README.md and docs/: every command line parses, every path and link exists, every Python import resolves."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import t2r
import t2r.__main__ as entry
from t2r.errors import InputError
from t2r.training.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = r"(?:t2r|configs|launch|tests|results|docs|colab|\.ci|\.github)"
PATH = re.compile(rf"(?<![\w./-]){FOLDERS}/[\w./*-]*(?::[\w./]+)?")
PARSED = "the flags are valid"


def blocks(page: Path) -> list[str]:
    """The code blocks of a page, fenced or indented by four spaces after an empty line."""
    text = page.read_text("utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?<=\n\n)(?: {4}.*\n(?:\n(?= {4}))*)+", text)
    return fenced + [re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in indented]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """The arguments of every t2r command in the code blocks, also at the end of a pipe or after `launch/NAME --`."""
    found = []
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if re.search(r"\bt2r |^launch/", line) else []
            if "|" in words:
                words = words[words.index("|") + 1 :]
            if words[:1] == ["t2r"]:
                found.append(words[1:])
            elif words[:3] == ["python", "-m", "t2r"]:
                found.append(words[3:])
            elif words[:1] and words[0].startswith("launch/") and "--" in words:
                found.append(words[words.index("--") + 1 :])
    return [arguments for arguments in found if "--help" not in arguments]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def path_problem(name: str) -> str | None:
    """What is wrong with `PATH`, `PATH.py:FUNCTION`, `configs/NAME.py:VARIANT`, or a pattern such as `results/*.md`."""
    path, _, part = name.partition(":")
    path = path.rstrip(".")
    if not any(ROOT.glob(path.rstrip("/"))):
        return f"{path} does not exist"
    if part and path.startswith("configs/"):
        load_config(f"{ROOT / path}:{part}")
    elif part:
        last = part.rstrip(".").split(".")[-1]
        defines = rf"^\s*(?:def|class) {last}\b|^\s*{last}\b.*="
        if not re.search(defines, (ROOT / path).read_text("utf-8"), re.MULTILINE):
            return f"{path} does not define {last}"
    return None


def test_command_lines_parse(call, monkeypatch):
    parse = entry.parse_flags

    def parse_and_stop(command, arguments):
        parse(command, arguments)
        raise InputError(PARSED)

    monkeypatch.setattr(entry, "parse_flags", parse_and_stop)
    monkeypatch.chdir(ROOT)
    lines = [(page.name, arguments) for page in PAGES for arguments in commands(page)]
    assert len(lines) > 40
    outcomes = {(name, shlex.join(arguments)): str(call(*arguments)[1]) for name, arguments in lines}
    assert {line: outcome for line, outcome in outcomes.items() if PARSED not in outcome} == {}


def test_a_wrong_command_line_is_noticed(call):
    for line in ("train --config=convert --workdir=w --config.stepz=2", "generate --prompt=a", "convert --modl=a"):
        assert "error:" in str(call(*line.split())[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_exist(page):
    text = prose(page)
    spans = re.findall(r"`([^`\n]+)`", text) + [line for block in blocks(page) for line in block.splitlines()]
    named = {match for span in spans for match in PATH.findall(span)}
    outputs = {word for line in blocks(page) for word in re.findall(r"--(?:output|workdir)=(\S+)", line)}
    problems = [problem for name in sorted(named - outputs) if (problem := path_problem(name))]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists():
            problems.append(f"link {target} leads nowhere")
        elif anchor and anchor not in anchors(file):
            problems.append(f"link {target}: no such heading")
    assert problems == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text("utf-8")], ids=lambda p: p.name
)
def test_python_examples_import_what_exists(page):
    for source in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE):
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("t2r"):
                module = importlib.import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "t2r":
                assert node.attr in t2r.__all__


def test_the_readme_is_short_and_the_index_complete():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert [page.name for page in PAGES[1:] if page.name != "README.md" and f"({page.name})" not in index] == []


def test_imports_go_the_way_the_readme_says():
    line = next(line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if "commands → " in line)
    levels = [[name.strip() for name in level.split(",")] for level in line.split("→")]
    rank = {name: number for number, level in enumerate(levels) for name in level}
    package = ROOT / "t2r"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders == rank.keys() - {"leaves"}
    problems = []
    for file in package.rglob("*.py"):
        top = file.relative_to(package).parts[0]
        if top in ("__init__.py", "__main__.py", "configs"):
            continue
        importer = top if top in folders else "leaves"
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            for imported in _imported(node):
                target = imported if imported in folders else "leaves"
                if target != importer and rank[importer] >= rank[target]:
                    problems.append(f"{file.relative_to(ROOT)} imports {imported}")
    assert problems == []


def _imported(node: ast.AST) -> list[str]:
    """The folders or modules directly under t2r that an import statement names."""
    if isinstance(node, ast.Import):
        return [name.name.split(".")[1] for name in node.names if name.name.startswith("t2r.")]
    if isinstance(node, ast.ImportFrom) and node.module == "t2r":
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("t2r."):
        return [node.module.split(".")[1]]
    return []


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path):
    """As it stands there, from the model that ships to text, in an empty folder."""
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", example]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "perplexity" in run.stdout and (tmp_path / "runs/stories_rnn/model.safetensors").exists()
