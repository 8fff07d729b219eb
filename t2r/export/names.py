"""What each array of an exported model is: its dimensions in words, and its meaning."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from t2r.conversion.swap import SPECS
from t2r.model.config import ModelConfig

# By the end of the name; the first that fits counts.
Table = tuple[tuple[str, tuple[str, ...], str], ...]
WEIGHTS: Table = (
    (r"encoder\.embedding\.table", ("source tokens", "width"), "a vector for each source token"),
    (r"embedding\.table", ("tokens", "width"), "a vector for each token"),
    (r"embedding\.output", ("tokens", "width"), "a vector for each token that makes its logit"),
    (r"embedding\.bias", ("tokens",), "bias of the logits"),
    (r"embedding\.tables\.\d+", ("tokens of the band", "its width"), "a vector for each token of a frequency band"),
    (r"embedding\.projections\.\d+", ("the band's width", "width"), "brings a band's vectors to the model's width"),
    (r"embedding\.classes", ("width", "further bands"), "scores of the bands after the first, as if they were tokens"),
    (r"positions", ("positions", "width"), "a vector for each position"),
    (r"query\.kernel", ("width", "heads", "head size"), "projection to queries"),
    (r"query\.bias", ("heads", "head size"), "bias of queries"),
    (r"key\.kernel", ("width", "key heads", "head size"), "projection to keys"),
    (r"key\.bias", ("key heads", "head size"), "bias of keys"),
    (r"value\.kernel", ("width", "key heads", "head size"), "projection to values"),
    (r"value\.bias", ("key heads", "head size"), "bias of values"),
    (r"out\.kernel", ("heads", "head size", "width"), "projection of what all heads found, back to the model's width"),
    (r"out\.bias", ("width",), "bias of the projection back"),
    (r"(query|key)_norm\.scale", ("head size",), "scale of the RMS norm of each query or key"),
    (r"feature_map\.weight", ("key heads", "features", "head size"), "matrix of the feature map φ"),
    (r"feature_map\.bias", ("key heads", "features"), "bias of φ"),
    (r"feature_map\.directions", ("key heads", "features", "head size"), "random directions of φ"),
    (r"feature_map\.pool", ("draws", "features / 2", "head size"), "random directions of φ; the first draw is used"),
    (r"feature_map\.sigma", ("key heads", "head size"), "scale of the directions of φ"),
    (r"up\.kernel", ("width", "hidden units"), "feed-forward: first matrix"),
    (r"up\.bias", ("hidden units",), "feed-forward: bias of the first matrix"),
    (r"gate\.kernel", ("width", "hidden units"), "feed-forward: matrix of the gate"),
    (r"gate\.bias", ("hidden units",), "feed-forward: bias of the gate"),
    (r"down\.kernel", ("hidden units", "width"), "feed-forward: second matrix"),
    (r"down\.bias", ("width",), "feed-forward: bias of the second matrix"),
    (r"norm\.scale", ("width",), "scale of a norm"),
    (r"norm\.bias", ("width",), "bias of a norm"),
)
MERGED: Table = (  # where φ is folded into the projections
    (
        r"query\.kernel",
        ("width", "heads", "features"),
        "projection to φ(q) before relu: queries, their scale and φ in one",
    ),
    (r"query\.bias", ("heads", "features"), "bias of φ(q) before relu"),
    (r"key\.kernel", ("width", "key heads", "features"), "projection to φ(k) before relu: keys and φ in one"),
    (r"key\.bias", ("key heads", "features"), "bias of φ(k) before relu"),
)
STATE: Table = (
    (r"position", ("texts",), "how many tokens each text has"),
    (r"S", ("texts", "key heads", "features", "head size"), "Σ φ(k) ⊗ v"),
    (r"z", ("texts", "key heads", "features"), "Σ φ(k)"),
    (r"log_scale", ("texts", "key heads"), "S and z are divided by its exponential"),
    (r"k", ("texts", "key heads", "slots", "head size"), "keys so far"),
    (r"v", ("texts", "key heads", "slots", "head size"), "values so far"),
    (r"valid", ("texts", "slots"), "which slots hold a token"),
    (r"index", (), "the next slot"),
)


class Row(NamedTuple):
    """Arrays of one name and shape, in all the layers that have them."""

    name: str  # with {layer} for a number
    layers: str
    shape: str
    meaning: str


def weight_rows(config: ModelConfig, arrays: Mapping[str, Any]) -> list[Row]:
    """A row for each name; every array is in one."""

    def table(name: str) -> Table:
        found = re.match(r"blocks\.(\d+)\.(attention|cross)\.", name)
        merged = found and getattr(config, SPECS[found[2]])[int(found[1])].kind == "merged"
        return MERGED + WEIGHTS if merged else WEIGHTS

    return _rows((name, array.shape, *_find(table(name), name)) for name, array in arrays.items())


def state_rows(arrays: Mapping[str, Any]) -> list[Row]:
    """Likewise of the state."""

    def meaning(name: str, found: str) -> str:
        return f"of the source: {found}; stays as it is" if name.startswith("source.") else found

    found = ((name, array.shape, *_find(STATE, name)) for name, array in arrays.items())
    return _rows((name, shape, words, meaning(name, text)) for name, shape, words, text in found)


def _find(table: Table, name: str) -> tuple[tuple[str, ...], str]:
    for pattern, words, meaning in table:
        if re.search(rf"(^|[._]){pattern}$", name):
            return words, meaning
    raise LookupError(f"{name} has no line in the table of names")


def _rows(arrays: Iterable[tuple[str, Sequence[Any], tuple[str, ...], str]]) -> list[Row]:
    layers: dict[tuple, list[int]] = {}
    for name, shape, words, meaning in arrays:
        pattern = re.sub(r"^((encoder\.)?blocks|layers|source)\.\d+", r"\1.{layer}", name)
        dimensions = " × ".join(f"{word} {size}" for word, size in zip(words, shape, strict=True)) or "a number"
        found = layers.setdefault((pattern, dimensions, meaning), [])
        found += [int(re.search(r"\d+", name)[0])] if pattern != name else []
    return [Row(pattern, ranges(found), shape, meaning) for (pattern, shape, meaning), found in layers.items()]


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0–2, 5`."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    bounds = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in bounds)
