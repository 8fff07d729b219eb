"""Models of the Hugging Face hub by name, from a local server that speaks the part of its API that downloads need."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from t2r.importers import hub
from t2r.store import model_dir
from tests.commands.test_import import with_tokenizer
from tests.importers.make_references import FOLDER

pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).parents[2]
COMMIT, OLDER = "1" * 40, "2" * 40
DOWNLOAD = "import sys; from t2r.importers.hub import download; print(*download(sys.argv[1]), sep='\\n')"


class Server(ThreadingHTTPServer):
    """Repositories by name, each a folder; `gated/model` is gated, and `requests` has the paths that were asked for."""

    def __init__(self, repositories: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.requests = repositories, []


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(path)
        if path.startswith("/api/models/"):
            owner, model, *rest = path.removeprefix("/api/models/").split("/", 3)
        else:
            owner, model, *rest = path.removeprefix("/").split("/", 3)
        folder = self.server.repositories.get(f"{owner}/{model}")
        kind, revision = rest[0] if rest else "revision", (rest[1] if len(rest) > 1 else "main").partition("/")[0]
        if folder is None:
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if owner == "gated" and self.headers.get("Authorization") != "Bearer secret":
            return self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        if revision not in ("main", "v1", COMMIT, OLDER):
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        commit = OLDER if revision in ("v1", OLDER) else COMMIT
        if kind == "revision":
            siblings = [{"rfilename": name} for name in self.names(folder)]
            return self.json({"id": f"{owner}/{model}", "sha": commit, "siblings": siblings})
        if kind == "tree":
            sizes = [(name, (folder / name).stat().st_size) for name in self.names(folder)]
            return self.json([{"type": "file", "path": n, "size": size, "oid": f"{size:040}"} for n, size in sizes])
        name = path.split(f"/resolve/{revision}/")[1]
        content = (folder / name).read_bytes()
        self.send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit})

    @staticmethod
    def names(folder: Path) -> list[str]:
        return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]

    def json(self, content) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(repositories: dict[str, Path]):
    server = Server(repositories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A tiny Llama as a repository has it: with weights in other formats, and a folder of another library's."""
    folder = shutil.copytree(FOLDER / "llama", tmp_path_factory.mktemp("hub") / "llama")
    (folder / "reference.npz").unlink()
    with_tokenizer(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"other weights")
    return folder


@pytest.fixture
def run(tmp_path):
    """Runs a program of Python, in its own folder and with its own cache of the hub."""

    def run(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        outer |= {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=outer, cwd=folder, capture_output=True, text=True, timeout=300)

    return run


def endpoint(server: Server) -> dict[str, str]:
    return {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}


def error_of(done: subprocess.CompletedProcess) -> str:
    """The message of the InputError that a program ended with."""
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("t2r.errors.InputError: "), done.stderr
    return last


def test_names_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("org/model", "HuggingFaceTB/SmolLM2-135M", "a/b@main", "a/b@refs/pr/1"):
        assert hub.is_name(name)
    for path in ("gpt2", "./org/model", "../org/model", "/org/model", "a/b/c", "~/model", "a/b@", "a/b c", "@/b", ""):
        assert not hub.is_name(path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not hub.is_name("org/model"), "a path that exists goes first"


def test_what_is_read_is_downloaded_once(repository, run):
    with serving({"org/llama": repository}) as server:
        first = run("-c", DOWNLOAD, "org/llama", **endpoint(server))
        assert first.returncode == 0, first.stderr
        folder, commit = first.stdout.splitlines()
        assert commit == COMMIT
        names = {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}
        assert names == {"config.json", "model.safetensors", "tokenizer.json"}
        assert (Path(folder) / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
        server.requests.clear()
        again = run("-c", DOWNLOAD, "org/llama", **endpoint(server))
        assert again.stdout == first.stdout
        assert "Fetching" in first.stderr and "Fetching" not in again.stderr, "a progress bar for downloads only"
        assert not [path for path in server.requests if path.endswith("model.safetensors")]
        older = run("-c", DOWNLOAD, "org/llama@v1", **endpoint(server))
        assert older.stdout.splitlines()[1] == OLDER
    offline = run("-c", DOWNLOAD, "org/llama", HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout, offline.stderr


def test_a_cache_of_another_machine_serves_without_a_network(repository, run, tmp_path):
    cache = tmp_path / "home" / "hub" / "models--org--copied"
    shutil.copytree(repository, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    done = run("-c", DOWNLOAD, "org/copied", HF_HUB_OFFLINE="1")
    assert done.stdout.splitlines() == [str(cache / "snapshots" / COMMIT), COMMIT], done.stderr


@pytest.mark.slow
def test_errors_say_what_to_do(repository, run, tmp_path):
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "config.json").write_text("{}")
    (pickles / "pytorch_model.bin").write_bytes(b"a pickle")
    with serving({"org/llama": repository, "gated/model": repository, "org/pickles": pickles}) as server:
        ask = lambda name, **environment: run("-c", DOWNLOAD, name, **endpoint(server), **environment)  # noqa: E731
        assert "the Hugging Face hub has no org/none, or it is private: check the name" in error_of(ask("org/none"))
        assert "gated/model on the Hugging Face hub is gated: accept its terms" in error_of(ask("gated/model"))
        assert "org/llama on the Hugging Face hub has no revision 'v9'" in error_of(ask("org/llama@v9"))
        assert "org/pickles on the Hugging Face hub has no model.safetensors" in error_of(ask("org/pickles"))
        assert "is not a name that the Hugging Face hub allows" in error_of(ask("org/double--dash"))
        assert ask("gated/model", HF_TOKEN="secret").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    reached = "cannot be reached, and its cache does not have the model"
    assert reached in error_of(run("-c", DOWNLOAD, "org/other", HF_ENDPOINT=f"http://127.0.0.1:{port}"))
    assert reached in error_of(run("-c", DOWNLOAD, "org/other", HF_HUB_OFFLINE="1"))
    without = "import sys; sys.modules['huggingface_hub'] = None; " + DOWNLOAD
    assert "this needs the package huggingface_hub: pip install 't2r[hub]'" in error_of(run("-c", without, "org/other"))


@pytest.mark.slow
def test_a_model_of_the_hub_is_imported_and_converted_by_name(repository, run, tmp_path):
    with serving({"org/llama": repository}) as server:
        done = run("-m", "t2r", "import", "--source=org/llama@v1", f"--output={tmp_path}/ours", **endpoint(server))
    assert done.returncode == 0, done.stderr
    (entry,) = model_dir.load(tmp_path / "ours").provenance["history"]
    assert (entry["source"], entry["commit"]) == ("org/llama@v1", OLDER)
    (tmp_path / "org").mkdir()
    shutil.copytree(repository, tmp_path / "org" / "llama")
    local = run("-m", "t2r", "import", "--source=org/llama", "--output=local", folder=tmp_path, HF_HUB_OFFLINE="1")
    assert local.returncode == 0, local.stderr
    assert "commit" not in model_dir.load(tmp_path / "local").provenance["history"][0]
    missing = run("-m", "t2r", "convert", "--finetune", "--model=org/none", "--output=rnn", HF_HUB_OFFLINE="1")
    assert missing.returncode == 2 and missing.stderr.splitlines()[-1].startswith("error: org/none is not on this")
