"""Converts loaded models and model directories, by swap or by merge, and records it in their provenance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.files import check_free
from t2r.importers import by_name
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel


def convert_model(loaded: LoadedModel, *, source: str = "", **plan: Any) -> LoadedModel:
    """The model with linear attention in place of softmax: `swap` with the arguments `plan`."""
    return _with_history(loaded, swap(loaded.model, **plan), {"action": "swap", **plan}, source)


def merge_model(loaded: LoadedModel, *, source: str = "") -> LoadedModel:
    """The model with φ merged into the projections: `merge`."""
    return _with_history(loaded, merge(loaded.model), {"action": "merge"}, source)


def convert_directory(
    name: str,
    output: str | Path,
    *,
    merge: bool = False,
    choose: Callable[[LoadedModel, dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]] | None = None,
    **plan: Any,
) -> LoadedModel:
    """Loads the model `name`, converts it (or merges it, with `merge`), and saves it as the directory `output`.

    `choose` completes the plan when the model is loaded, and returns it with what it measured.
    """
    output = Path(output)
    check_free(output)
    loaded, measured = by_name.load(name), {}
    if choose is not None:
        plan, measured = choose(loaded, plan)
    result = merge_model(loaded, source=name) if merge else convert_model(loaded, source=name, **plan)
    result.provenance["history"][-1].update(measured)
    model_dir.save(output, result)
    return result


def _with_history(loaded: LoadedModel, model: Any, entry: dict[str, Any], source: str) -> LoadedModel:
    """The converted model with the tokenizer of the original, and `entry` added to its history."""
    entry = {**entry, "source": source} if source else entry
    return LoadedModel(model, loaded.tokenizer, {"history": [*loaded.provenance["history"], entry]})
