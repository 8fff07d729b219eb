"""Attention modules: softmax, linear, windowed and merged linear attention behind one interface.

Causal self-attention is a call: `out, state = attention(x, state=state)`. Bidirectional and cross attention are two
steps: `state = build_state(source)` once, then `out = query_state(x, state)` as often as needed. The state is a
`KVCache`, a `LinearState` or a `WindowedState`. Axes are those of `feature_map.py`, and h = g·r is the number of query
heads.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention import linear, softmax, windowed
from t2r.attention.feature_map import T2R, Features, feature_map_class
from t2r.attention.linear import LinearState
from t2r.attention.rotary import Rotary, rotate
from t2r.attention.softmax import BeamCache, KVCache
from t2r.attention.windowed import WindowedState
from t2r.errors import InputError

State = KVCache | BeamCache | LinearState | WindowedState
_xavier = nnx.initializers.xavier_uniform()


@dataclass(frozen=True)
class AttentionShape:
    """The sizes and options of multihead attention; conversion does not change them."""

    width: int  # of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool  # of the output projection
    projection_bias: bool | None = None  # of the query, key and value projections; None: same as `bias`
    rotary: Rotary | None = None
    norm_eps: float | None = None  # epsilon of an RMS norm of queries and keys, before rotation; None: no such norm
    norm_heads: bool = False  # the norm is over all heads of a token together, not over each
    window: int = 0  # softmax attends to the last `window` tokens, its own included; 0: all
    dropout: float = 0.0
    dtype: str = "float32"  # of activations; parameters are float32
    kernels: str = "auto"  # see `t2r.kernels.support.kernel_platform`

    @property
    def query_scale(self) -> float:
        """d^-½, by which queries are multiplied."""
        return self.head_dim**-0.5


def projection(
    shape: AttentionShape, heads: int, size: int, rngs: nnx.Rngs, *, bias: bool | None = None
) -> nnx.LinearGeneral:
    """A linear layer from (…, width) to (…, heads, size)."""
    if bias is None:
        bias = shape.bias if shape.projection_bias is None else shape.projection_bias
    return nnx.LinearGeneral(
        shape.width,
        (heads, size),
        use_bias=bias,
        dtype=jnp.dtype(shape.dtype),
        kernel_init=_xavier,
        rngs=rngs,
    )


class HeadsNorm(nnx.Module):
    """An RMS norm over all heads of a token together, each with its own scales."""

    def __init__(self, heads: int, head_dim: int, epsilon: float):
        self.scales = nnx.Param(jnp.ones(heads * head_dim))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "b n h d"]) -> Float[Array, "b n h d"]:
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.square(y).mean((-2, -1), keepdims=True) + self.epsilon)
        return (y * self.scales[...].reshape(x.shape[-2:])).astype(x.dtype)


def make_query_norm(shape: AttentionShape, heads: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """The norm of queries, or of keys, which may have fewer heads."""
    if shape.norm_heads:
        return HeadsNorm(heads, shape.head_dim, shape.norm_eps)
    return nnx.RMSNorm(shape.head_dim, epsilon=shape.norm_eps, dtype=jnp.dtype(shape.dtype), rngs=rngs)


class _Attention(nnx.Module):
    """The value and output projections, which all three kinds have."""

    def __init__(self, shape: AttentionShape, *, rngs: nnx.Rngs):
        self.shape = shape
        self.value = projection(shape, shape.kv_heads, shape.head_dim, rngs)
        self.out = nnx.LinearGeneral(
            (shape.heads, shape.head_dim),
            shape.width,
            axis=(-2, -1),
            use_bias=shape.bias,
            dtype=jnp.dtype(shape.dtype),
            kernel_init=_xavier,
            rngs=rngs,
        )

    def _grouped(self, q: Float[Array, "b n h d"]) -> Float[Array, "b n g r d"]:
        """Query heads grouped by the key/value head they share."""
        return q.reshape(*q.shape[:2], self.shape.kv_heads, -1, q.shape[-1])

    def _finish(self, out: Float[Array, "b n g r d"]) -> Float[Array, "b n width"]:
        """The output projection of the concatenated heads."""
        return self.out(out.reshape(*out.shape[:2], self.shape.heads, self.shape.head_dim))

    @staticmethod
    def _by_head(weights: Float[Array, "b g n r m"]) -> Float[Array, "b h n m"]:
        """Attention weights with one axis for all query heads."""
        batch, groups, n, per_group, m = weights.shape
        return jnp.swapaxes(weights, 2, 3).reshape(batch, groups * per_group, n, m)


class _Projected(_Attention):
    """Attention with query and key projections: q = W_q x + b_q and k = W_k x + b_k."""

    def __init__(self, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(shape, rngs=rngs)
        self.query = projection(shape, shape.heads, shape.head_dim, rngs)
        self.key = projection(shape, shape.kv_heads, shape.head_dim, rngs)
        if shape.norm_eps is not None:
            self.query_norm, self.key_norm = (
                make_query_norm(shape, heads, rngs=rngs) for heads in (shape.heads, shape.kv_heads)
            )

    def queries(self, x: Float[Array, "b n width"], positions: Int[Array, "b n"] | None) -> Float[Array, "b n g r d"]:
        """Queries, normalised and rotated if the model does that; `positions` None: 0, 1, 2, …"""
        q = self.query(x)
        q = q if self.shape.norm_eps is None else self.query_norm(q)
        return self._grouped(self._rotated(q, positions))

    def keys(self, x: Float[Array, "b m width"], positions: Int[Array, "b m"] | None) -> Float[Array, "b m g d"]:
        """Keys, normalised and rotated if the model does that; `positions` None: 0, 1, 2, …"""
        k = self.key(x)
        k = k if self.shape.norm_eps is None else self.key_norm(k)
        return self._rotated(k, positions)

    def _rotated(self, x: Array, positions: Array | None) -> Array:
        if self.shape.rotary is None:
            return x
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return rotate(x, positions, self.shape.rotary)


class SoftmaxAttention(_Projected):
    """The pretrained transformer's attention (§2.1)."""

    kind = "softmax"

    def init_state(self, batch: int, capacity: int) -> KVCache:
        shape = self.shape
        return KVCache.zeros(batch, capacity, shape.kv_heads, shape.head_dim, jnp.dtype(shape.dtype))

    def __call__(
        self,
        x: Float[Array, "b n width"],
        *,
        state: KVCache | BeamCache | None = None,
        mask: Bool[Array, "b n"] | None = None,
        positions: Int[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n width"], KVCache | BeamCache | None]:
        q, k, v = self.queries(x, positions), self.keys(x, positions), self.value(x)
        shape, dropout_options = self.shape, dict(dropout=self.shape.dropout, key=key)
        if state is None:
            options = dict(mask=mask, window=shape.window, kernels=shape.kernels, **dropout_options)
            out = softmax.causal_attend(q, k, v, shape.query_scale, **options)
        else:
            out, state = self.attend_cached(q, k, v, state, mask, **dropout_options)
        return self._finish(out), state

    def weights(self, x: Float[Array, "b n width"], positions: Array | None = None) -> Float[Array, "b h n n"]:
        """How much each query takes of each value, causally, for analysis: the output is Σ_j weight_ij v_j."""
        q, k = self.queries(x, positions), softmax.heads_first(self.keys(x, positions))
        allowed = softmax.causal_mask(x.shape[1], window=self.shape.window)
        return self._by_head(softmax.weights(q, k, allowed, self.shape.query_scale))

    def cross_weights(
        self, x: Float[Array, "b n width"], source: Float[Array, "b m width"], mask: Bool[Array, "b m"]
    ) -> Float[Array, "b h n m"]:
        """How much each query takes of each value of a source, for analysis."""
        q, k = self.queries(x, None), softmax.heads_first(self.keys(source, None))
        return self._by_head(softmax.weights(q, k, mask[:, None, :], self.shape.query_scale))

    def attend_cached(
        self, q: Array, k: Array, v: Array, state: KVCache | BeamCache, mask: Array | None, **dropout_options: Any
    ) -> tuple[Float[Array, "b n g r d"], KVCache | BeamCache]:
        """Appends the keys and values to the cache, then attends to all of it; both are returned."""
        if isinstance(state, BeamCache):
            state = softmax.append_beams(state, k, v)
            return softmax.attend_beams(q, state, self.shape.query_scale, self.shape.window), state
        state = softmax.append(state, k, v, mask)
        options = dict(window=self.shape.window, **dropout_options)
        return softmax.attend_cache(q, state, self.shape.query_scale, **options), state

    def attend_state(self, q: Array, state: KVCache, **dropout_options: Any) -> Float[Array, "b n g r d"]:
        """Attention without a causal mask, to all keys of a state built by `build_state`."""
        return softmax.attend(q, state.k, state.v, state.valid[:, None, :], self.shape.query_scale, **dropout_options)

    def build_state(self, source: Array, *, mask=None, positions=None, key: PRNGKeyArray | None = None) -> KVCache:
        return softmax.cache_of(self.keys(source, positions), self.value(source), mask)

    def query_state(self, x: Array, state: KVCache, *, positions=None, key: PRNGKeyArray | None = None) -> Array:
        out = self.attend_state(self.queries(x, positions), state, dropout=self.shape.dropout, key=key)
        return self._finish(out)


class _Linear(_Attention):
    """Linear attention from φ(q), φ(k) and v (§2.2). Subclasses compute φ(q) and φ(k)."""

    def query_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        raise NotImplementedError

    def key_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        raise NotImplementedError

    def init_state(self, batch: int, capacity: int) -> LinearState:
        """The empty state; its size does not depend on `capacity`."""
        token = jax.ShapeDtypeStruct((batch, 1, self.shape.width), jnp.float32)
        k = jax.eval_shape(lambda x: self.key_features(x, None, None), token)
        return linear.initial_state(k, jnp.zeros((batch, 1, self.shape.kv_heads, self.shape.head_dim)))

    def __call__(
        self,
        x: Float[Array, "b n width"],
        *,
        state: LinearState | None = None,
        mask: Bool[Array, "b n"] | None = None,
        positions: Int[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n width"], LinearState]:
        q, k = self.query_features(x, positions, key), self.key_features(x, positions, key)
        dropout_key = None if key is None else jax.random.fold_in(key, 1)  # random feature maps use `key` itself
        out, state = linear.causal_attention(
            q,
            k,
            self.value(x),
            self.normalizer,
            state=state,
            mask=mask,
            dropout=self.shape.dropout,
            key=dropout_key,
            kernels=self.shape.kernels,
        )
        return self._finish(out), state

    def weights(self, x: Float[Array, "b n width"], positions: Array | None = None) -> Float[Array, "b h n n"]:
        """How much each query takes of each value, causally, for analysis: the output is Σ_j weight_ij v_j."""
        q, k = self.query_features(x, positions, None), self.key_features(x, positions, None)
        return self._by_head(linear.weights(q, k, self.normalizer))

    def cross_weights(
        self, x: Float[Array, "b n width"], source: Float[Array, "b m width"], mask: Bool[Array, "b m"]
    ) -> Float[Array, "b h n m"]:
        """How much each query takes of each value of a source, for analysis."""
        q, k = self.query_features(x, None, None), self.key_features(source, None, None)
        return self._by_head(linear.weights(q, k, self.normalizer, mask=mask, causal=False))

    def build_state(self, source: Array, *, mask=None, positions=None, key: PRNGKeyArray | None = None) -> LinearState:
        k, v = self.key_features(source, positions, key), self.value(source)
        return linear.update(linear.initial_state(k, v), k, v, mask)

    def query_state(self, x: Array, state: LinearState, *, positions=None, key: PRNGKeyArray | None = None) -> Array:
        q = self.query_features(x, positions, key)
        return self._finish(linear.query_state(state, q, self.normalizer))


def is_linear(attention: nnx.Module | None) -> bool:
    """Whether a module is linear attention of any kind: its state has one size at any length."""
    return isinstance(attention, _Linear | WindowedAttention)


class LinearAttention(_Linear, _Projected):
    """T2R and other linear attention: the transformer's queries and keys, then φ, then linear attention."""

    kind = "linear"

    def __init__(self, shape: AttentionShape, feature_map: str, features: int | None, *, rngs: nnx.Rngs):
        super().__init__(shape, rngs=rngs)
        self.feature_map = make_feature_map(shape, feature_map, features, rngs=rngs)

    @property
    def normalizer(self):
        return self.feature_map.normalizer

    def query_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        if self._merging_is_cheaper(x):
            return Features(jax.nn.relu(self._grouped(_project(x, *self.merged("query")))))
        return self.feature_map(self.queries(x, positions), is_query=True, key=key)

    def key_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        if self._merging_is_cheaper(x):
            return Features(jax.nn.relu(_project(x, *self.merged("key"))))
        return self.feature_map(self.keys(x, positions), is_query=False, key=key)

    @property
    def mergeable(self) -> bool:
        """Whether φ's matrix follows the projections directly: no rotation and no norm in between."""
        return type(self.feature_map) is T2R and self.shape.rotary is None and self.shape.norm_eps is None

    def merged(self, name: str) -> tuple[Float[Array, "width h k"], Float[Array, "h k"]]:
        """W̃ and b̃ of the projection `name` ("query" or "key"), with which φ = relu(W̃ x + b̃).

        W̃_q = s·W_φ W_q, b̃_q = b_φ + s·W_φ b_q, W̃_k = W_φ W_k, b̃_k = b_φ + W_φ b_k (§2.2), where s = d^-½ is the
        scale of queries, which the paper's equations leave out.
        """
        linear_layer, scale = getattr(self, name), self.feature_map.query_scale if name == "query" else 1.0
        kernel = linear_layer.kernel[...]  # (width, h, d)
        heads_per_map = kernel.shape[1] // self.shape.kv_heads  # the query heads of a group share one φ
        weight, bias = (jnp.repeat(x[...], heads_per_map, 0) for x in (self.feature_map.weight, self.feature_map.bias))
        mapped_bias = 0.0
        if linear_layer.bias is not None:
            mapped_bias = scale * jnp.einsum("hd,hkd->hk", linear_layer.bias[...], weight)
        return scale * jnp.einsum("ehd,hkd->ehk", kernel, weight), mapped_bias + bias

    def _merging_is_cheaper(self, x: Float[Array, "b n width"]) -> bool:
        """Whether merging, then one product per token, takes fewer operations than two products per token."""
        width, head_dim, tokens = x.shape[-1], self.shape.head_dim, x.shape[0] * x.shape[1]
        if not self.mergeable or not isinstance(tokens, int):  # the batch size of exported programs is symbolic
            return False
        if not isinstance(self.query, nnx.LinearGeneral):
            return False  # stored for decoding, maybe in 8 bits, which round otherwise if merged: prompts as steps
        features = self.feature_map.weight.shape[1]
        # Operations per head.
        unmerged_per_token, merged_per_token = width * head_dim + head_dim * features, width * features
        merge_once = width * head_dim * features
        return tokens * (unmerged_per_token - merged_per_token) > merge_once


class Mixture(nnx.Module):
    """The log of the weight that a query gives to distant keys: b + u·q for each query head; 0 at first."""

    def __init__(self, heads: int, per_group: int, head_dim: int):
        self.weight = nnx.Param(jnp.zeros((heads, per_group, head_dim)))
        self.bias = nnx.Param(jnp.zeros((heads, per_group)))

    def __call__(self, q: Float[Array, "b n g r d"]) -> Float[Array, "b n g r"]:
        weight = self.weight[...].astype(q.dtype)
        return jnp.einsum("bngrd,grd->bngr", q, weight, preferred_element_type=jnp.float32) + self.bias[...]


class WindowedAttention(_Projected):
    """Softmax for the last `window` tokens and the first `sinks`, linear attention for all others; see `windowed.py`.

    Only causal: the positions of a source say nothing about what is near.
    """

    kind = "windowed"

    def __init__(
        self,
        shape: AttentionShape,
        feature_map: str,
        features: int | None,
        *,
        window: int,
        sinks: int,
        rngs: nnx.Rngs,
    ):
        super().__init__(shape, rngs=rngs)
        self.feature_map = make_feature_map(shape, feature_map, features, rngs=rngs)
        self.mixture = make_mixture(shape)
        self.window, self.sinks = window, sinks

    def _window(self, key: PRNGKeyArray | None = None) -> windowed.Window:
        return windowed.Window(self.window, self.sinks, lambda k: self.feature_map(k, is_query=False, key=key))

    def init_state(self, batch: int, capacity: int) -> WindowedState:
        """The empty state; its size does not depend on `capacity`."""
        token = jnp.zeros((batch, 1, self.shape.kv_heads, self.shape.head_dim), jnp.dtype(self.shape.dtype))
        return windowed.initial_state(token, token, self._window())

    def __call__(
        self,
        x: Float[Array, "b n width"],
        *,
        state: WindowedState | None = None,
        mask: Bool[Array, "b n"] | None = None,
        positions: Int[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n width"], WindowedState]:
        queries, k = self._windowed_queries(x, positions, key), self.keys(x, positions)
        dropout_options = dict(dropout=self.shape.dropout, key=None if key is None else jax.random.fold_in(key, 1))
        options = dict(state=state, mask=mask, **dropout_options)
        out, state = windowed.causal_attention(queries, k, self.value(x), self._window(key), **options)
        return self._finish(out), state

    def weights(self, x: Float[Array, "b n width"], positions: Array | None = None) -> Float[Array, "b h n n"]:
        """How much each query takes of each value, for analysis: the output is Σ_j weight_ij v_j."""
        queries, k = self._windowed_queries(x, positions, None), self.keys(x, positions)
        return self._by_head(windowed.weights(queries, k, self._window()))

    def _windowed_queries(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> windowed.Queries:
        q = self.queries(x, positions)
        features = self.feature_map(q, is_query=True, key=key)
        return windowed.Queries(q * self.shape.query_scale, features, self.mixture(q))


class MergedLinearAttention(_Linear):
    """T2R for inference: W_φ is merged into the projections, and queries and keys are never computed.

    φ(q) = relu(W̃_q x + b̃_q) and φ(k) = relu(W̃_k x + b̃_k); `LinearAttention.merged` computes W̃ and b̃.
    """

    kind = "merged"
    normalizer = T2R.normalizer

    def __init__(self, shape: AttentionShape, features: int, *, rngs: nnx.Rngs):
        super().__init__(shape, rngs=rngs)
        self.query = projection(shape, shape.heads, features, rngs, bias=True)
        self.key = projection(shape, shape.kv_heads, features, rngs, bias=True)

    def query_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        return Features(jax.nn.relu(self._grouped(self.query(x))))

    def key_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        return Features(jax.nn.relu(self.key(x)))


def _project(x: Float[Array, "b n width"], kernel: Array, bias: Array) -> Float[Array, "b n h k"]:
    return jnp.einsum("bne,ehk->bnhk", x, kernel.astype(x.dtype)) + bias.astype(x.dtype)


def make_mixture(shape: AttentionShape) -> Mixture:
    """The mixture of near and distant keys for attention of this shape."""
    return Mixture(shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)


def make_feature_map(shape: AttentionShape, name: str, features: int | None, *, rngs: nnx.Rngs) -> nnx.Module:
    """The feature map `name` for attention of this shape; `features` None: the map's default."""
    map_class = feature_map_class(name)
    if features is None:
        features = map_class.default_features or shape.head_dim
    if features < 1:
        raise InputError(f"features={features}: a feature map needs at least 1 feature")
    return map_class(shape.kv_heads, shape.head_dim, features, query_scale=shape.query_scale, rngs=rngs)
