"""The last step of conversion: φ folded into the projections, for inference.

With s = d^-½: W̃q = s·Wφ Wq, b̃q = s·Wφ bq + bφ, W̃k = Wφ Wk, b̃k = Wφ bk + bφ.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from t2r.attention.module import LinearAttention, MergedLinearAttention
from t2r.convert.swap import SPECS
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
    shape, phi = attention.shape, attention.feature_map
    weight, bias = phi.weight[...], phi.bias[...]  # (g, k, d), (g, k)
    group = shape.heads // shape.kv_heads
    merged = nnx.eval_shape(lambda: MergedLinearAttention(shape, weight.shape[1], rngs=nnx.Rngs(0)))
    merged.value, merged.out = attention.value, attention.out
    # Queries have `group` heads to each φ, keys have one.
    per_query = jnp.repeat(weight, group, 0), jnp.repeat(bias, group, 0)
    for name, scale, (w, b) in [("query", phi.query_scale, per_query), ("key", 1.0, (weight, bias))]:
        before, after = getattr(attention, name), getattr(merged, name)
        after.kernel = nnx.Param(scale * jnp.einsum("ehd,hkd->ehk", before.kernel[...], w))
        moved = 0.0 if before.bias is None else scale * jnp.einsum("hd,hkd->hk", before.bias[...], w)
        after.bias = nnx.Param(moved + b)
    return merged
