"""Tables of names: which of their tensors is which of ours, and how it is turned."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from t2r.errors import raise_all
from t2r.model.config import ModelConfig
from t2r.model.parameters import abstract_model, arrays_of

Turn = Callable[[np.ndarray, ModelConfig], np.ndarray]


class TensorRule(NamedTuple):
    """`{i}` stands for the layer in both names."""

    ours: str
    theirs: str
    turn: Turn = lambda x, config: x


def transposed(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(outputs, inputs) → (inputs, outputs)."""
    return x.T


def to_heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(heads · size, width) → (width, heads, size)."""
    return x.T.reshape(x.shape[1], -1, config.head_dim)


def bias_to_heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    return x.reshape(-1, config.head_dim)


def from_heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(width, heads · size) → (heads, size, width)."""
    return x.T.reshape(-1, config.head_dim, x.shape[0])


def load(
    config: ModelConfig, rows: Iterable[TensorRule], tensors: Mapping[str, np.ndarray], *, ignore: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """All arrays of a model, in float32. What is missing, unknown or misshapen is one error that lists it all."""
    expected = {name: array.shape for name, array in arrays_of(abstract_model(config)).items()}
    layers = max(config.layers, config.encoder_layers)
    expanded = [
        TensorRule(row.ours.replace("{i}", str(i)), row.theirs.replace("{i}", str(i)), row.turn)
        for row in rows
        for i in (range(layers) if "{i}" in row.ours else [0])
    ]
    wanted = {row.ours: row for row in expanded if row.ours in expected}
    problems = [f"{row.theirs} is missing" for row in wanted.values() if row.theirs not in tensors]
    problems += [f"nothing is known to be {name}" for name in sorted(expected.keys() - wanted.keys())]
    used = {row.theirs for row in wanted.values()}
    unknown = [name for name in tensors if name not in used and not any(re.fullmatch(p, name) for p in ignore)]
    problems += [f"{name} is unknown" for name in sorted(unknown)]
    arrays = {}
    if not problems:
        for name, row in wanted.items():
            try:
                found = row.turn(np.asarray(tensors[row.theirs], np.float32), config)
            except ValueError as error:
                problems.append(f"{row.theirs} has shape {tensors[row.theirs].shape}: {error}")
                continue
            if found.shape != expected[name]:
                shape = tensors[row.theirs].shape
                problems.append(
                    f"{row.theirs} has shape {shape}, which makes {found.shape}; {expected[name]} is needed"
                )
            arrays[name] = np.ascontiguousarray(found, np.float32)
    raise_all("the weights do not fit the config:", problems)
    return arrays
