"""How a converted model uses its feature maps: features that are always zero, and normalisers at their bound."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from t2r.analysis.inputs import Inputs, attention_inputs
from t2r.attention.feature_map import Features
from t2r.attention.module import WindowedAttention, is_linear
from t2r.batch import Batch
from t2r.model.transformer import LanguageModel
from t2r.normalizer import Normalizer


class FeatureUse(NamedTuple):
    """What a batch says about the feature map of one attention."""

    features: int  # of all heads together
    dead: int  # of these, zero for all queries or for all keys: they add nothing to any φ(q)·φ(k)
    dead_by_head: list[int]  # of each key/value head
    clamped: float | None  # share of normalisers φ(q)·z below their least value; None: the attention has no such bound


class FeatureCounts(NamedTuple):
    """What one or more batches say about the feature map of one attention; `add` joins two of them."""

    used_by_queries: Bool[Array, "g k"]  # not zero for some query
    used_by_keys: Bool[Array, "g k"]
    clamped: Float[Array, ""] | None  # normalisers below their least value; None: there is no such bound
    normalizers: Float[Array, ""]

    def add(self, other: "FeatureCounts") -> "FeatureCounts":
        """The counts of both."""
        return FeatureCounts(
            self.used_by_queries | other.used_by_queries,
            self.used_by_keys | other.used_by_keys,
            None if self.clamped is None else self.clamped + other.clamped,
            self.normalizers + other.normalizers,
        )

    def use(self) -> FeatureUse:
        """The counts as numbers."""
        dead = ~(self.used_by_queries & self.used_by_keys)
        clamped = None if self.clamped is None else float(self.clamped / self.normalizers)
        return FeatureUse(dead.size, int(dead.sum()), dead.sum(1).tolist(), clamped)


def feature_use(model: LanguageModel, batch: Batch) -> dict[str, FeatureUse]:
    """By the name of each linear attention of the decoder, such as `3.cross`; padding does not count."""
    return {name: counts.use() for name, counts in _count(*nnx.split(model), jax.tree.map(jnp.asarray, batch)).items()}


@functools.partial(jax.jit, static_argnums=0)
def _count(graph: nnx.GraphDef, arrays: nnx.State, batch: Batch) -> dict[str, FeatureCounts]:
    seen = attention_inputs(nnx.merge(graph, arrays), batch)
    return {inputs.name: count_features(inputs) for inputs in seen if is_linear(inputs.attention)}


def count_features(inputs: Inputs) -> FeatureCounts:
    """The counts of one linear attention, which may be traced."""
    attention, crosses = inputs.attention, inputs.source is not None
    q = _features(attention, inputs.x, None if crosses else inputs.positions, is_query=True)
    keys = (inputs.source, None) if crosses else (inputs.x, inputs.positions)
    k = _features(attention, *keys, is_query=False)
    real_q, real_k = inputs.real, inputs.real_source if crosses else inputs.real
    used_by_queries = ((q.values != 0) & real_q[:, :, None, None, None]).any((0, 1, 3))
    used_by_keys = ((k.values != 0) & real_k[:, :, None, None]).any((0, 1))
    count = real_q.sum() * jnp.float32(q.values.shape[2] * q.values.shape[3])
    bounded = not isinstance(attention, WindowedAttention) and attention.normalizer.clamp and k.log_scale is None
    clamped = None
    if bounded:
        clamped = _clamped(q.values, k.values, real_q, real_k, attention.normalizer, causal=not crosses)
    return FeatureCounts(used_by_queries, used_by_keys, clamped, count)


def _features(attention: nnx.Module, x: Array, positions: Int[Array, "b n"] | None, *, is_query: bool) -> Features:
    if isinstance(attention, WindowedAttention):
        vectors = attention.queries(x, positions) if is_query else attention.keys(x, positions)
        return attention.feature_map(vectors, is_query=is_query)
    return (attention.query_features if is_query else attention.key_features)(x, positions, None)


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
    return (below & real_q[:, :, None, None]).sum(dtype=jnp.float32)
