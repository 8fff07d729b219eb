"""The first step of conversion: softmax attention is replaced by linear attention, and nothing else changes (§2.2)."""

import dataclasses
import re
from collections import Counter
from typing import Any

from flax import nnx

from t2r.attention.module import (
    LinearAttention,
    SoftmaxAttention,
    WindowedAttention,
    make_feature_map,
    make_mixture,
)
from t2r.environment import require_memory, total_bytes
from t2r.errors import InputError, check_seed, raise_all
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.transformer import LanguageModel, make_attention

# The attention modules of a decoder block, and the config's field for each.
SPECS = {"attention": "attention", "cross": "cross_attention"}
CHANGED = ("kind", "feature_map", "features", "window", "sinks")  # the fields of an AttentionSpec that a swap sets


def swap(model: LanguageModel, *, seed: int = 0, **plan: Any) -> LanguageModel:
    """The model with the attention of `swapped_config(model.config, **plan)`.

    Only φ, and how near and distant tokens mix, is new; all other parameters are shared with the original.
    """
    check_seed(seed)
    config = swapped_config(model.config, **plan)
    before = _specs(model.config)
    chosen = {place: spec for place, spec in _specs(config).items() if spec != before[place]}
    check_memory(model, [(name, spec) for (_, name), spec in chosen.items()])
    model = nnx.merge(*nnx.split(model))  # a new object that shares the arrays
    rngs = nnx.Rngs(seed)
    for (layer, name), spec in chosen.items():
        block = model.blocks[layer]
        setattr(block, name, linearize(getattr(block, name), spec, rngs=rngs))
    model.config = config
    return model


def _specs(config: ModelConfig) -> dict[tuple[int, str], AttentionSpec]:
    """Each attention of the decoder by its layer and name, from the bottom."""
    named = {(layer, name): spec for name, field in SPECS.items() for layer, spec in enumerate(getattr(config, field))}
    return dict(sorted(named.items()))


def swapped_config(
    config: ModelConfig,
    *,
    feature_map: str = "t2r",
    features: int | None = None,
    cross_features: int | None = None,
    window: int = 0,
    sinks: int = 0,
    keep: str = "none",
    cross_keep: str | None = None,
    attention: str = "all",
) -> ModelConfig:
    """The config with linear attention in all layers except those that `keep` names (see `layers_to_keep`).

    `cross_keep` names those whose cross attention is kept; None: the same. With a `window`, causal attention stays
    exact for the last `window` tokens and the first `sinks`. In a translation model, the decoder's causal and cross
    attention are swapped, with `features` and `cross_features`, unless `attention` is "causal" or "cross". The encoder
    is unchanged.
    """
    feature_sizes = {"attention": features}
    if config.encoder_layers:
        feature_sizes["cross"] = cross_features if cross_features is not None else features
    choices = {"all": set(feature_sizes), "causal": {"attention"}, "cross": {"cross"} & set(feature_sizes)}
    chosen_names = choices.get(attention, set())
    problems = _problems_of_choice(config, attention, chosen_names, cross_features, cross_keep, window, sinks)
    new_specs = {
        name: AttentionSpec("linear", feature_map, size) for name, size in feature_sizes.items() if name in chosen_names
    }
    if "attention" in new_specs:
        exact = dict(kind="windowed" if window else "linear", window=window, sinks=sinks)
        new_specs["attention"] = dataclasses.replace(new_specs["attention"], **exact)
    for name, spec in new_specs.items():
        own = "cross attention: " if name == "cross" and cross_features is not None else ""
        problems += [own + problem for problem in spec.problems(config.head_dim) if problem not in problems]
    kept = {}
    for name, given, choice in (("attention", "keep", keep), ("cross", "cross_keep", cross_keep)):
        try:
            kept[name] = kept.get("attention") if choice is None else layers_to_keep(choice, config.layers, given)
        except InputError as error:
            problems.append(str(error))
    raise_all("cannot swap:", problems)
    specs = {name: list(getattr(config, SPECS[name])) for name in new_specs}
    chosen = [
        (layer, name)
        for layer in range(config.layers)
        for name in new_specs
        if layer not in kept[name] and specs[name][layer].kind == "softmax"
    ]
    for layer, name in chosen:
        changes = {field: getattr(new_specs[name], field) for field in CHANGED}
        specs[name][layer] = dataclasses.replace(specs[name][layer], **changes)
    swapped = dataclasses.replace(config, **{SPECS[name]: tuple(specs[name]) for name in specs})
    if swapped == config:
        which = {"all": "attention", "causal": "causal attention", "cross": "cross attention"}[attention]
        if not any(spec.kind == "softmax" for name in new_specs for spec in specs[name]):
            raise InputError(f"nothing to swap: all of this model's {which} is linear already; give its transformer")
        chosen_by = f"keep={keep!r}" + ("" if cross_keep is None else f" and cross_keep={cross_keep!r}")
        raise InputError(
            f"nothing to swap: {chosen_by} keeps all softmax {which} of {config.layers} layers: keep fewer"
        )
    return swapped


def _problems_of_choice(
    config: ModelConfig,
    attention: str,
    chosen: set[str],
    cross_features: int | None,
    cross_keep: str | None,
    window: int,
    sinks: int,
) -> list[str]:
    """What is wrong with the choice of which attention is swapped; `chosen` are its names."""
    problems = []
    for name, value in (("cross_features", cross_features), ("cross_keep", cross_keep)):
        if value is not None and not config.encoder_layers:
            problems.append(f"{name}={value!r}: a language model has no cross attention")
    if not chosen:
        problems.append(f"attention={attention!r}: choose all or causal, or for a translation model cross")
    elif (window or sinks) and "attention" not in chosen:
        problems.append(
            f"window={window} and sinks={sinks} are for causal attention, which attention={attention!r} does not "
            "convert: set both to 0, or attention='all'"
        )
    elif sinks > 0 and not window:
        problems.append(f"sinks={sinks} needs a window: linear attention alone keeps no token exactly")
    return problems


def check_memory(model: LanguageModel, swapped: list[tuple[str, AttentionSpec]]) -> None:
    """Raises an error, before anything is computed, if the new feature maps do not fit into free memory.

    `swapped` has the name and the new spec of each attention.
    """

    def map_bytes(name: str, spec: AttentionSpec) -> int:
        shape = getattr(model.blocks[0], name).shape
        make = lambda: make_feature_map(shape, spec.feature_map, spec.features, rngs=nnx.Rngs(0))  # noqa: E731
        return total_bytes(nnx.state(nnx.eval_shape(make)))

    counts = Counter(swapped)
    sizes = " and ".join(f"{count} feature maps of {spec.features} features" for (_, spec), count in counts.items())
    needed = sum(count * map_bytes(*both) for both, count in counts.items())
    require_memory(needed, f"a conversion to {sizes}", lambda free: "choose fewer features")


def linearize(
    attention: SoftmaxAttention, spec: AttentionSpec, *, rngs: nnx.Rngs
) -> LinearAttention | WindowedAttention:
    """The attention of `spec`, with the projections of softmax attention and a randomly initialised φ."""
    # Built without arrays: all modules are replaced below.
    linear = nnx.eval_shape(lambda: make_attention(attention.shape, spec, rngs=nnx.Rngs(0)))
    linear.feature_map = make_feature_map(attention.shape, spec.feature_map, spec.features, rngs=rngs)
    if spec.kind == "windowed":
        linear.mixture = make_mixture(attention.shape)
    linear.query, linear.key = attention.query, attention.key
    linear.value, linear.out = attention.value, attention.out
    if attention.shape.norm_eps is not None:
        linear.query_norm, linear.key_norm = attention.query_norm, attention.key_norm
    return linear


def layers_to_keep(keep: str, layers: int, name: str = "keep") -> set[int]:
    """The layers that stay softmax: `none`, `every_4th` (8th, ...) from the top, or a list like `0,4,8`.

    The paper's T2R 75% keeps every fourth. Errors call the choice `name`.
    """
    if keep == "none":
        return set()
    if every := re.fullmatch(r"every_([1-9]\d*)(st|nd|rd|th)", keep):
        return set(range(layers - 1, -1, -int(every[1])))
    try:
        kept = {int(layer) for layer in keep.split(",")}
    except ValueError:
        known = "use none, every_4th, or layer numbers such as 0,4,8; t2r convert and t2r train also measure: auto:2"
        raise InputError(f"{name}={keep!r}: {known}") from None
    missing = sorted(layer for layer in kept if not 0 <= layer < layers)
    if missing:
        raise InputError(f"{name}={keep!r}: the model has layers 0 to {layers - 1}, not {', '.join(map(str, missing))}")
    return kept
