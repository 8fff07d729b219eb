"""Models of the Hugging Face hub, by name: what the importers read of them is downloaded into that library's cache."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from t2r.console import say
from t2r.errors import InputError
from t2r.extras import require

# ORG/NAME or ORG/NAME@REVISION, where a revision is a branch, a tag or a commit.
NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
# What the importers read, at the top of a repository: no pickles, no weights for other libraries.
FILES = [
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "source.spm", "target.spm", "target_vocab.json", "sentencepiece.bpe.model",
]  # fmt: skip
INSTEAD = "or download the model elsewhere and give its directory"


class Downloaded(NamedTuple):
    """A folder of the cache, and the commit that it holds."""

    folder: Path
    commit: str


def is_name(source: str | Path) -> bool:
    """Whether a source names a model of the hub; a path that exists goes first."""
    return NAME.fullmatch(str(source)) is not None and not Path(source).exists()


def find_commit(name: str) -> tuple[str, str]:
    """The repository and the commit that a name means now; without a network, what it meant for the hub's cache."""
    repository, revision = NAME.fullmatch(name).groups()
    is_commit = re.fullmatch(r"[0-9a-f]{40}", revision or "") is not None
    return repository, revision if is_commit else _snapshot(name, ["config.json"]).name


def download(name: str) -> Downloaded:
    """The model of this name, from the cache or from the hub."""
    say(f"{name} from the Hugging Face hub, or its cache")
    folder = _snapshot(name, FILES)
    if not any(folder.glob("model*.safetensors")):
        raise InputError(
            f"{name} on the Hugging Face hub has no model.safetensors, and weights in other formats, such as pickles, "
            "are not read: save it as safetensors elsewhere, and give its directory (if it has, a download was broken "
            "off: connect, and try again)"
        )
    return Downloaded(folder, folder.name)


def _snapshot(name: str, files: list[str]) -> Path:
    """The folder of the hub's cache with these files of a model. HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, ... hold.

    A progress bar is shown for weights only, and not where they are all there.
    """
    repository, revision = NAME.fullmatch(name).groups()
    try:
        hub = require("huggingface_hub", "hub")
    except InputError as error:
        raise InputError(f"{name} is not on this machine; to take it from the Hugging Face hub, {error}") from None
    from huggingface_hub.utils import logging, tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **(options | {"disable": True}))

    def ask(files: list[str], revision: str | None, **options: Any) -> Path:
        options = dict(revision=revision, allow_patterns=files, ignore_patterns="*/*") | options
        return Path(hub.snapshot_download(repository, **options))

    logging.set_verbosity_error()  # what a warning would say is in the error below
    try:
        folder = ask(["config.json"], revision, tqdm_class=Silent)
        if files == ["config.json"]:
            return folder
        weights = [path for path in files if path.endswith(".safetensors")]
        is_there = any(path.exists() for pattern in weights for path in folder.glob(pattern))
        return ask(files, folder.name, tqdm_class=Silent if is_there else None)
    except Exception as error:  # the library raises its own, those of its HTTP library, and those of the file system
        raise InputError(f"{name} is not on this machine, and {_reason(error, repository, revision)}") from None


def _reason(error: Exception, repository: str, revision: str | None) -> str:
    """Why a download failed, and what to do about it."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} on the Hugging Face hub is gated: accept its terms there and set HF_TOKEN, {INSTEAD}"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return (
            f"the Hugging Face hub has no {repository}, or it is private: check the name or the path; for a private "
            f"model set HF_TOKEN, {INSTEAD}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} on the Hugging Face hub has no revision {revision!r}: give a branch, tag or commit"
    if isinstance(error, errors.HFValidationError):
        return f"{repository} is not a name that the Hugging Face hub allows: check the name or the path"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "the Hugging Face hub cannot be reached, and its cache does not have the model: check the name or the "
            f"path, connect (HF_HUB_OFFLINE must not be 1), {INSTEAD}"
        )
    detail = " ".join(str(error).split())[:200] or type(error).__name__
    return f"could not be downloaded from the Hugging Face hub ({detail}): try again, {INSTEAD}"
