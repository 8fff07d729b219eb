"""What a model is in the paper's figures, from its config and its provenance: its feature size, and how it was made."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from t2r.errors import InputError, raise_all
from t2r.files import is_same_file
from t2r.importers import by_name
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.store.model_dir import LoadedModel

TRAINED = {
    "all": "finetuned",
    "all_but_feature_maps": "finetuned, φ frozen",
    "feature_maps": "only φ trained",
}
SWAPPED, SCRATCH = "before finetuning", "random initialisation"


class Described(NamedTuple):
    """A model as a point of a figure."""

    model: str  # as it was given
    series: str  # the curve that it belongs to, such as `finetuned, φ frozen`
    features: int | None  # feature size k of causal attention; None: softmax, or layers with several sizes
    cross_features: int | None

    @property
    def is_converted(self) -> bool:
        return self.series != "transformer"

    @property
    def is_aligned(self) -> bool:
        """Whether its heads are those of a transformer: those of a random initialisation are not."""
        return not self.series.endswith(SCRATCH)


def find_model(name: str) -> str:
    """A model directory, or that of a finished run: DIR/model of a work directory DIR."""
    if (Path(name) / "study.json").is_file():
        raise InputError(f"{name} is a study: name its rows, as {Path(name) / 'ROW'}")
    inner = Path(name) / "model"
    return str(inner) if not name.startswith("builtin:") and (inner / "config.json").is_file() else name


def describe_model(name: str, loaded: LoadedModel) -> Described:
    """A loaded model, described."""
    config, history = loaded.model.config, loaded.provenance["history"]
    made = _training(history)
    if made is None or not _linear(config.attention + config.cross_attention):
        return Described(name, "transformer", None, None)
    variant = _variant(config)
    sizes = _size(config.attention), _size(config.cross_attention)
    return Described(name, f"{variant}, {made}" if variant else made, *sizes)


def _training(history: list[dict[str, Any]]) -> str | None:
    """How a model came to be, from its conversion on; None: it was not converted."""
    actions = [entry.get("action") for entry in history]
    if "swap" not in actions:
        return None
    swap = len(actions) - 1 - actions[::-1].index("swap")
    after = [entry for entry in history[swap + 1 :] if entry.get("action") == "train"]
    if not any(action in ("train", "import") for action in actions[:swap]):
        return SCRATCH
    if not after:
        return SWAPPED
    trainable = after[-1].get("config", {}).get("trainable", "all")
    return TRAINED.get(trainable, f"trained: {trainable}")


def _variant(config: ModelConfig) -> str:
    """What distinguishes a conversion from the paper's T2R of all layers: its map, its window, softmax layers kept."""
    linear = _linear(config.attention + config.cross_attention)
    maps = {"t2r" if spec.kind == "merged" else spec.feature_map for spec in linear}
    windows = {spec.window for spec in linear if spec.kind == "windowed"}
    kept = len(config.attention) - len(_linear(config.attention))
    parts = [] if maps == {"t2r"} else [" and ".join(sorted(maps))]
    parts += [f"window {max(windows)}"] if windows else []
    parts += [f"{kept} of {len(config.attention)} layers softmax"] if kept else []
    return ", ".join(parts)


def _linear(specs: tuple[AttentionSpec, ...]) -> list[AttentionSpec]:
    return [spec for spec in specs if spec.kind != "softmax"]


def _size(specs: tuple[AttentionSpec, ...]) -> int | None:
    sizes = {spec.features for spec in _linear(specs)}
    return sizes.pop() if len(sizes) == 1 else None


def check_models(names: list[str], transformer: str | None) -> None:
    """Raises one error for all models that cannot be analysed together, before anything is computed."""
    if not names:
        raise InputError("--model is empty: name one or more model directories, joined by commas")
    places = [os.path.normpath(name) for name in names]  # a/ is a
    repeated = sorted({place for place in places if places.count(place) > 1})
    if repeated:
        raise InputError(f"--model names {', '.join(repeated)} more than once: name each model once")
    first = names[0] if transformer is None else transformer
    configs, problems = {}, []
    for name in dict.fromkeys([first, *names]):
        try:
            configs[name] = by_name.load_config(find_model(name))
        except InputError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise InputError(problems[0])
    raise_all("models that cannot be read:", problems)
    base = configs[first]
    if transformer is not None and _linear(base.attention + base.cross_attention):
        raise InputError(f"--transformer={transformer} has been converted: give the model that it was converted from")
    problems = [
        f"{name} is --transformer: leave it out of --model"
        for name in names
        if transformer is not None and is_same_file(find_model(name), find_model(transformer))
    ]
    for name in names:
        config = configs[name]
        problems += [
            f"{name} has {field}={getattr(config, field)!r}, {first} has {getattr(base, field)!r}"
            for field in ("layers", "heads", "encoder_layers", "vocab_size", "max_positions")
            if getattr(config, field) != getattr(base, field)
        ]
    raise_all("these models cannot be compared, head by head and on the same tokens:", problems)
