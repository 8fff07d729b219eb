"""The last step of conversion: φ is merged into the query and key projections, for inference (§2.2)."""

import dataclasses

from flax import nnx

from t2r.attention.module import LinearAttention, MergedLinearAttention
from t2r.conversion.swap import SPECS
from t2r.errors import InputError, raise_all
from t2r.model.transformer import LanguageModel


def merge(model: LanguageModel) -> LanguageModel:
    """The model with W̃ and b̃ in place of W_φ, b_φ and the query and key projections; softmax attention is unchanged.

    W̃_q = W_φ W_q and b̃_q = b_φ + W_φ b_q, and the same for keys: see `LinearAttention.merged`.
    An error if any linear attention cannot be merged.
    """
    config = model.config
    specs = {name: list(getattr(config, field)) for name, field in SPECS.items()}
    problems = [
        f"layer {layer}: attention with a window needs its queries and keys, not φ of them alone"
        for layer, spec in enumerate(config.attention)
        if spec.kind == "windowed"
    ]
    raise_all("cannot merge φ into the projections:", problems)
    linear = [
        (name, layer)
        for name, layer_specs in specs.items()
        for layer, spec in enumerate(layer_specs)
        if spec.kind == "linear"
    ]
    if not linear:
        merged = any(spec.kind == "merged" for layer_specs in specs.values() for spec in layer_specs)
        hint = "it is merged already" if merged else "convert it first"
        raise InputError(f"nothing to merge: the model has no unmerged linear attention; {hint}")
    problems = [
        f"layer {layer}, {SPECS[name]}: only the feature map 't2r' can be merged, not "
        f"{specs[name][layer].feature_map!r}: use the model as it is"
        for name, layer in linear
        if specs[name][layer].feature_map != "t2r"
    ]
    if config.positions == "rotary" and any(name == "attention" and specs[name][i].rotary for name, i in linear):
        problems.append("rotary positions rotate queries and keys between the projection and φ")
    if config.query_norm:
        problems.append("queries and keys are normalised between the projection and φ")
    raise_all("cannot merge φ into the projections:", problems)
    model = nnx.merge(*nnx.split(model))  # a new object that shares the arrays
    for name, layer in linear:
        block = model.blocks[layer]
        setattr(block, name, merge_attention(getattr(block, name)))
        specs[name][layer] = dataclasses.replace(specs[name][layer], kind="merged")
    model.config = dataclasses.replace(config, **{SPECS[name]: tuple(specs[name]) for name in specs})
    return model


def merge_attention(attention: LinearAttention) -> MergedLinearAttention:
    """Merged attention with the same value and output projections."""
    features = attention.feature_map.weight.shape[1]
    merged = nnx.eval_shape(lambda: MergedLinearAttention(attention.shape, features, rngs=nnx.Rngs(0)))
    merged.value, merged.out = attention.value, attention.out
    for name in ("query", "key"):
        kernel, bias = attention.merged(name)
        projection = getattr(merged, name)
        projection.kernel, projection.bias = nnx.Param(kernel), nnx.Param(bias)
    return merged
