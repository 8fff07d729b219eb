"""Rules that map the tensors of another library to ours: two names, and how the array is transformed."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from t2r.errors import raise_all
from t2r.model.config import ModelConfig
from t2r.model.parameters import abstract_model, arrays_of

Transform = Callable[[np.ndarray, ModelConfig], np.ndarray]


class TensorRule(NamedTuple):
    """Our array `ours` is the other library's tensor `theirs`, transformed; `{i}` in a name is the layer's index."""

    ours: str
    theirs: str
    transform: Transform = lambda x, config: x


def transposed(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(outputs, inputs) → (inputs, outputs)."""
    return x.T


def to_heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(heads · size, width) → (width, heads, size)."""
    return x.T.reshape(x.shape[1], -1, config.head_dim)


def bias_to_heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(heads · size) → (heads, size)."""
    return x.reshape(-1, config.head_dim)


def from_heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(width, heads · size) → (heads, size, width)."""
    return x.T.reshape(-1, config.head_dim, x.shape[0])


def load(
    config: ModelConfig, rules: Iterable[TensorRule], tensors: Mapping[str, np.ndarray], *, ignore: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """All arrays of a model, in float32. One error lists all tensors that are missing, unknown or of the wrong shape.

    Tensors that match a pattern of `ignore` may be left over.
    """
    expected = {name: array.shape for name, array in arrays_of(abstract_model(config)).items()}
    layers = max(config.layers, config.encoder_layers)
    expanded = [
        TensorRule(rule.ours.replace("{i}", str(i)), rule.theirs.replace("{i}", str(i)), rule.transform)
        for rule in rules
        for i in (range(layers) if "{i}" in rule.ours else [0])
    ]
    needed = {rule.ours: rule for rule in expanded if rule.ours in expected}
    problems = [f"{rule.theirs} is missing" for rule in needed.values() if rule.theirs not in tensors]
    problems += [f"no tensor corresponds to our {name}" for name in sorted(expected.keys() - needed.keys())]
    used = {rule.theirs for rule in needed.values()}
    unknown = [name for name in tensors if name not in used and not any(re.fullmatch(p, name) for p in ignore)]
    problems += [f"{name} is unknown" for name in sorted(unknown)]
    arrays = {}
    if not problems:
        for name, rule in needed.items():
            try:
                array = rule.transform(np.asarray(tensors[rule.theirs], np.float32), config)
            except ValueError as error:
                problems.append(f"{rule.theirs} has shape {tensors[rule.theirs].shape}: {error}")
                continue
            if array.shape != expected[name]:
                shape = tensors[rule.theirs].shape
                problems.append(
                    f"{rule.theirs} has shape {shape}, which becomes {array.shape}; {expected[name]} is needed"
                )
            arrays[name] = np.ascontiguousarray(array, np.float32)
            if not np.isfinite(arrays[name]).all():
                problems.append(f"{rule.theirs} has values that are NaN or infinite: the file is damaged")
    raise_all("the weights do not match the config:", problems)
    return arrays
