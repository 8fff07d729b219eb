"""The models that benchmarks compare: rows of the paper's figures, of any architecture, with random weights."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from t2r.convert.swap import layers_to_keep
from t2r.errors import InputError
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.parameters import Arrays, abstract_model, arrays_of, with_arrays
from t2r.model.transformer import LanguageModel


class Row(NamedTuple):
    """What takes the place of softmax, and where."""

    label: str
    feature_map: str | None = None  # None: softmax stays
    keep: str = "none"
    merged: bool = False
    plain: bool = False  # the model's own step, also where there are kernels for it


ROWS = {
    "transformer": Row("transformer"),
    "t2r": Row("T2R", "t2r", merged=True),
    "t2r_unmerged": Row("T2R, φ not merged", "t2r"),
    "t2r_75": Row("T2R 75%", "t2r", keep="every_4th", merged=True),
    "elu": Row("ELU", "elu"),
    "rfa": Row("RFA", "rfa"),
    "transformer_plain": Row("transformer, without kernels", plain=True),
    "t2r_plain": Row("T2R, without kernels", "t2r", merged=True, plain=True),
}
AS_IT_IS = "model"  # the row of an architecture that is not to be changed

# The paper's feature sizes: of language models, and of causal and cross attention in translation. ELU has its own.
FEATURES, CAUSAL_FEATURES, CROSS_FEATURES = 32, 4, 32


def default_rows(config: ModelConfig) -> list[str]:
    """Those of the paper's Figures 2 and 3, and for language models its 75%."""
    return ["transformer", "t2r", "elu", "rfa"] + ([] if config.encoder_layers else ["t2r_75"])


def converted(config: ModelConfig, name: str, *, features: int = 0, cross_features: int = 0) -> ModelConfig:
    """The architecture of a row; feature sizes of 0 are the paper's. φ is merged where positions allow it."""
    if name == AS_IT_IS:
        return config
    if name not in ROWS:
        raise InputError(f"unknown row {name!r}: choose among {', '.join([*ROWS, AS_IT_IS])}")
    row = ROWS[name]
    kept = layers_to_keep(row.keep, config.layers)
    merged = row.merged and config.positions != "rotary" and not config.query_norm
    sizes = {"attention": features or (CAUSAL_FEATURES if config.encoder_layers else FEATURES)}
    if config.encoder_layers:
        sizes["cross_attention"] = cross_features or CROSS_FEATURES

    def spec(old: AttentionSpec, layer: int, size: int) -> AttentionSpec:
        if row.feature_map is None or layer in kept:
            return dataclasses.replace(old, kind="softmax", feature_map=None, features=None)
        size = None if row.feature_map == "elu" else size
        kind = "merged" if merged else "linear"
        return dataclasses.replace(old, kind=kind, feature_map=row.feature_map, features=size)

    specs = {
        field: tuple(spec(old, layer, size) for layer, old in enumerate(getattr(config, field)))
        for field, size in sizes.items()
    }
    return dataclasses.replace(config, **specs)


def label(name: str, config: ModelConfig) -> str:
    """A row's name in plots; in translation with its feature sizes, cross and causal, as the paper writes them."""
    if name not in ROWS:
        return name
    sizes = [
        max((spec.features or 0 for spec in specs), default=0) for specs in (config.cross_attention, config.attention)
    ]
    return f"{ROWS[name].label} {sizes[0]}-{sizes[1]}" if all(sizes) else ROWS[name].label


def model_of_shapes(config: ModelConfig, dtype: str) -> LanguageModel:
    """A model for inference without numbers: activations and weights are of one type."""
    model = abstract_model(dataclasses.replace(config, dtype=dtype))
    shapes = {name: jax.ShapeDtypeStruct(array.shape, jnp.dtype(dtype)) for name, array in arrays_of(model).items()}
    return with_arrays(model, shapes)


def random_model(config: ModelConfig, dtype: str) -> LanguageModel:
    """The same with random weights: speed does not depend on them."""
    model = model_of_shapes(config, dtype)
    return with_arrays(model, random_weights(arrays_of(model)))


def random_weights(shapes: Arrays) -> Arrays:
    """Small normal numbers, made on the device; norms are ones, biases zero."""
    keys = jax.random.split(jax.random.key(0), len(shapes))

    def array(name: str, like: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if name.endswith("scale"):
            return jnp.ones(like.shape, like.dtype)
        if name.endswith("bias"):
            return jnp.zeros(like.shape, like.dtype)
        return normal(key, like.shape, like.dtype)

    return {name: array(name, like, key) for (name, like), key in zip(shapes.items(), keys)}


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Normal numbers of deviation 0.02."""
    return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)
