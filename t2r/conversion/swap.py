"""The first step of conversion: softmax attention out, linear attention in, everything else kept."""

import dataclasses

from flax import nnx

from t2r.attention.module import LinearAttention, SoftmaxAttention, make_feature_map
from t2r.errors import InputError, raise_all
from t2r.model.config import AttentionSpec
from t2r.model.transformer import LanguageModel

# Where a decoder block has attention, and the config's field for it.
SPECS = {"attention": "attention", "cross": "cross_attention"}


def swap(
    model: LanguageModel,
    *,
    feature_map: str = "t2r",
    features: int | None = None,
    cross_features: int | None = None,
    keep: str = "none",
    attention: str = "all",
    seed: int = 0,
) -> LanguageModel:
    """The model with linear attention in all layers but those kept; parameters are shared with the original.

    Only φ is new: projections, feed-forwards, norms and embeddings stay what they were. In a translation model's
    decoder, causal and cross attention are swapped, each with its feature size, unless `attention` names one of them;
    the encoder is left alone.
    """
    config = model.config
    plan = {"attention": features}
    if config.encoder_layers:
        plan["cross"] = cross_features if cross_features is not None else features
    elif cross_features is not None:
        raise InputError(f"cross_features={cross_features}: a language model has no cross attention")
    chosen = {"all": set(plan), "causal": {"attention"}, "cross": {"cross"} & set(plan)}
    if attention not in chosen or not chosen[attention]:
        raise InputError(f"attention={attention!r}: choose all, causal, or in a translation model cross")
    plan = {place: AttentionSpec("linear", feature_map, plan[place]) for place in plan if place in chosen[attention]}
    raise_all("cannot swap:", [problem for spec in plan.values() for problem in spec.problems(config.head_dim)])
    kept = layers_to_keep(keep, len(model.blocks))
    model = nnx.merge(*nnx.split(model))  # a new object around the same arrays
    rngs = nnx.Rngs(seed)
    specs = {place: list(getattr(config, SPECS[place])) for place in plan}
    for layer, block in enumerate(model.blocks):
        for place, spec in plan.items():
            if layer not in kept and specs[place][layer].kind == "softmax":
                setattr(block, place, linearize(getattr(block, place), feature_map, spec.features, rngs=rngs))
                converted = dict(kind=spec.kind, feature_map=spec.feature_map, features=spec.features)
                specs[place][layer] = dataclasses.replace(specs[place][layer], **converted)
    model.config = dataclasses.replace(config, **{SPECS[place]: tuple(found) for place, found in specs.items()})
    if model.config == config:
        raise InputError(f"nothing to swap: keep={keep!r} leaves no softmax layer among {config.layers}")
    return model


def linearize(
    attention: SoftmaxAttention, feature_map: str, features: int | None, *, rngs: nnx.Rngs
) -> LinearAttention:
    """Linear attention with the projections of softmax attention and a fresh φ."""
    # Built without arrays: all but φ are about to be replaced.
    linear = nnx.eval_shape(lambda: LinearAttention(attention.shape, feature_map, features, rngs=nnx.Rngs(0)))
    linear.query, linear.key = attention.query, attention.key
    linear.value, linear.out = attention.value, attention.out
    if attention.shape.norm_eps is not None:
        linear.query_norm, linear.key_norm = attention.query_norm, attention.key_norm
    linear.feature_map = make_feature_map(attention.shape, feature_map, features, rngs=rngs)
    return linear


def layers_to_keep(keep: str, layers: int) -> set[int]:
    """`none`; `every_4th` counted from the top, the paper's T2R 75%; or a list of layer numbers such as `0,4,8`."""
    if keep == "none":
        return set()
    if keep == "every_4th":
        return set(range(layers - 1, -1, -4))
    try:
        kept = {int(layer) for layer in keep.split(",")}
    except ValueError:
        raise InputError(f"keep={keep!r}: use none, every_4th, or layer numbers such as 0,4,8") from None
    wrong = sorted(layer for layer in kept if not 0 <= layer < layers)
    if wrong:
        raise InputError(f"keep={keep!r}: the model has layers 0 to {layers - 1}, not {', '.join(map(str, wrong))}")
    return kept
