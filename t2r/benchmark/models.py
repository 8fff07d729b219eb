"""The models that benchmarks compare: variants of one architecture, with random weights or those of a transformer."""

import ast
import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from t2r.conversion.swap import SPECS, layers_to_keep
from t2r.errors import InputError, raise_all, unknown
from t2r.files import digest_of
from t2r.importers import by_name
from t2r.model.config import AttentionSpec, ModelConfig, preset
from t2r.model.parameters import Arrays, abstract_model, arrays_of, with_arrays
from t2r.model.rows import for_decoding
from t2r.model.transformer import LanguageModel, check_length


class Variant(NamedTuple):
    """How an architecture is converted."""

    label: str  # in plots
    feature_map: str | None = None  # None: softmax attention
    keep: str = "none"  # layers that keep softmax
    merged: bool = False  # φ merged into the projections, where possible
    plain: bool = False  # decode without t2r's GPU kernels
    windowed: bool = False  # causal attention is exact for the last tokens, and for the first SINKS


VARIANTS = {
    "transformer": Variant("transformer"),
    "t2r": Variant("T2R", "t2r", merged=True),
    "t2r_unmerged": Variant("T2R, φ not merged", "t2r"),
    "t2r_75": Variant("T2R 75%", "t2r", keep="every_4th", merged=True),
    "t2r_window": Variant("T2R with a window", "t2r", windowed=True),
    "t2r_hybrid": Variant("T2R with a window, an 8th softmax", "t2r", keep="every_8th", windowed=True),
    "t2r_hybrid_4th": Variant("T2R with a window, a 4th softmax", "t2r", keep="every_4th", windowed=True),
    "elu": Variant("ELU", "elu"),
    "rfa": Variant("RFA", "rfa"),
    "transformer_plain": Variant("transformer, without kernels", plain=True),
    "t2r_plain": Variant("T2R, without kernels", "t2r", merged=True, plain=True),
}
UNCHANGED = "model"  # the variant name for the architecture without any conversion
INT8 = "_int8"  # added to the name of a row whose matrices have 8 bits

# The paper's feature sizes: language models; causal and cross attention in translation. ELU has the size of a head.
FEATURES, CAUSAL_FEATURES, CROSS_FEATURES = 32, 4, 32
WINDOW, SINKS = 32, 4


def default_variants(config: ModelConfig) -> list[str]:
    """The models of the paper's Figures 2 and 3; for language models also T2R 75%.

    With rotary positions, as in Llama, instead what such models are converted into.
    """
    if config.positions == "rotary":
        return ["transformer", "t2r", "t2r_window", "t2r_hybrid"]
    return ["transformer", "t2r", "elu", "rfa"] + ([] if config.encoder_layers else ["t2r_75"])


def converted(
    config: ModelConfig, name: str, *, features: int = 0, cross_features: int = 0, window: int = WINDOW
) -> ModelConfig:
    """The architecture of a variant. Feature sizes of 0: the paper's. φ is not merged where rotary positions or query
    norms come between it and the projections."""
    if name == UNCHANGED:
        return config
    if name not in VARIANTS:
        raise InputError(unknown("model", name, [*VARIANTS, UNCHANGED]))
    variant = VARIANTS[name]
    kept_layers = layers_to_keep(variant.keep, config.layers)
    merged = variant.merged and config.positions != "rotary" and not config.query_norm
    sizes = {"attention": features or (CAUSAL_FEATURES if config.encoder_layers else FEATURES)}
    if config.encoder_layers:
        sizes["cross_attention"] = cross_features or CROSS_FEATURES

    def spec(old: AttentionSpec, layer: int, field: str) -> AttentionSpec:
        if old.kind == "windowed":  # softmax in its place attends to all tokens
            old = dataclasses.replace(old, window=0, sinks=0)
        if variant.feature_map is None or layer in kept_layers:
            return dataclasses.replace(old, kind="softmax", feature_map=None, features=None)
        size = None if variant.feature_map == "elu" else sizes[field]
        new = dataclasses.replace(old, kind="linear", feature_map=variant.feature_map, features=size)
        if variant.windowed and field == "attention":
            return dataclasses.replace(new, kind="windowed", window=window, sinks=SINKS)
        return dataclasses.replace(new, kind="merged") if merged else new

    specs = {
        field: tuple(spec(old, layer, field) for layer, old in enumerate(getattr(config, field))) for field in sizes
    }
    return dataclasses.replace(config, **specs)


def label(name: str, config: ModelConfig) -> str:
    """A variant's name in plots; in translation with the feature sizes of cross and causal attention: "T2R 32-4"."""
    if name.endswith(INT8):
        return f"{label(name.removesuffix(INT8), config)}, int8"
    if name not in VARIANTS:
        return name
    sizes = [
        max((spec.features or 0 for spec in specs), default=0) for specs in (config.cross_attention, config.attention)
    ]
    return f"{VARIANTS[name].label} {sizes[0]}-{sizes[1]}" if all(sizes) else VARIANTS[name].label


def abstract_inference_model(config: ModelConfig, dtype: str, weights: str = "") -> LanguageModel:
    """An abstract model for inference. Weights have the activations' type, matrices 8 bits if `weights` is "int8"."""
    model = abstract_model(dataclasses.replace(config, dtype=dtype))
    shapes = {name: jax.ShapeDtypeStruct(array.shape, jnp.dtype(dtype)) for name, array in arrays_of(model).items()}
    model = with_arrays(model, shapes)
    return nnx.eval_shape(lambda model: for_decoding(model, "int8"), model) if weights == "int8" else model


def random_model(config: ModelConfig, dtype: str, weights: str = "", own: Arrays | None = None) -> LanguageModel:
    """A model for inference. Weights that are not in `own` are random: speed does not depend on them."""
    model = abstract_inference_model(config, dtype)
    shapes = arrays_of(model)
    given = {name: jnp.asarray(own[name], dtype) for name in shapes.keys() & (own or {}).keys()}
    missing = {name: shape for name, shape in shapes.items() if name not in given}
    model = with_arrays(model, random_weights(missing) | given)
    return for_decoding(model, "int8") if weights == "int8" else model


def random_weights(shapes: Arrays) -> Arrays:
    """Normal values of deviation 0.02, generated on the device; norm scales are 1, biases 0."""
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
    """Normal values of deviation 0.02."""
    return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)


LENGTHS = [2**power for power in range(9, 16)]  # 512 to 32k


class Request(NamedTuple):
    """What a decoding benchmark measures: which models, at which lengths."""

    models: dict[str, ModelConfig]  # by variant name
    lengths: list[int]
    batch: int
    dtype: str
    identity: dict[str, Any]  # identifies the architecture in results
    source: str | None = None  # the model whose architecture this is, with some fields changed; None: a preset
    own_weights: bool = False  # models have the weights of `source`, which is not converted; otherwise random ones

    @property
    def title(self) -> str:
        """Architecture and batch size, for the titles of plots."""
        changed = ", ".join(self.identity["fields"])
        name = Path(self.identity["architecture"]).name  # of a model's directory
        return f"{name}{changed and f' ({changed})'}, batch {self.batch}"

    @property
    def common(self) -> dict[str, Any]:
        """The part of a result's key that all measurements of this request share."""
        own = {"weights_of": weights_digest(self.source)} if self.own_weights else {}
        return {"batch": self.batch, "dtype": self.dtype, **self.identity, **own}

    def row(self, name: str) -> dict[str, str]:
        """The part of a result's key that says which row it is."""
        return {"row": name, "weights": self.weights(name)}

    def weights(self, name: str) -> str:
        """The type of a row's matrices."""
        return "int8" if name.endswith(INT8) else self.dtype

    def is_plain(self, name: str) -> bool:
        """Whether a row decodes without t2r's GPU kernels."""
        variant = VARIANTS.get(name.removesuffix(INT8))
        return bool(variant and variant.plain)

    def abstract(self, name: str) -> LanguageModel:
        """The abstract model of a row."""
        return abstract_inference_model(self.models[name], self.dtype, self.weights(name))

    def model(self, name: str) -> LanguageModel:
        """The model of a row. What a conversion adds is random, and so are projections that φ is merged into."""
        config = by_name.load_config(self.source) if name == UNCHANGED and self.own_weights else self.models[name]
        own = shared_weights(by_name.load(self.source).model, config) if self.own_weights else None
        return random_model(config, self.dtype, self.weights(name), own)


def shared_weights(transformer: LanguageModel, config: ModelConfig) -> Arrays:
    """The arrays of a transformer that a model of `config`, converted from it, has too: not what φ is merged into."""
    merged = {
        f"blocks.{layer}.{name}.{projection}"
        for name, field in SPECS.items()
        for layer, spec in enumerate(getattr(config, field))
        for projection in ("query", "key")
        if spec.kind == "merged"
    }
    return {name: array for name, array in arrays_of(transformer).items() if name.rpartition(".")[0] not in merged}


@functools.cache
def weights_digest(source: str) -> str:
    """Tells the weights of a model directory from others."""
    return digest_of(by_name.directory(source) / "model.safetensors")


def make_request(
    *,
    preset: str | None = None,
    model: str | None = None,
    fields: Sequence[str] = (),
    rows: Sequence[str] | None = None,
    features: int = 0,
    cross_features: int = 0,
    window: int = WINDOW,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 16,
    dtype: str = "bfloat16",
    weights: Sequence[str] | None = None,
) -> Request:
    """Variants (`rows`) of the architecture of a preset or model directory, with `fields` such as "layers=4" changed.

    Each is measured with each of `weights`, the types of its matrices: `dtype`, the default, and "int8".
    Raises one InputError for all invalid variants.
    """
    config = architecture(preset, model, fields)
    lengths = sorted(lengths)
    check_length(config, lengths[-1])
    sizes = dict(features=features, cross_features=cross_features, window=window)
    endings = {dtype: "", "int8": INT8}
    wrong = ", ".join(kind for kind in weights or [] if kind not in endings)
    problems = [f"--weights={wrong}: choose from {dtype}, which is --dtype, and int8"] if wrong else []
    chosen = {}
    for name in rows or default_variants(config):
        try:
            variant = converted(config, name, **sizes)
        except InputError as error:
            problems.append(str(error))
        else:
            chosen |= {name + endings.get(kind, ""): variant for kind in weights or [dtype]}
    raise_all("the models to measure:", problems)
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
    identity = {"architecture": preset or model, "fields": list(fields), **sizes, "digest": digest}
    return Request(chosen, lengths, batch, dtype, identity, source=model)


def architecture(preset_name: str | None, model: str | None, fields: Sequence[str]) -> ModelConfig:
    """The model config of a preset or a model directory, with some fields changed."""
    if (preset_name is None) == (model is None):
        given = "" if model is None else f", not both --preset={preset_name} and --model={model}"
        raise InputError(f"name one architecture: --preset=paper_lm, --preset=paper_mt, or --model=DIRECTORY{given}")
    changed = parse_fields(fields)
    if preset_name is not None:
        return preset(preset_name, **changed)
    return by_name.load_config(model).replace(**changed)


def parse_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """Parses NAME=VALUE assignments. A value is a Python literal, such as 4, True or (), or else a string."""
    fields, problems = {}, []
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            problems.append(f"--field={assignment}: write NAME=VALUE, such as vocab_size=32768")
            continue
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value
    raise_all("fields of the architecture:", problems)
    return fields
