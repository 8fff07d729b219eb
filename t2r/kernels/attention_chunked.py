"""Chunked linear attention with a forward and a backward kernel (Pallas: Triton on GPU, Mosaic on TPU).

The same function as `linear.chunked`, but the products φ(q)·φ(k) within a chunk never reach memory. A sequence is cut
into segments, and a segment into chunks. One program computes one head of one segment: it loops over the chunks with S
and z in registers. Segments run in parallel, so each starts from S and z summed over the segments before it. In the
backward pass, the gradients of S and z are sums over the segments after it.

Arrays are (b, n, g, r, size), keys and values with r = 1; a program sees (segment, size) of each.
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
from t2r.kernels.blocks import causal_mask, dot, on_each_device
from t2r.normalizer import Normalizer

CHUNK, SEGMENT = 64, 512
# Pipeline stages of each kernel. More of them load further ahead, but need registers, which the backward pass lacks.
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
    """φ(q)·S / normalizer(φ(q)·z), S and z summed over each token's past."""
    length = v.shape[1]
    segment = min(segment, -(-length // chunk) * chunk)
    padded_length = -(-length // segment) * segment  # padded with features of zero, which add nothing to S and z
    launcher = _Launcher(segment, chunk, normalizer, platform, interpret)

    def run(q: Array, k: Array, v: Array, *, first: tuple) -> Array:
        q, k, v = (pad_length(x.astype(v.dtype), padded_length) for x in (q, k[:, :, :, None], v[:, :, :, None]))
        return _attention(q, k, v, launcher)[:, :length]

    return on_each_device(run, q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q: Array, k: Array, v: Array, launcher: "_Launcher") -> Array:
    return _forward(q, k, v, launcher)[0]


def _forward(q: Array, k: Array, v: Array, launcher: "_Launcher") -> tuple[Array, tuple]:
    past = launcher.segment_sums(_key_sums, (k, v), v.shape[-1])
    shapes = _like(q, v.shape[-1], v.dtype), _like(q, 1, jnp.float32)
    out, denominator = launcher.call(_outputs, (q, k, v, *past), shapes)
    return out, (q, k, v, out, denominator, past)


def _backward(launcher: "_Launcher", residuals: tuple, d_out: Array) -> tuple[Array, Array, Array]:
    q, k, v, out, denominator, past = residuals
    upstream = out, denominator, d_out.astype(out.dtype)
    future = launcher.segment_sums(_query_sums, (q, *upstream), v.shape[-1], reverse=True)
    shapes = tuple(_like(q, x.shape[-1], x.dtype) for x in (q, k, v))
    dq, dk, dv = launcher.call(_gradients, (q, k, v, *upstream, *past, *future), shapes)
    return dq, dk.sum(3, keepdims=True), dv.sum(3, keepdims=True)  # query heads of a group share keys and values


_attention.defvjp(_forward, _backward)


def _like(q: Array, size: int, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*q.shape[:-1], size), dtype)


# The kernels. `scan_chunks(body, state)` runs body(chunk, state) → state for each chunk of a segment, `chunk` being its
# index into an array. The state is S (k, d) and z (1, k), or their gradients, in float32. `numerator` is φ(q)·S (chunk,
# d) and `denominator` φ(q)·z (chunk, 1), before the normalizer.


def _outputs(scan_chunks: Callable, normalizer: Normalizer, q, k, v, S, z, out, denominator) -> None:
    def body(chunk, state):
        S, z = state
        queries, keys, values = q[chunk], k[chunk], v[chunk]
        weights = _mask_future(dot(queries, keys, 1, 1))
        weight_sum = weights.sum(1, keepdims=True) + (queries * z).sum(1, keepdims=True)
        numerator = dot(weights.astype(values.dtype), values) + dot(queries, S.astype(queries.dtype))
        out[chunk] = (numerator / normalizer(weight_sum)).astype(out.dtype)
        denominator[chunk] = weight_sum
        return _add_chunk(state, keys, values)

    scan_chunks(body, (S[...], z[...]))


def _gradients(
    scan_chunks: Callable, normalizer: Normalizer, q, k, v, out, denominator, d_out, S, z, dS, dz, dq, dk, dv
) -> None:
    """dq in a scan from the first chunk on, which needs S and z; dk and dv in a scan from the last, with dS and dz."""

    def upstream(chunk):
        return _fraction_gradients(normalizer, out[chunk], denominator[chunk], d_out[chunk])

    def weight_gradient(d_numerator, d_denominator, values):
        return _mask_future(dot(d_numerator, values, 1, 1) + d_denominator).astype(values.dtype)

    def query_gradient(chunk, state):
        S, z = state
        keys, values = k[chunk], v[chunk]
        d_numerator, d_denominator = upstream(chunk)
        d_weights = weight_gradient(d_numerator, d_denominator, values)
        d_queries = dot(d_weights, keys) + dot(d_numerator, S.astype(keys.dtype), 1, 1) + d_denominator * z
        dq[chunk] = d_queries.astype(dq.dtype)
        return _add_chunk(state, keys, values)

    def key_and_value_gradient(chunk, state):
        dS, dz = state
        queries, keys, values = q[chunk], k[chunk], v[chunk]
        d_numerator, d_denominator = upstream(chunk)
        d_weights = weight_gradient(d_numerator, d_denominator, values)
        weights = _mask_future(dot(queries, keys, 1, 1)).astype(values.dtype)
        d_keys = dot(d_weights, queries, 0, 0) + dot(values, dS.astype(values.dtype), 1, 1) + dz
        d_values = dot(weights, d_numerator, 0, 0) + dot(keys, dS.astype(keys.dtype))
        dk[chunk], dv[chunk] = d_keys.astype(dk.dtype), d_values.astype(dv.dtype)
        return _add_chunk(state, queries, d_numerator, d_denominator)

    scan_chunks(query_gradient, (S[...], z[...]))
    scan_chunks(key_and_value_gradient, (dS[...], dz[...]), reverse=True)


def _key_sums(scan_chunks: Callable, normalizer: Normalizer, k, v, S, z) -> None:
    """S and z summed over one segment."""
    zero = jnp.zeros(S.shape, jnp.float32), jnp.zeros(z.shape, jnp.float32)
    S[...], z[...] = scan_chunks(lambda chunk, state: _add_chunk(state, k[chunk], v[chunk]), zero)


def _query_sums(scan_chunks: Callable, normalizer: Normalizer, q, out, denominator, d_out, dS, dz) -> None:
    """The gradients of S and z, summed over one segment."""

    def body(chunk, state):
        queries = q[chunk]
        return _add_chunk(
            state, queries, *_fraction_gradients(normalizer, out[chunk], denominator[chunk], d_out[chunk])
        )

    zero = jnp.zeros(dS.shape, jnp.float32), jnp.zeros(dz.shape, jnp.float32)
    dS[...], dz[...] = scan_chunks(body, zero)


def _fraction_gradients(normalizer: Normalizer, out: Array, denominator: Array, d_out: Array) -> tuple[Array, Array]:
    """The gradients of the numerator (chunk, d) and the denominator (chunk, 1), from that of their quotient."""
    divisor = normalizer(denominator)
    d_numerator = (d_out.astype(jnp.float32) / divisor).astype(out.dtype)
    # From the rounded gradient: where the two are added, d_numerator · (v − out), what rounding changed cancels.
    d_denominator = -(d_numerator.astype(jnp.float32) * out.astype(jnp.float32)).sum(1, keepdims=True)
    if normalizer.clamp:
        d_denominator = jnp.where(denominator > normalizer.value, d_denominator, 0.0)
    return d_numerator, d_denominator


def _add_chunk(state: tuple[Array, Array], features: Array, values: Array, weights: Array | float = 1.0):
    """S + Σ features ⊗ values and z + Σ weights · features, over the tokens of a chunk."""
    S, z = state
    return S + dot(features, values, 0, 0), z + (features.astype(jnp.float32) * weights).sum(0, keepdims=True)


def _mask_future(weights: Array) -> Array:
    return jnp.where(causal_mask(weights.shape), weights, 0.0)


def _exclusive(sums: Array, reverse: bool) -> Array:
    """Makes cumulative sums along axis 1 exclusive: each moves one to the right (reverse: left), and zero comes in."""
    padded = jnp.pad(sums, [(0, 0), (0, 1) if reverse else (1, 0)] + [(0, 0)] * (sums.ndim - 2))
    return padded[:, 1:] if reverse else padded[:, :-1]


class _Launcher(NamedTuple):
    """Launches kernels over a batch: one program for each sequence, segment and head."""

    segment: int
    chunk: int
    normalizer: Normalizer
    platform: str
    interpret: bool

    def call(self, kernel: Callable, inputs: tuple[Array, ...], outputs: tuple[jax.ShapeDtypeStruct, ...]) -> list:
        """Runs a kernel on sequences (b, n, g, r, size) and states (b, segments, g, r, *S or z*)."""
        heads = max((x.shape for x in (*inputs, *outputs)), key=lambda shape: shape[3])[2:4]
        batch, segments = inputs[0].shape[0], inputs[0].shape[1] // self.segment
        results = pl.pallas_call(
            functools.partial(kernel, self._scan_chunks, self.normalizer),
            grid=(batch, segments, *heads),
            in_specs=[self._spec(x.shape) for x in inputs],
            out_specs=[self._spec(x.shape) for x in outputs],
            out_shape=[jax.eval_shape(self._to_tpu_layout, x) for x in outputs],
            interpret=self.interpret,
            compiler_params=self._compiler_params(kernel),
        )(*map(self._to_tpu_layout, inputs))
        return [self._from_tpu_layout(x) for x in results]

    def segment_sums(
        self, kernel: Callable, inputs: tuple[Array, ...], size: int, *, reverse: bool = False
    ) -> list[Array]:
        """Σ features ⊗ values and Σ features over the segments before each one; `reverse`: after each one."""
        features = inputs[0]
        batch, length, groups, per_group, count = features.shape
        shape = batch, length // self.segment, groups, per_group
        states = tuple(jax.ShapeDtypeStruct((*shape, *rest), jnp.float32) for rest in ((count, size), (1, count)))
        if shape[1] == 1:
            return [jnp.zeros(x.shape, x.dtype) for x in states]
        sums = self.call(kernel, inputs, states)
        return [_exclusive(jax.lax.cumsum(x, 1, reverse=reverse), reverse) for x in sums]

    def _scan_chunks(self, body: Callable, state: tuple, *, reverse: bool = False) -> tuple:
        """Runs body(chunk, state) → state for each chunk of a segment, in order or in reverse."""
        count = self.segment // self.chunk

        def step(number, state):
            number = count - 1 - number if reverse else number
            return body((pl.ds(number * self.chunk, self.chunk), slice(None)), state)

        return jax.lax.fori_loop(0, count, step, state)

    def _compiler_params(self, kernel: Callable) -> triton.CompilerParams | None:
        return (
            triton.CompilerParams(num_warps=4, num_stages=STAGES[kernel.__name__]) if self.platform == "gpu" else None
        )

    def _spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """The block of an array that a program sees; keys and values have one head for all queries of a group."""
        head = (lambda r: 0) if shape[3] == 1 else (lambda r: r)
        if len(shape) == 6:  # a state
            return pl.BlockSpec((None,) * 4 + shape[4:], lambda b, s, g, r: (b, s, g, head(r), 0, 0))
        if self.platform == "tpu":
            return pl.BlockSpec((None,) * 3 + (self.segment, shape[4]), lambda b, s, g, r: (b, g, head(r), s, 0))
        block = None, self.segment, None, None, shape[4]
        return pl.BlockSpec(block, lambda b, s, g, r: (b, s, g, head(r), 0))

    def _to_tpu_layout(self, x: Array) -> Array:
        """On TPU, (b, n, g, r, size) → (b, g, r, n, size): its tiles span the last two dimensions of an array."""
        return jnp.moveaxis(x, 1, 3) if self.platform == "tpu" and x.ndim == 5 else x

    def _from_tpu_layout(self, x: Array) -> Array:
        return jnp.moveaxis(x, 3, 1) if self.platform == "tpu" and x.ndim == 5 else x
