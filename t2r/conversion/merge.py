"""The last step of conversion: φ folded into the projections, for inference."""

import dataclasses

from flax import nnx

from t2r.attention.module import LinearAttention, MergedLinearAttention
from t2r.conversion.swap import SPECS
from t2r.errors import InputError, raise_all
from t2r.model.transformer import LanguageModel


def merge(model: LanguageModel) -> LanguageModel:
    """The model with every T2R attention merged; softmax attention stays. What cannot be merged is refused."""
    config = model.config
    specs = {place: list(getattr(config, field)) for place, field in SPECS.items()}
    linear = [
        (place, layer) for place, found in specs.items() for layer, spec in enumerate(found) if spec.kind == "linear"
    ]
    if not linear:
        raise InputError("nothing to merge: the model has no unmerged linear attention; convert it first")
    problems = [
        f"layer {layer}, {SPECS[place]}: only the feature map 't2r' is linear before its activation, "
        f"not {specs[place][layer].feature_map!r}"
        for place, layer in linear
        if specs[place][layer].feature_map != "t2r"
    ]
    if config.positions == "rotary" and any(place == "attention" for place, _ in linear):
        problems.append("rotary positions turn queries and keys between projection and φ, by another angle each time")
    raise_all("cannot merge φ into the projections:", problems)
    model = nnx.merge(*nnx.split(model))  # a new object around the same arrays
    for place, layer in linear:
        block = model.blocks[layer]
        setattr(block, place, merge_attention(getattr(block, place)))
        specs[place][layer] = dataclasses.replace(specs[place][layer], kind="merged")
    model.config = dataclasses.replace(config, **{SPECS[place]: tuple(found) for place, found in specs.items()})
    return model


def merge_attention(attention: LinearAttention) -> MergedLinearAttention:
    """One layer's merge."""
    features = attention.feature_map.weight.shape[1]
    merged = nnx.eval_shape(lambda: MergedLinearAttention(attention.shape, features, rngs=nnx.Rngs(0)))
    merged.value, merged.out = attention.value, attention.out
    for name in ("query", "key"):
        kernel, bias = attention.merged(name)
        projection = getattr(merged, name)
        projection.kernel, projection.bias = nnx.Param(kernel), nnx.Param(bias)
    return merged
