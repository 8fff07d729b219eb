"""The modules: softmax, linear and merged linear attention behind one interface.

Causal self-attention is a call: `out, state = attention(x, state=state)`. Attention over a sequence that
is known whole, one's own (bidirectional) or another's (cross), is two steps: `state = build_state(source)`
once, then `out = query_state(x, state)` as often as needed. The state is a `KVCache` or a `LinearState`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention import linear, softmax
from t2r.attention.feature_map import T2R, Features, feature_map_class
from t2r.attention.linear import LinearState
from t2r.attention.rotary import Rotary, rotate
from t2r.attention.softmax import KVCache
from t2r.errors import InputError

State = KVCache | LinearState
_xavier = nnx.initializers.xavier_uniform()


@dataclass(frozen=True)
class AttentionShape:
    """The shape of multihead attention, the same before and after conversion."""

    width: int  # of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    projection_bias: bool | None = None  # of queries, keys and values; None: as bias
    rotary: Rotary | None = None
    norm_eps: float | None = None  # of an RMS norm of each query and key, before they are turned; None: there is none
    window: int = 0  # softmax attention sees so many tokens back, itself included; 0: all
    dropout: float = 0.0
    dtype: str = "float32"  # of activations; parameters are float32
    kernels: str = "auto"  # see kernels.blocks

    @property
    def query_scale(self) -> float:
        """d^-½."""
        return self.head_dim**-0.5


def projection(
    shape: AttentionShape, heads: int, size: int, rngs: nnx.Rngs, *, bias: bool | None = None
) -> nnx.LinearGeneral:
    """width → (heads, size)."""
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


class _Attention(nnx.Module):
    """What the three kinds share: values, output, and the path of a call."""

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
        return q.reshape(*q.shape[:2], self.shape.kv_heads, -1, q.shape[-1])

    def _finish(self, out: Float[Array, "b n g r d"]) -> Float[Array, "b n width"]:
        return self.out(out.reshape(*out.shape[:2], self.shape.heads, self.shape.head_dim))


class _Projected(_Attention):
    """Attention that builds queries and keys."""

    def __init__(self, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(shape, rngs=rngs)
        self.query = projection(shape, shape.heads, shape.head_dim, rngs)
        self.key = projection(shape, shape.kv_heads, shape.head_dim, rngs)
        if shape.norm_eps is not None:
            norm = dict(epsilon=shape.norm_eps, dtype=jnp.dtype(shape.dtype), rngs=rngs)
            self.query_norm, self.key_norm = nnx.RMSNorm(shape.head_dim, **norm), nnx.RMSNorm(shape.head_dim, **norm)

    def queries(self, x: Float[Array, "b n width"], positions: Int[Array, "b n"] | None) -> Float[Array, "b n g r d"]:
        q = self.query(x)
        q = q if self.shape.norm_eps is None else self.query_norm(q)
        return self._grouped(self._rotated(q, positions))

    def keys(self, x: Float[Array, "b m width"], positions: Int[Array, "b m"] | None) -> Float[Array, "b m g d"]:
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
    """The transformer's attention."""

    kind = "softmax"

    def init_state(self, batch: int, capacity: int) -> KVCache:
        shape = self.shape
        return KVCache.zeros(batch, capacity, shape.kv_heads, shape.head_dim, jnp.dtype(shape.dtype))

    def __call__(
        self,
        x: Float[Array, "b n width"],
        *,
        state: KVCache | None = None,
        mask: Bool[Array, "b n"] | None = None,
        positions: Int[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n width"], KVCache | None]:
        q, k, v = self.queries(x, positions), self.keys(x, positions), self.value(x)
        scale, window, chance = self.shape.query_scale, self.shape.window, dict(dropout=self.shape.dropout, key=key)
        if state is None:
            kernels = self.shape.kernels
            out = softmax.causal_attend(q, k, v, scale, mask=mask, window=window, kernels=kernels, **chance)
        else:
            out, state = self.attend_cached(q, k, v, state, mask, **chance)
        return self._finish(out), state

    def attend_cached(
        self, q: Array, k: Array, v: Array, state: KVCache, mask: Array | None, **dropout: Any
    ) -> tuple[Float[Array, "b n g r d"], KVCache]:
        """Writes the keys and values into the cache, then attends to all of it."""
        state = softmax.append(state, k, v, mask)
        allowed = softmax.cached_mask(state, q.shape[1], self.shape.window)
        return softmax.attend(q, state.k, state.v, allowed, self.shape.query_scale, **dropout), state

    def attend_state(self, q: Array, state: KVCache, **dropout: Any) -> Float[Array, "b n g r d"]:
        """Attends to a sequence that is known whole."""
        return softmax.attend(q, state.k, state.v, state.valid[:, None, :], self.shape.query_scale, **dropout)

    def build_state(self, source: Array, *, mask=None, positions=None, key: PRNGKeyArray | None = None) -> KVCache:
        return softmax.cache_of(self.keys(source, positions), self.value(source), mask)

    def query_state(self, x: Array, state: KVCache, *, positions=None, key: PRNGKeyArray | None = None) -> Array:
        out = self.attend_state(self.queries(x, positions), state, dropout=self.shape.dropout, key=key)
        return self._finish(out)


class _Linear(_Attention):
    """What linear attention does once φ(q) and φ(k) are there."""

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
        dropout_key = None if key is None else jax.random.fold_in(key, 1)  # φ draws from `key` itself
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

    def build_state(self, source: Array, *, mask=None, positions=None, key: PRNGKeyArray | None = None) -> LinearState:
        k, v = self.key_features(source, positions, key), self.value(source)
        return linear.update(linear.initial_state(k, v), k, v, mask)

    def query_state(self, x: Array, state: LinearState, *, positions=None, key: PRNGKeyArray | None = None) -> Array:
        q = self.query_features(x, positions, key)
        return self._finish(linear.query_state(state, q, self.normalizer))


def is_linear(attention: nnx.Module | None) -> bool:
    """Whether it is an RNN: linear attention of any kind."""
    return isinstance(attention, _Linear)


class LinearAttention(_Linear, _Projected):
    """Queries and keys as in the transformer, then φ, then linear attention."""

    kind = "linear"

    def __init__(self, shape: AttentionShape, feature_map: str, features: int | None, *, rngs: nnx.Rngs):
        super().__init__(shape, rngs=rngs)
        self.feature_map = make_feature_map(shape, feature_map, features, rngs=rngs)

    @property
    def normalizer(self):
        return self.feature_map.normalizer

    def query_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        if self._worth_merging(x):
            return Features(jax.nn.relu(self._grouped(_project(x, *self.merged("query")))))
        return self.feature_map(self.queries(x, positions), is_query=True, key=key)

    def key_features(self, x: Array, positions: Array | None, key: PRNGKeyArray | None) -> Features:
        if self._worth_merging(x):
            return Features(jax.nn.relu(_project(x, *self.merged("key"))))
        return self.feature_map(self.keys(x, positions), is_query=False, key=key)

    @property
    def mergeable(self) -> bool:
        """Whether nothing stands between the projections and φ's own product."""
        return isinstance(self.feature_map, T2R) and self.shape.rotary is None and self.shape.norm_eps is None

    def merged(self, name: str) -> tuple[Float[Array, "width h k"], Float[Array, "h k"]]:
        """W̃ and b̃ of the projection `name`, with which φ = relu(W̃ x + b̃).

        With s = d^-½: W̃q = s·Wφ Wq, b̃q = s·Wφ bq + bφ, W̃k = Wφ Wk, b̃k = Wφ bk + bφ.
        """
        before, scale = getattr(self, name), self.feature_map.query_scale if name == "query" else 1.0
        kernel = before.kernel[...]
        per_map = kernel.shape[1] // self.shape.kv_heads  # queries have several heads to each φ
        weight, bias = (jnp.repeat(x[...], per_map, 0) for x in (self.feature_map.weight, self.feature_map.bias))
        moved = 0.0 if before.bias is None else scale * jnp.einsum("hd,hkd->hk", before.bias[...], weight)
        return scale * jnp.einsum("ehd,hkd->ehk", kernel, weight), moved + bias

    def _worth_merging(self, x: Float[Array, "b n width"]) -> bool:
        """Whether one narrow product for all these tokens, and one to make it, are fewer operations than two each."""
        width, size, tokens = x.shape[-1], self.shape.head_dim, x.shape[0] * x.shape[1]
        if not self.mergeable or not isinstance(tokens, int):  # exported programs are for any number
            return False
        features = self.feature_map.weight.shape[1]
        apart, together = width * size + size * features, width * features
        return tokens * (apart - together) > width * size * features


class MergedLinearAttention(_Linear):
    """T2R for inference: φ folded into the projections, so that queries and keys are never built.

    φ(q) = relu(W̃q x + b̃q) and φ(k) = relu(W̃k x + b̃k); see `t2r.conversion.merge` for W̃ and b̃.
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


def make_feature_map(shape: AttentionShape, name: str, features: int | None, *, rngs: nnx.Rngs) -> nnx.Module:
    """A feature map by name, for attention of this shape; `features` None takes the map's own default."""
    kind = feature_map_class(name)
    if features is None:
        features = kind.default_features or shape.head_dim
    if features < 1:
        raise InputError(f"features={features}: a feature map needs at least 1 feature")
    return kind(shape.kv_heads, shape.head_dim, features, query_scale=shape.query_scale, rngs=rngs)
