"""A model directory converted into another: the swap, or the merge."""

from pathlib import Path
from typing import Any

from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel


def convert_model(loaded: LoadedModel, *, source: str = "", **plan: Any) -> LoadedModel:
    """Linear attention in place of softmax, as `swap` does it; what was done is added to the provenance."""
    return _recorded(loaded, swap(loaded.model, **plan), {"action": "swap", **plan}, source)


def merge_model(loaded: LoadedModel, *, source: str = "") -> LoadedModel:
    """φ folded into the projections, as `merge` does it."""
    return _recorded(loaded, merge(loaded.model), {"action": "merge"}, source)


def convert_directory(name: str, output: str | Path, *, merge: bool = False, **plan: Any) -> LoadedModel:
    """Reads a model directory, converts the model, or with `merge` merges it, and writes another directory."""
    output = Path(output)
    if output.exists():
        raise InputError(f"--output={output} exists already: choose another or remove it")
    loaded = model_dir.load(name)
    result = merge_model(loaded, source=name) if merge else convert_model(loaded, source=name, **plan)
    model_dir.save(output, result)
    return result


def _recorded(loaded: LoadedModel, model: Any, entry: dict[str, Any], source: str) -> LoadedModel:
    entry = {**entry, "source": source} if source else entry
    return LoadedModel(model, loaded.tokenizer, {"history": [*loaded.provenance["history"], entry]})
