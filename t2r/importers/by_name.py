"""Models by the names that commands take: a directory, builtin:NAME, or ORG/NAME[@REVISION] of the Hugging Face hub.

A model of the hub is imported when it is first named, into a folder for its commit, and read from there afterwards.
"""

import functools
import os
from pathlib import Path
from typing import Any

import t2r
from t2r.console import say
from t2r.errors import InputError
from t2r.files import one_at_a_time, recover
from t2r.importers import hub
from t2r.model.config import ModelConfig
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from t2r.user_cache import user_cache


def load(name: str | Path, **runtime: Any) -> LoadedModel:
    """`model_dir.load` of the model of this name."""
    return model_dir.load(directory(name), **runtime)


def load_config(name: str | Path, **runtime: Any) -> ModelConfig:
    """`model_dir.load_config` of the model of this name."""
    return model_dir.load_config(directory(name), **runtime)


def directory(name: str | Path) -> Path:
    """The model directory of this name; a path that exists goes first, one that was being replaced is restored."""
    path = model_dir.resolve(str(name))
    if not path.exists():
        recover(path)
    return _of_the_hub(str(name)) if hub.is_name(name) else path


@functools.cache  # one program has one model of a name, even if a branch moves meanwhile
def _of_the_hub(name: str) -> Path:
    repository, commit = hub.find_commit(name)
    # Another version of t2r may import it otherwise.
    folder = _models() / repository / f"{commit}-{t2r.__version__}"
    if not folder.exists():
        with one_at_a_time(folder.parent):
            if not folder.exists():  # another process may have imported it meanwhile
                _import(f"{repository}@{commit}", folder)
    say(f"{name} is read from {folder}")
    return folder


def _models() -> Path:
    """~/.cache/t2r/models, or what T2R_MODELS says."""
    if given := os.environ.get("T2R_MODELS"):
        return Path(given)
    cache = user_cache()
    if cache is None:
        raise InputError("this user has no home directory for models of the hub: name a folder, T2R_MODELS=FOLDER")
    return cache / "models"


def _import(name: str, folder: Path) -> None:
    from t2r.importers.source import import_model  # here, as it loads all families

    try:
        import_model(name, folder)
    except InputError:
        if not folder.exists():  # else another process was faster, on a file system without locks
            raise
