"""Attention distributions in numbers, head by head: distance to a transformer's, KL divergence, entropy, look-back.

Sums over queries are kept, not distributions, so memory does not grow with the data.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from t2r.analysis.features import FeatureCounts, FeatureUse, count_features
from t2r.analysis.inputs import Inputs, attention_inputs
from t2r.attention.module import is_linear
from t2r.batch import Batch
from t2r.model.transformer import LanguageModel

SPAN = 0.9  # of the weight
# KL divergence is infinite where a weight of the model is exactly zero, as relu makes many: it is at least this.
LEAST_WEIGHT = 1e-6
NEGATIVE = -1e-6  # a weight below it is negative, not rounded


class Sums(NamedTuple):
    """Sums over the queries of each head; a query that gives no key any weight has a distance, and nothing else."""

    queries: Float[Array, "h"]
    distance: Float[Array, "h"]
    with_weight: Float[Array, "h"]  # queries whose weights are not all zero
    entropy: Float[Array, "h"]
    kl: Float[Array, "h"]
    look_back: Float[Array, "h"]
    span: Float[Array, "h"]
    negative: Float[Array, "h"]  # queries with a negative weight, as RFA may have: no distribution


def sums_of(
    weights: Float[Array, "b h q m"],
    reference: Float[Array, "b h q m"] | None,
    counted: Bool[Array, "b q"],
    positions: Float[Array, "b q"],
) -> Sums:
    """The sums of the counted queries; `reference` has the transformer's weights, `positions` where each query is."""
    counted, total = counted[:, None, :], weights.sum(-1)
    valid = counted & (total > 0)
    negative = counted & (weights.min(-1) < NEGATIVE)
    shares = jnp.maximum(weights, 0) / jnp.maximum(total, 1e-30)[..., None]
    distances = kl = jnp.zeros_like(total)
    if reference is not None:
        distances = jnp.sqrt(jnp.square(weights - reference).sum(-1))
        kl = (_x_log(reference, reference) - _x_log(reference, jnp.maximum(shares, LEAST_WEIGHT))).sum(-1)
        kl = jnp.maximum(kl, 0)  # with a least weight the shares may sum to a little more than 1
    back = positions[:, None, :, None] - jnp.arange(weights.shape[-1])
    reach = jnp.cumsum(shares[..., ::-1], -1)[..., ::-1]  # of key j: the weight of keys j, j + 1, ...
    # The keys at which the reach is still large enough are the first ones; the last of them begins the span.
    span = positions[:, None, :] + 2 - (reach >= SPAN).sum(-1)

    def add(values: Array, where: Array) -> Float[Array, "h"]:
        return jnp.where(where, values, 0).sum((0, 2), dtype=jnp.float32)

    ones = jnp.ones_like(total)
    return Sums(
        queries=add(ones, counted),
        distance=add(distances, counted),
        with_weight=add(ones, valid),
        entropy=add(-_x_log(shares, shares).sum(-1), valid),
        kl=add(kl, valid),
        look_back=add((shares * back).sum(-1), valid),
        span=add(span, valid),
        negative=add(ones, negative),
    )


def _x_log(x: Array, y: Array) -> Array:
    """x log y, which is 0 where x is 0."""
    return jnp.where(x > 0, x * jnp.log(jnp.where(x > 0, y, 1.0)), 0.0)


class AttentionStatistics(NamedTuple):
    """What the data says about one attention; lists have a value for each head. None is what cannot be said.

    A head that gives no key any weight, for any query, has a distance only.
    """

    name: str  # such as `3.attention` or `3.cross`
    kind: str  # softmax, linear, windowed, merged
    distance: list[float] | None  # mean Euclidean distance to the transformer's distributions
    kl: list[float | None] | None  # mean KL divergence of the distributions from the transformer's, in nats
    entropy: list[float | None] | None  # in nats
    # Not of cross attention: the mean distance of keys in tokens, weighted by attention; how many of the last tokens
    # hold 90% of the weight.
    look_back: list[float | None] | None
    span: list[float | None] | None
    no_weight: float  # share of queries that give no key any weight
    features: FeatureUse | None  # None: softmax


def measure(
    model: LanguageModel,
    batches: Iterable[Batch],
    *,
    transformer: LanguageModel | None = None,
    queries: int | None = None,
) -> list[AttentionStatistics]:
    """The statistics of each attention of the decoder over all batches, which may be read one by one.

    Only the last `queries` places of the batch count, which are the last tokens of full sequences; None: all. With a
    transformer, distances to the attention of the same name, which runs on its own activations.
    """
    graph, arrays = nnx.split(model)
    alone = transformer is None or transformer is model  # its distance to itself is 0, whatever rounding makes of it
    reference = (None, None) if alone else nnx.split(transformer)
    sums: dict[str, Sums] = {}
    counts: dict[str, FeatureCounts] = {}
    for batch in batches:
        batch = jax.tree.map(jnp.asarray, batch)
        for name, (new, used) in _measure(graph, reference[0], queries, arrays, reference[1], batch).items():
            # Many float32 sums are added in float64.
            new = Sums(*(np.asarray(value, np.float64) for value in new))
            sums[name] = Sums(*map(np.add, sums[name], new)) if name in sums else new
            if used is not None:
                used = jax.tree.map(np.asarray, used)
                counts[name] = counts[name].add(used) if name in counts else used
    modules = {
        f"{layer}.{name}": getattr(block, name)
        for layer, block in enumerate(model.blocks)
        for name in ("attention", "cross")
        if hasattr(block, name)
    }
    return [
        _statistics(name, modules[name].kind, total, counts.get(name), compared=transformer is not None)
        for name, total in sums.items()
    ]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
    graph: nnx.GraphDef,
    reference_graph: nnx.GraphDef | None,
    queries: int | None,
    arrays: nnx.State,
    reference_arrays: nnx.State | None,
    batch: Batch,
) -> dict[str, tuple[Sums, FeatureCounts | None]]:
    seen = attention_inputs(nnx.merge(graph, arrays), batch)
    references: list[Inputs | None] = [None] * len(seen)
    if reference_graph is not None:
        references = attention_inputs(nnx.merge(reference_graph, reference_arrays), batch)
    last = slice(None) if queries is None else slice(-queries, None)
    results = {}
    for inputs, reference in zip(seen, references):
        compared = None if reference is None else reference.weights()[:, :, last]
        where = inputs.real[:, last], inputs.positions[:, last].astype(jnp.float32)
        sums = sums_of(inputs.weights()[:, :, last], compared, *where)
        results[inputs.name] = sums, count_features(inputs) if is_linear(inputs.attention) else None
    return results


def _statistics(
    name: str, kind: str, sums: Sums, counts: FeatureCounts | None, *, compared: bool
) -> AttentionStatistics:
    signed, crosses = bool(sums.negative.any()), name.endswith(".cross")

    def mean(totals: np.ndarray, counts: np.ndarray, *, known: bool) -> list[float | None] | None:
        return [float(total / count) if count else None for total, count in zip(totals, counts)] if known else None

    return AttentionStatistics(
        name,
        kind,
        mean(sums.distance, sums.queries, known=compared),
        mean(sums.kl, sums.with_weight, known=compared and not signed),
        mean(sums.entropy, sums.with_weight, known=not signed),
        mean(sums.look_back, sums.with_weight, known=not signed and not crosses),
        mean(sums.span, sums.with_weight, known=not signed and not crosses),
        float(1 - sums.with_weight.sum() / max(sums.queries.sum(), 1)),
        None if counts is None else counts.use(),
    )


MEASURES = ("distance", "kl", "entropy", "look_back", "span")


def mean_of_heads(values: list[float | None] | None) -> float | None:
    """The mean over the heads of one attention of which a measure is known; None if there are none."""
    known = [value for value in values or () if value is not None]
    return float(np.mean(known)) if known else None


def averages(statistics: Iterable[AttentionStatistics], name: str = "attention") -> dict[str, Any]:
    """Means over heads and layers of the causal attention, or of the cross attention with name="cross".

    Heads for which a measure is unknown do not count; if it is unknown for a whole layer, there is no mean. `dead` is a
    share of all features, `clamped` of normalisers.
    """
    chosen = [one for one in statistics if one.name.endswith(f".{name}")]
    result: dict[str, Any] = {}
    for measure_name in MEASURES:
        layers = [mean_of_heads(getattr(one, measure_name)) for one in chosen]
        result[measure_name] = None if None in layers else float(np.mean(layers))
    used = [one.features for one in chosen if one.features is not None]
    result["dead"] = sum(use.dead for use in used) / sum(use.features for use in used) if used else None
    clamped = [use.clamped for use in used if use.clamped is not None]
    result["clamped"] = float(np.mean(clamped)) if clamped else None
    result["no_weight"] = float(np.mean([one.no_weight for one in chosen]))
    return result
