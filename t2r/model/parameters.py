"""Models as dicts from name to array, and back: the form in which they are trained, saved and loaded."""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from t2r.attention.module import is_linear
from t2r.errors import InputError
from t2r.model.config import ModelConfig
from t2r.model.transformer import LanguageModel, make_model

Arrays = dict[str, jax.Array | np.ndarray | jax.ShapeDtypeStruct]  # shapes alone in an abstract model

TRAINABLE = ("all", "feature_maps", "all_but_feature_maps", "converted", "decoder")
# What a conversion adds to a model: φ, and how windowed attention mixes near and distant tokens.
NEW_MODULES = (".feature_map.", ".mixture.")


def arrays_of(model: nnx.Module) -> Arrays:
    """All parameters and constants by name; names are paths such as `blocks.0.attention.query.kernel`."""
    return {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def with_arrays(model: nnx.Module, arrays: Arrays) -> nnx.Module:
    """A copy of the model that holds these arrays; `model` may be abstract (shapes only)."""
    graph, state = nnx.split(model)
    flat = [(path, variable.replace(arrays[_name(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


@functools.lru_cache(maxsize=8)  # tracing a model of many layers takes seconds
def abstract_model(config: ModelConfig) -> LanguageModel:
    """A model with shapes and dtypes instead of arrays. It is cached and shared: do not modify it."""
    return nnx.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0)))


def trainable_names(model: nnx.Module, which: str) -> set[str]:
    """The names of the parameters to train.

    `all`; `feature_maps`: what the conversion added, which is φ, and the mixture of windowed attention;
    `all_but_feature_maps`; `converted`: the linear attention, projections included; `decoder`: all decoder layers, but
    not embeddings and encoder, so that these forget nothing when there is little training data.
    """
    if which not in TRAINABLE:
        raise InputError(f"trainable={which!r}: choose one of {', '.join(TRAINABLE)}")
    parameters = {_name(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    feature_maps = {name for name in parameters if is_new(name)}
    converted = tuple(f"blocks.{attention}." for attention in linear_attention_names(model))
    if which.endswith("feature_maps") and not feature_maps:
        raise InputError(f"trainable={which!r}, but the model has no trainable feature map: convert it first")
    if which == "converted" and not converted:
        raise InputError("trainable='converted', but the model has no converted attention: convert it first")
    choices = {
        "all": parameters,
        "feature_maps": feature_maps,
        "all_but_feature_maps": parameters - feature_maps,
        "converted": {name for name in parameters if name.startswith(converted)},
        "decoder": {name for name in parameters if name.startswith("blocks.")},
    }
    return choices[which]


def is_new(name: str) -> bool:
    """Whether a conversion added this parameter."""
    return any(module in name for module in NEW_MODULES)


def linear_attention_names(model: LanguageModel) -> list[str]:
    """The decoder's linear attention modules, as `layer.name`: `3.cross` is the cross attention of layer 3."""
    modules = ((layer, name) for layer in range(len(model.blocks)) for name in ("attention", "cross"))
    return [f"{layer}.{name}" for layer, name in modules if is_linear(getattr(model.blocks[layer], name, None))]


def parameter_count(arrays: dict[str, Any]) -> int:
    """The total number of elements of these arrays."""
    return sum(int(np.prod(array.shape)) for array in arrays.values())


def _name(path: tuple) -> str:
    return ".".join(map(str, path))
