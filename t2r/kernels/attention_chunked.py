"""Chunked linear attention as one kernel forwards and one backwards (Pallas: Triton on GPU, Mosaic on TPU).

The same function as `linear.chunked`, without φ(q)·φ(k) of a chunk ever reaching memory. A program takes one head's
segment of the sequence and walks through its chunks with S and z at hand; segments go side by side, each from the
sums over those before it. Backwards, the gradient of S and z is such a sum over what comes after.

Arrays are (b, n, g, r, size) here, keys and values with r = 1; a program sees (segment, size) of each.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from t2r.batch import pad_length
from t2r.kernels.blocks import dot, on_each_device, past
from t2r.normalizer import Normalizer

CHUNK, SEGMENT = 64, 512
# Of loads ahead of their use, more help the forward pass; backwards, registers are scarcer.
STAGES = {"_outputs": 3, "_key_sums": 3, "_query_sums": 1, "_gradients": 1}


def attention(
    q: Float[Array, "b n g r k"],
    k: Float[Array, "b n g k"],
    v: Float[Array, "b n g d"],
    normalizer: Normalizer,
    *,
    platform: str = "gpu",
    interpret: bool = False,
    chunk: int = CHUNK,
    segment: int = SEGMENT,
) -> Float[Array, "b n g r d"]:
    """φ(q)·S / normalizer(φ(q)·z) over each token's past."""
    length = v.shape[1]
    segment = min(segment, -(-length // chunk) * chunk)
    whole = -(-length // segment) * segment  # filled with features of zero, which add nothing
    kernels = _Kernels(segment, chunk, normalizer, platform, interpret)

    def run(q: Array, k: Array, v: Array, *, first: tuple) -> Array:
        q, k, v = (pad_length(x.astype(v.dtype), whole) for x in (q, k[:, :, :, None], v[:, :, :, None]))
        return _attention(q, k, v, kernels)[:, :length]

    return on_each_device(run, q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q: Array, k: Array, v: Array, kernels: "_Kernels") -> Array:
    return _forward(q, k, v, kernels)[0]


def _forward(q: Array, k: Array, v: Array, kernels: "_Kernels") -> tuple[Array, tuple]:
    before = kernels.sums(_key_sums, (k, v), v.shape[-1])
    out, total = kernels.call(_outputs, (q, k, v, *before), (_like(q, v.shape[-1], v.dtype), _like(q, 1, jnp.float32)))
    return out, (q, k, v, out, total, before)


def _backward(kernels: "_Kernels", kept: tuple, d_out: Array) -> tuple[Array, Array, Array]:
    q, k, v, out, total, before = kept
    upstream = out, total, d_out.astype(out.dtype)
    after = kernels.sums(_query_sums, (q, *upstream), v.shape[-1], reverse=True)
    gradients = tuple(_like(q, x.shape[-1], x.dtype) for x in (q, k, v))
    dq, dk, dv = kernels.call(_gradients, (q, k, v, *upstream, *before, *after), gradients)
    return dq, dk.sum(3, keepdims=True), dv.sum(3, keepdims=True)  # query heads of a group share keys and values


_attention.defvjp(_forward, _backward)


def _like(q: Array, size: int, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*q.shape[:-1], size), dtype)


# The kernels. `rows` walks through a segment; S (k, d) and z (1, k) are float32 in registers.


def _outputs(rows: Callable, normalizer: Normalizer, q, k, v, S, z, out, total) -> None:
    def chunk(here, state):
        S, z = state
        a, b, c = q[here], k[here], v[here]
        weights = _causal(dot(a, b, 1, 1))
        below = weights.sum(1, keepdims=True) + (a * z).sum(1, keepdims=True)
        above = dot(weights.astype(c.dtype), c) + dot(a, S.astype(a.dtype))
        out[here] = (above / normalizer(below)).astype(out.dtype)
        total[here] = below
        return _add(state, b, c)

    rows(chunk, (S[...], z[...]))


def _gradients(rows: Callable, normalizer: Normalizer, q, k, v, out, total, d_out, S, z, dS, dz, dq, dk, dv) -> None:
    """Of queries on the way forth, which needs S and z; of keys and values on the way back, which needs dS and dz."""

    def weight_gradient(above, below, c):
        return _causal(dot(above, c, 1, 1) + below).astype(c.dtype)

    def forth(here, state):
        S, z = state
        b, c = k[here], v[here]
        above, below = _upstream(normalizer, out[here], total[here], d_out[here])
        d_weights = weight_gradient(above, below, c)
        found = dot(d_weights, b) + dot(above, S.astype(b.dtype), 1, 1) + below * z
        dq[here] = found.astype(dq.dtype)
        return _add(state, b, c)

    def back(here, state):
        dS, dz = state
        a, b, c = q[here], k[here], v[here]
        above, below = _upstream(normalizer, out[here], total[here], d_out[here])
        d_weights = weight_gradient(above, below, c)
        weights = _causal(dot(a, b, 1, 1)).astype(c.dtype)
        of_k = dot(d_weights, a, 0, 0) + dot(c, dS.astype(c.dtype), 1, 1) + dz
        of_v = dot(weights, above, 0, 0) + dot(b, dS.astype(b.dtype))
        dk[here], dv[here] = of_k.astype(dk.dtype), of_v.astype(dv.dtype)
        return _add(state, a, above, below)

    rows(forth, (S[...], z[...]))
    rows(back, (dS[...], dz[...]), reverse=True)


def _key_sums(rows: Callable, normalizer: Normalizer, k, v, S, z) -> None:
    zero = jnp.zeros(S.shape, jnp.float32), jnp.zeros(z.shape, jnp.float32)
    S[...], z[...] = rows(lambda here, state: _add(state, k[here], v[here]), zero)


def _query_sums(rows: Callable, normalizer: Normalizer, q, out, total, d_out, dS, dz) -> None:
    def chunk(here, state):
        return _add(state, q[here], *_upstream(normalizer, out[here], total[here], d_out[here]))

    zero = jnp.zeros(dS.shape, jnp.float32), jnp.zeros(dz.shape, jnp.float32)
    dS[...], dz[...] = rows(chunk, zero)


def _upstream(normalizer: Normalizer, out: Array, total: Array, d_out: Array) -> tuple[Array, Array]:
    """Gradients of what stands above the fraction (chunk, d) and below it (chunk, 1)."""
    divisor = normalizer(total)
    d_out = d_out.astype(jnp.float32)
    below = -(d_out * out.astype(jnp.float32)).sum(1, keepdims=True) / divisor
    if normalizer.clamp:
        below = jnp.where(total > normalizer.value, below, 0.0)
    return (d_out / divisor).astype(out.dtype), below


def _add(state: tuple[Array, Array], features: Array, values: Array, weights: Array | float = 1.0):
    """The state with these features and values in it; in z, features count with `weights`."""
    S, z = state
    return S + dot(features, values, 0, 0), z + (features.astype(jnp.float32) * weights).sum(0, keepdims=True)


def _causal(x: Array) -> Array:
    return jnp.where(past(x.shape), x, 0.0)


def _shifted(x: Array, reverse: bool) -> Array:
    """Each entry along axis 1 from its neighbour, the first (or last) from nothing."""
    padded = jnp.pad(x, [(0, 0), (0, 1) if reverse else (1, 0)] + [(0, 0)] * (x.ndim - 2))
    return padded[:, 1:] if reverse else padded[:, :-1]


class _Kernels(NamedTuple):
    """How kernels are laid over a batch: one program for each sequence, segment and head."""

    segment: int
    chunk: int
    normalizer: Normalizer
    platform: str
    interpret: bool

    def call(self, kernel: Callable, inputs: tuple[Array, ...], outputs: tuple[jax.ShapeDtypeStruct, ...]) -> list:
        """Runs a kernel on sequences (b, n, g, r, size) and states (b, segments, g, r, rows, columns)."""
        heads = max((x.shape for x in (*inputs, *outputs)), key=lambda shape: shape[3])[2:4]
        batch, segments = inputs[0].shape[0], inputs[0].shape[1] // self.segment
        found = pl.pallas_call(
            functools.partial(kernel, self._rows, self.normalizer),
            grid=(batch, segments, *heads),
            in_specs=[self._spec(x.shape) for x in inputs],
            out_specs=[self._spec(x.shape) for x in outputs],
            out_shape=[jax.eval_shape(self._to_tiles, x) for x in outputs],
            interpret=self.interpret,
            compiler_params=self._compiler(kernel),
        )(*map(self._to_tiles, inputs))
        return [self._from_tiles(x) for x in found]

    def sums(self, kernel: Callable, inputs: tuple[Array, ...], size: int, *, reverse: bool = False) -> list[Array]:
        """Σ features ⊗ values and Σ features over the segments before each one; `reverse`: after each one."""
        features = inputs[0]
        batch, length, groups, per_group, count = features.shape
        shape = batch, length // self.segment, groups, per_group
        states = tuple(jax.ShapeDtypeStruct((*shape, *rest), jnp.float32) for rest in ((count, size), (1, count)))
        if shape[1] == 1:
            return [jnp.zeros(x.shape, x.dtype) for x in states]
        found = self.call(kernel, inputs, states)
        return [_shifted(jax.lax.cumsum(x, 1, reverse=reverse), reverse) for x in found]

    def _rows(self, chunk: Callable, state: tuple, *, reverse: bool = False) -> tuple:
        """Walks through the chunks of a segment."""
        count = self.segment // self.chunk

        def step(number, state):
            number = count - 1 - number if reverse else number
            return chunk((pl.ds(number * self.chunk, self.chunk), slice(None)), state)

        return jax.lax.fori_loop(0, count, step, state)

    def _compiler(self, kernel: Callable) -> triton.CompilerParams | None:
        return (
            triton.CompilerParams(num_warps=4, num_stages=STAGES[kernel.__name__]) if self.platform == "gpu" else None
        )

    def _spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """What a program sees of an array; keys and values have one head for all queries of a group."""
        head = (lambda r: 0) if shape[3] == 1 else (lambda r: r)
        if len(shape) == 6:  # a state
            return pl.BlockSpec((None,) * 4 + shape[4:], lambda b, s, g, r: (b, s, g, head(r), 0, 0))
        if self.platform == "tpu":
            return pl.BlockSpec((None,) * 3 + (self.segment, shape[4]), lambda b, s, g, r: (b, g, head(r), s, 0))
        block = None, self.segment, None, None, shape[4]
        return pl.BlockSpec(block, lambda b, s, g, r: (b, s, g, head(r), 0))

    def _to_tiles(self, x: Array) -> Array:
        """A TPU's tiles are the last two dimensions of an array: (b, n, g, r, size) → (b, g, r, n, size)."""
        return jnp.moveaxis(x, 1, 3) if self.platform == "tpu" and x.ndim == 5 else x

    def _from_tiles(self, x: Array) -> Array:
        return jnp.moveaxis(x, 3, 1) if self.platform == "tpu" and x.ndim == 5 else x
