"""Directories that are written atomically, also when a process is killed in between; and directories with a lock."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from t2r.errors import InputError
from t2r.files import atomic_directory, atomic_file, check_free, exclusive, read_json, recover

ROOT = Path(__file__).parents[1]
KILLED = """
import os, signal, sys
from pathlib import Path
from t2r import files

rename = Path.rename

def dies_after_the_first(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)

Path.rename = dies_after_the_first
with files.atomic_directory(Path(sys.argv[1]), replace=True) as folder:
    (folder / "content").write_text("new")
"""


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    path = tmp_path / "model"
    with atomic_directory(path) as folder:
        (folder / "content").write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL and not path.exists()
    recover(path)
    assert (path / "content").read_text() == "old"
    with atomic_directory(path, replace=True) as folder:
        (folder / "content").write_text("newer")
    assert os.listdir(tmp_path) == ["model"] and (path / "content").read_text() == "newer"


def test_directories_of_running_processes_are_left_alone(tmp_path):
    path = tmp_path / "model"
    theirs = tmp_path / f"model.{os.getppid()}.unfinished"
    theirs.mkdir()
    (tmp_path / "model.backup").mkdir()
    recover(path)
    assert sorted(os.listdir(tmp_path)) == sorted([theirs.name, "model.backup"])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(path) as unfinished:
        unfinished.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    with atomic_file(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_a_directory_replaces_a_link_without_following_it(tmp_path):
    path = tmp_path / "model"
    path.symlink_to("nowhere")
    with pytest.raises(InputError, match="exists already"):
        check_free(path)
    with atomic_directory(path, replace=True) as folder:
        (folder / "content").write_text("new")
    assert (path / "content").read_text() == "new" and os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("content", ["[1]", "7", "{", "", '{"a": ' + "9" * 5000 + "}", "[" * 100_000, '"a"'])
def test_json_that_is_no_object_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"config.json(.|\n)*copy it again"):
        read_json(path, "copy it again")


def test_one_process_at_a_time_has_a_folder(tmp_path):
    folder = tmp_path / "run"
    with exclusive(folder), pytest.raises(InputError, match="another run is using"), exclusive(folder):
        pass
    with exclusive(folder):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"), exclusive(tmp_path / "file"):
        pass
