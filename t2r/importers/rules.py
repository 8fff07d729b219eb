"""What the families of Hugging Face models have in common: rules for parts of a layer, and names of activations.

Rules may name arrays that a model does not have, such as biases: `names.load` leaves these out.
"""

from typing import Any

import numpy as np

from t2r.errors import InputError
from t2r.importers.names import TensorRule, Transform, bias_to_heads, from_heads, to_heads, transposed
from t2r.model.config import ModelConfig

Fields = dict[str, Any]
ACTIVATIONS = {
    "silu": "swish", "swish": "swish", "relu": "relu", "gelu": "gelu_exact", "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu",
}  # fmt: skip
ATTENTION = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))


def activation(c: Fields, name: str) -> str:
    """Our name for the activation function in the field `name`."""
    if c[name] not in ACTIVATIONS:
        raise InputError(f"{name}={c[name]!r} is not supported: only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[c[name]]


def unchanged(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    return x


def linear(ours: str, theirs: str, kernel: Transform = transposed, bias: Transform = unchanged) -> list[TensorRule]:
    """The rules for the matrix and bias of a linear layer."""
    return [
        TensorRule(f"{ours}.kernel", f"{theirs}.weight", kernel),
        TensorRule(f"{ours}.bias", f"{theirs}.bias", bias),
    ]


def norm_rules(names: dict[str, str], scale: Transform = unchanged) -> list[TensorRule]:
    """The rules for the scale and bias of norms; `names` maps ours to theirs."""
    rules = []
    for ours, theirs in names.items():
        rules.append(TensorRule(f"{ours}.scale", f"{theirs}.weight", scale))
        rules.append(TensorRule(f"{ours}.bias", f"{theirs}.bias"))
    return rules


def attention_rules(ours: str, theirs: str, out: str = "out_proj") -> list[TensorRule]:
    """The projections of attention, each a linear layer."""
    rules = []
    for mine, their in ATTENTION:
        rules += linear(f"{ours}.{mine}", f"{theirs}.{their}", to_heads, bias_to_heads)
    return rules + linear(f"{ours}.out", f"{theirs}.{out}", from_heads)


def feedforward_rules(ours: str, theirs: str, up: str = "fc1", down: str = "fc2") -> list[TensorRule]:
    """The matrices of a feed-forward without a gate."""
    return linear(f"{ours}.up", f"{theirs}{up}") + linear(f"{ours}.down", f"{theirs}{down}")


def scaled(rules: list[TensorRule], factors: dict[str, float]) -> list[TensorRule]:
    """The rules, with arrays whose names end in a key of `factors` multiplied by its value."""

    def times(factor: float, transform: Transform) -> Transform:
        return lambda x, config: transform(x, config) * np.float32(factor)

    return [
        rule._replace(transform=times(factor, rule.transform)) if factor != 1 else rule
        for rule in rules
        for factor in [next((value for end, value in factors.items() if rule.ours.endswith(end)), 1)]
    ]
