"""The documentation of each array of an exported model: its dimensions and its meaning."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from t2r.conversion.swap import SPECS
from t2r.model.config import ModelConfig

# (pattern for the end of the name, dimensions, meaning); the first pattern that matches counts.
Table = tuple[tuple[str, tuple[str, ...], str], ...]
WEIGHTS: Table = (
    (r"encoder\.embedding\.table", ("source vocabulary", "width"), "embedding of each source token"),
    (r"embedding\.table", ("vocabulary", "width"), "embedding of each token"),
    (r"embedding\.output", ("vocabulary", "width"), "output embedding: projection to logits"),
    (r"embedding\.bias", ("vocabulary",), "bias of the logits"),
    (
        r"embedding\.tables\.\d+",
        ("tokens of the band", "width of the band"),
        "embedding of each token of a frequency band",
    ),
    (r"embedding\.projections\.\d+", ("width of the band", "width"), "projection from a band's width to the model's"),
    (
        r"embedding\.classes",
        ("width", "further bands"),
        "adaptive softmax: projection to the logits of the further bands",
    ),
    (r"positions", ("positions", "width"), "embedding of each position"),
    (r"query\.kernel", ("width", "heads", "head size"), "projection to queries"),
    (r"query\.bias", ("heads", "head size"), "bias of queries"),
    (r"key\.kernel", ("width", "key heads", "head size"), "projection to keys"),
    (r"key\.bias", ("key heads", "head size"), "bias of keys"),
    (r"value\.kernel", ("width", "key heads", "head size"), "projection to values"),
    (r"value\.bias", ("key heads", "head size"), "bias of values"),
    (r"out\.kernel", ("heads", "head size", "width"), "output projection of all heads"),
    (r"out\.bias", ("width",), "bias of the output projection"),
    (r"(query|key)_norm\.scale", ("head size",), "scale of the RMS norm of each query or key"),
    (r"query_norm\.scales", ("heads · head size",), "scales of the RMS norm of all queries of a token together"),
    (r"key_norm\.scales", ("key heads · head size",), "scales of the RMS norm of all keys of a token together"),
    (r"feature_map\.weight", ("key heads", "features (hedgehog: half)", "head size"), "matrix of the feature map φ"),
    (r"feature_map\.bias", ("key heads", "features"), "bias of φ"),
    (r"feature_map\.directions", ("key heads", "features", "head size"), "random directions of φ"),
    (r"feature_map\.pool", ("draws", "features / 2", "head size"), "random directions of φ; the first draw is used"),
    (r"feature_map\.sigma", ("key heads", "head size"), "scale of the directions of φ"),
    (r"mixture\.weight", ("key heads", "heads per key head", "head size"), "vector u of the weight of distant tokens"),
    (r"mixture\.bias", ("key heads", "heads per key head"), "bias b of the weight of distant tokens"),
    (r"up\.kernel", ("width", "hidden units"), "feed-forward: first matrix"),
    (r"up\.bias", ("hidden units",), "feed-forward: bias of the first matrix"),
    (r"gate\.kernel", ("width", "hidden units"), "feed-forward: matrix of the gate"),
    (r"gate\.bias", ("hidden units",), "feed-forward: bias of the gate"),
    (r"down\.kernel", ("hidden units", "width"), "feed-forward: second matrix"),
    (r"down\.bias", ("width",), "feed-forward: bias of the second matrix"),
    (r"norm\.scale", ("width",), "scale of a norm"),
    (r"norm\.bias", ("width",), "bias of a norm"),
)
MERGED: Table = (  # layers where φ is merged into the projections
    (
        r"query\.kernel",
        ("width", "heads", "features"),
        "projection to φ(q) before relu: query projection, scale and φ in one",
    ),
    (r"query\.bias", ("heads", "features"), "bias of φ(q) before relu"),
    (r"key\.kernel", ("width", "key heads", "features"), "projection to φ(k) before relu: key projection and φ in one"),
    (r"key\.bias", ("key heads", "features"), "bias of φ(k) before relu"),
)
STATE: Table = (
    (r"position", ("batch",), "tokens read so far"),
    (r"S", ("batch", "key heads", "features", "head size"), "Σ φ(k) ⊗ v; with a window, over keys that have left it"),
    (r"z", ("batch", "key heads", "features"), "Σ φ(k) over the same keys"),
    (r"log_scale", ("batch", "key heads"), "logarithm of the factor that S and z are divided by"),
    (
        r"k",
        ("batch", "key heads", "slots", "head size"),
        "keys of the tokens so far; with a window, of the last and the first ones",
    ),
    (r"v", ("batch", "key heads", "slots", "head size"), "values of the same tokens"),
    (r"valid", ("batch", "slots"), "which slots hold a token"),
    (r"index", (), "the next free slot"),
    (r"count", ("batch",), "tokens read so far"),
)


class TableRow(NamedTuple):
    """A row of the README's table: arrays of one name and shape, in all layers that have them."""

    name: str  # with {layer} for the layer's index
    layers: str
    shape: str
    meaning: str


def weight_rows(config: ModelConfig, arrays: Mapping[str, Any]) -> list[TableRow]:
    """The table of weights; every array is in one of its rows."""

    def table(name: str) -> Table:
        layer = re.match(r"blocks\.(\d+)\.(attention|cross)\.", name)
        merged = layer and getattr(config, SPECS[layer[2]])[int(layer[1])].kind == "merged"
        return MERGED + WEIGHTS if merged else WEIGHTS

    return _rows((name, array.shape, *_find(table(name), name)) for name, array in arrays.items())


def state_rows(arrays: Mapping[str, Any]) -> list[TableRow]:
    """The table of the state's arrays."""

    def full(name: str, meaning: str) -> str:
        return f"of the source: {meaning}; never changes" if name.startswith("source.") else meaning

    entries = ((name, array.shape, *_find(STATE, name)) for name, array in arrays.items())
    return _rows((name, shape, dimensions, full(name, meaning)) for name, shape, dimensions, meaning in entries)


def _find(table: Table, name: str) -> tuple[tuple[str, ...], str]:
    for pattern, dimensions, meaning in table:
        if re.search(rf"(^|[._]){pattern}$", name):
            return dimensions, meaning
    raise LookupError(f"{name} has no entry in the table of names")


def _rows(arrays: Iterable[tuple[str, Sequence[Any], tuple[str, ...], str]]) -> list[TableRow]:
    layers: dict[tuple, list[int]] = {}
    for name, shape, dimensions, meaning in arrays:
        pattern = re.sub(r"^((encoder\.)?blocks|layers|source)\.\d+", r"\1.{layer}", name)
        sizes = " × ".join(f"{name} {size}" for name, size in zip(dimensions, shape, strict=True)) or "scalar"
        members = layers.setdefault((pattern, sizes, meaning), [])
        members += [int(re.search(r"\d+", name)[0])] if pattern != name else []
    return [TableRow(pattern, ranges(members), shape, meaning) for (pattern, shape, meaning), members in layers.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: 0, 1, 2, 5 → `0–2, 5`."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    bounds = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in bounds)
