"""How a converted model uses its feature maps: features that are always zero, and normalisers at their bound."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from t2r.attention.feature_map import Features
from t2r.attention.module import WindowedAttention, is_linear
from t2r.batch import PADDING, Batch, inputs_and_targets
from t2r.model.transformer import LanguageModel
from t2r.normalizer import Normalizer


class FeatureUse(NamedTuple):
    """What a batch says about the feature map of one attention."""

    features: int  # of all heads together
    dead: int  # of these, zero for all queries or for all keys: they add nothing to any φ(q)·φ(k)
    dead_by_head: list[int]  # of each key/value head
    clamped: float | None  # share of normalisers φ(q)·z below their least value; None: the attention has no such bound


def feature_use(model: LanguageModel, batch: Batch) -> dict[str, FeatureUse]:
    """By the name of each linear attention of the decoder, such as `3.cross`; padding does not count."""
    measured = _measure(*nnx.split(model), jax.tree.map(jnp.asarray, batch))
    return {
        name: FeatureUse(dead.size, int(dead.sum()), dead.sum(1).tolist(), None if clamped is None else float(clamped))
        for name, (dead, clamped) in measured.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def _measure(
    graph: nnx.GraphDef, arrays: nnx.State, batch: Batch
) -> dict[str, tuple[Bool[Array, "g k"], Float[Array, ""] | None]]:
    model, measured = nnx.merge(graph, arrays), {}
    tokens, targets = inputs_and_targets(batch)
    real, positions = targets != PADDING, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    encoded, real_source = None, None
    if batch.source is not None:
        real_source = batch.source != PADDING
        encoded = model.encode(jnp.maximum(batch.source, 0), real_source)

    def look(layer: int, name: str, inputs: Array, outputs: Array) -> None:
        attention, crosses = getattr(model.blocks[layer], name), name == "cross"
        if not is_linear(attention):
            return
        q = _features(attention, inputs, None if crosses else positions, is_query=True)
        k = _features(attention, *((encoded, None) if crosses else (inputs, positions)), is_query=False)
        masks = real, real_source if crosses else real
        bounded = not isinstance(attention, WindowedAttention) and attention.normalizer.clamp and k.log_scale is None
        clamped = _clamped(q.values, k.values, *masks, attention.normalizer, causal=not crosses) if bounded else None
        measured[f"{layer}.{name}"] = _dead(q.values, k.values, *masks), clamped

    x = model.embed(tokens, positions)
    for layer, block in enumerate(model.blocks):
        state = None if encoded is None else block.source_state(encoded, mask=real_source)
        x, _ = block(x, source=state, positions=positions, on_attention=functools.partial(look, layer))
    return measured


def _features(attention: nnx.Module, x: Array, positions: Int[Array, "b n"] | None, *, is_query: bool) -> Features:
    if isinstance(attention, WindowedAttention):
        vectors = attention.queries(x, positions) if is_query else attention.keys(x, positions)
        return attention.feature_map(vectors, is_query=is_query)
    return (attention.query_features if is_query else attention.key_features)(x, positions, None)


def _dead(
    q: Float[Array, "b n g r k"], k: Float[Array, "b m g k"], real_q: Bool[Array, "b n"], real_k: Bool[Array, "b m"]
) -> Bool[Array, "g k"]:
    used_by_queries = ((q != 0) & real_q[:, :, None, None, None]).any((0, 1, 3))
    used_by_keys = ((k != 0) & real_k[:, :, None, None]).any((0, 1))
    return ~(used_by_queries & used_by_keys)


def _clamped(
    q: Float[Array, "b n g r k"],
    k: Float[Array, "b m g k"],
    real_q: Bool[Array, "b n"],
    real_k: Bool[Array, "b m"],
    normalizer: Normalizer,
    *,
    causal: bool,
) -> Float[Array, ""]:
    keys = jnp.where(real_k[:, :, None, None], k.astype(jnp.float32), 0)
    z = jnp.cumsum(keys, 1) if causal else keys.sum(1, keepdims=True)
    z = jnp.broadcast_to(z, (*q.shape[:3], q.shape[-1]))
    below = jnp.einsum("bngrk,bngk->bngr", q.astype(jnp.float32), z) < normalizer.value
    real = jnp.broadcast_to(real_q[:, :, None, None], below.shape)
    return (below & real).sum() / real.sum()
