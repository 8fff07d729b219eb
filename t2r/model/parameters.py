"""A model's arrays by name, and a model from named arrays: the form in which they are trained, saved and loaded."""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from t2r.attention.module import is_linear
from t2r.errors import InputError
from t2r.model.config import ModelConfig
from t2r.model.transformer import LanguageModel, make_model

Arrays = dict[str, jax.Array]

TRAINABLE = ("all", "feature_maps", "all_but_feature_maps", "converted", "decoder")


def arrays_of(model: nnx.Module) -> Arrays:
    """name → array for all parameters and constants; names are paths such as `blocks.0.attention.query.kernel`."""
    return {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def with_arrays(model: nnx.Module, arrays: Arrays) -> nnx.Module:
    """The same model around other arrays; `model` may be abstract."""
    graph, state = nnx.split(model)
    flat = [(path, variable.replace(arrays[_name(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


@functools.lru_cache(maxsize=8)  # seconds for many layers
def abstract_model(config: ModelConfig) -> LanguageModel:
    """A model of shapes and types only; not to be changed: others have the same one."""
    return nnx.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0)))


def trainable_names(model: nnx.Module, which: str) -> set[str]:
    """The names that are trained.

    `all` parameters, `feature_maps` alone, or `all_but_feature_maps`; `converted` attention alone, or the layers of
    the `decoder`, without embeddings and encoder: what does not train cannot be unlearned where there is little text.
    """
    if which not in TRAINABLE:
        raise InputError(f"trainable={which!r}: choose one of {', '.join(TRAINABLE)}")
    parameters = {_name(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    in_maps = {name for name in parameters if ".feature_map." in name}
    places = tuple(f"blocks.{place}." for place in linear_attention_names(model))
    if which.endswith("feature_maps") and not in_maps:
        raise InputError(f"trainable={which!r}, but the model has no trainable feature map: convert it first")
    if which == "converted" and not places:
        raise InputError("trainable='converted', but no attention of the model is: convert it first")
    choices = {
        "all": parameters,
        "feature_maps": in_maps,
        "all_but_feature_maps": parameters - in_maps,
        "converted": {name for name in parameters if name.startswith(places)},
        "decoder": {name for name in parameters if name.startswith("blocks.")},
    }
    return choices[which]


def linear_attention_names(model: LanguageModel) -> list[str]:
    """Where attention is an RNN: `3.cross` is the cross attention of layer 3."""
    places = ((layer, name) for layer in range(len(model.blocks)) for name in ("attention", "cross"))
    return [f"{layer}.{name}" for layer, name in places if is_linear(getattr(model.blocks[layer], name, None))]


def parameter_count(arrays: dict[str, Any]) -> int:
    """How many numbers there are."""
    return sum(int(np.prod(array.shape)) for array in arrays.values())


def _name(path: tuple) -> str:
    return ".".join(map(str, path))
