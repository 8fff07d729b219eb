"""The kernels of a decoding step: five for each layer, three more where it attends to a source (Pallas: Triton, GPU).

A norm and the product after it are one kernel, a product and its addition to the residual stream another, and the
recurrent step between them a third. Matrices, and most activations, are packed as `tiles` describes. Each kernel
prefetches what the next one reads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from t2r.kernels.decoding import support, tiles
from t2r.kernels.decoding.prefetch import prefetch
from t2r.kernels.decoding.tiles import PackedMatrix, load_tile
from t2r.normalizer import Normalizer


class ResidualStream(NamedTuple):
    """The residual stream, with partial sums for the norm that reads it next.

    In models with norms after, the norm of x is pending: each kernel that reads x applies it, by the sums and by
    `norm_scale` and `norm_bias`. These are None in models with norms before, where x itself is the residual.
    """

    x: Float[Array, "groups size"]  # packed
    sums: Float[Array, "b parts"]  # Σ x over each part of the channels
    squares: Float[Array, "b parts"]  # Σ x²
    norm_scale: Float[Array, "width"] | None = None
    norm_bias: Float[Array, "width"] | None = None

    def with_pending_norm(self, norm: Any) -> "ResidualStream":
        bias = jnp.zeros_like(norm.scale[...]) if norm.bias is None else norm.bias[...]
        return self._replace(norm_scale=norm.scale[...], norm_bias=bias)


def initial_stream(x: Float[Array, "b e"], *, parts: int, identity_eps: float | None = None) -> ResidualStream:
    """The stream that the first layer reads.

    With `identity_eps`, its sums are those of mean 0 and variance 1 − ε, for which a norm with this ε is the identity.
    """
    padded = jnp.pad(x, [(0, -len(x) % support.SEQUENCES_PER_GROUP), (0, 0)])
    x_parts = padded.astype(jnp.float32).reshape(len(padded), parts, -1)
    if identity_eps is None:
        return ResidualStream(tiles.pack_activations(x), x_parts.sum(2), (x_parts**2).sum(2))
    zero = jnp.zeros(x_parts.shape[:2], jnp.float32)
    return ResidualStream(tiles.pack_activations(x), zero, zero + (1 - identity_eps) * x_parts.shape[2])


def normed_product(
    stream: ResidualStream,
    matrix: PackedMatrix,
    eps: float,
    *,
    relu_outputs: int,
    unpacked: bool = False,
    prefetched: Array | None = None,
    interpret: bool = False,
) -> Float[Array, "groups size"] | Float[Array, "b outputs"]:
    """matrix · norm(x) + bias, with a ReLU on the first `relu_outputs` outputs; packed, or `unpacked` (b, outputs)."""
    groups, outputs = len(stream.x), len(matrix.bias)
    width = stream.x.shape[1] // support.SEQUENCES_PER_GROUP

    def normed_product(x, sums, squares, weights, weight_sums, bias, *prefetched_and_out):
        *prefetched, out = prefetched_and_out
        refs, group = PackedMatrix(weights, weight_sums, bias), pl.program_id(1)
        tile = load_tile(refs, pl.program_id(0))
        _prefetch(prefetched, pl.program_id(0), matrix.tile_count)
        activations, moments = tiles.load_activations(x, group, refs), _load_moments(sums, squares, group)
        result = tiles.product(activations, tile)
        mean, scale = _mean_and_scale(moments, width, eps)
        result = (result - mean * tile.weight_sums) * scale + tile.bias
        result = jnp.where(tile.outputs < relu_outputs, jnp.maximum(result, 0.0), result).astype(out.dtype)
        if unpacked:
            out[_sequences(group), pl.ds(tile.first, len(tile.bias))] = result
        else:
            out[group, tiles.packed_indices(tile.outputs, outputs)] = result

    count = support.SEQUENCES_PER_GROUP
    shape = (groups * count, outputs) if unpacked else (groups, count * outputs)
    shape = jax.ShapeDtypeStruct(shape, stream.x.dtype)
    call = _call(normed_product, shape, (matrix.tile_count, groups), interpret)
    return call(*stream[:3], *matrix, *_prefetched_arguments(prefetched, interpret))


def _load_moments(sums, squares, group: Array) -> list[Float[Array, "sequences parts"]]:
    return [moment[_sequences(group), :] for moment in (sums, squares)]


def _mean_and_scale(moments: list[Array], width: int, eps: float) -> tuple[Array, Array]:
    """A norm's mean and 1 / deviation, from the sums and the sums of squares of parts."""
    mean, square = (parts.sum(1, keepdims=True) / width for parts in moments)
    # Rounding may make the variance of nearly equal numbers negative.
    return mean, jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + eps)


def _sequences(group: Array) -> Any:
    """Index of a group's sequences in arrays that are not packed."""
    return pl.ds(group * support.SEQUENCES_PER_GROUP, support.SEQUENCES_PER_GROUP)


def added_product(
    stream: ResidualStream,
    inputs: Float[Array, "groups size"],
    matrix: PackedMatrix,
    eps: float,
    *,
    prefetched: Array | None = None,
    interpret: bool = False,
) -> ResidualStream:
    """The residual + matrix · inputs + bias; `inputs` is packed."""
    x, width = stream.x, stream.x.shape[1] // support.SEQUENCES_PER_GROUP
    norm_is_pending = stream.norm_scale is not None

    def added_product(x, inputs, weights, weight_sums, bias, *others):
        *others, out, sums, squares = others
        norm, prefetched = (others[:4], others[4:]) if norm_is_pending else ((), others)
        refs, number, group = PackedMatrix(weights, weight_sums, bias), pl.program_id(0), pl.program_id(1)
        tile = load_tile(refs, number)
        _prefetch(prefetched, number, matrix.tile_count)
        indices = tiles.packed_indices(tile.outputs, width)
        activations, residual = tiles.load_activations(inputs, group, refs), x[group, indices].astype(jnp.float32)
        if norm_is_pending:
            norm_scale, norm_bias = (ref[pl.ds(tile.first, len(tile.bias))] for ref in norm[2:])
            mean, scale = _mean_and_scale(_load_moments(*norm[:2], group), width, eps)
            residual = (residual - mean) * scale * norm_scale + norm_bias
        result = (residual + tiles.product(activations, tile) + tile.bias).astype(out.dtype)
        out[group, indices] = result
        result = result.astype(jnp.float32)
        sums[_sequences(group), number], squares[_sequences(group), number] = result.sum(1), (result**2).sum(1)

    moment = jax.ShapeDtypeStruct((len(x) * support.SEQUENCES_PER_GROUP, matrix.tile_count), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), moment, moment]
    call = _call(added_product, shapes, (matrix.tile_count, len(x)), interpret)
    norm = stream[1:] if norm_is_pending else ()
    return ResidualStream(*call(x, inputs, *matrix, *norm, *_prefetched_arguments(prefetched, interpret)))


def greedy_token(
    x: Float[Array, "groups size"], matrix: PackedMatrix, *, interpret: bool = False
) -> Int[Array, "sequences"]:
    """argmax(matrix · x + bias) over outputs, the first of equals: within each tile, then over tiles. x is packed."""
    last, padded_tiles = len(matrix.bias) - 1, pl.next_power_of_2(matrix.tile_count)

    def largest_of_tile(x, weights, weight_sums, bias, largest, token):
        refs, number, group = PackedMatrix(weights, weight_sums, bias), pl.program_id(0), pl.program_id(1)
        tile = load_tile(refs, number)
        logits = tiles.product(tiles.load_activations(x, group, refs), tile) + tile.bias
        tile_max, tile_token = _max_and_argmax(logits, tile.outputs[None, :], last)
        largest[_sequences(group), number], token[_sequences(group), number] = tile_max, tile_token

    def largest_of_all(largest, token, out):
        sequence = pl.program_id(0)
        is_tile = jnp.arange(padded_tiles) < matrix.tile_count  # no program has written beyond
        logits = jnp.where(is_tile, largest[sequence], -jnp.inf)
        out[sequence] = _max_and_argmax(logits, jnp.where(is_tile, token[sequence], last), last)[1]

    batch = len(x) * support.SEQUENCES_PER_GROUP
    shapes = [jax.ShapeDtypeStruct((batch, padded_tiles), dtype) for dtype in (jnp.float32, jnp.int32)]
    by_tile = _call(largest_of_tile, shapes, (matrix.tile_count, len(x)), interpret)(x, *matrix)
    return _call(largest_of_all, jax.ShapeDtypeStruct((batch,), jnp.int32), (batch,), interpret, warps=4)(*by_tile)


def _max_and_argmax(logits: Float[Array, "*b n"], tokens: Int[Array, "*#b n"], last: int) -> tuple[Array, Array]:
    """The largest logit along the last axis, and the lowest of the token ids that have it; `last` is the highest id."""
    largest = logits.max(-1)
    return largest, jnp.where(logits == largest[..., None], tokens, last).min(-1)


def linear_step(
    projected: Float[Array, "sequences p"],
    past: Any,
    keep: Bool[Array, "b"],
    normalizer: Normalizer,
    *,
    prefetched: Array | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "groups size"], Any]:
    """Updates S and z of each sequence and head by a key and a value, and reads them by a query; the output is packed.

    S and z of sequences that are not to `keep`, because they have ended, do not change.
    """
    batch, heads, k, d = past.S.shape

    def linear_step(projected, keep, S, z, *prefetched_and_outs):
        *prefetched, out, new_S, new_z = prefetched_and_outs
        sequence, head = index = pl.program_id(0), pl.program_id(1)
        _prefetch(prefetched, sequence * heads + head, batch * heads)

        def vector(first: int, size: int) -> Array:
            return projected[sequence, pl.ds(first + head * size, size)].astype(jnp.float32)

        q, key, v = vector(0, k), vector(heads * k, k) * keep[sequence], vector(2 * heads * k, d)
        next_S, next_z = S[index] + key[:, None] * v[None, :], z[index] + key
        result = (q[:, None] * next_S).sum(0) / normalizer((q * next_z).sum())
        _write_head(out, sequence, head, result, heads)
        new_S[index], new_z[index] = next_S, next_z

    shapes = [_attended_shape(projected, heads, d)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (past.S, past.z)]
    call = _call(linear_step, shapes, (batch, heads), interpret, aliases={2: 1, 3: 2}, warps=4)
    arguments = projected, keep.astype(jnp.float32), past.S, past.z
    out, S, z = call(*arguments, *_prefetched_arguments(prefetched, interpret))
    return out, past._replace(S=S, z=z)


def linear_recall(
    queries: Float[Array, "sequences p"],
    source: Any,
    batch: int,
    normalizer: Normalizer,
    *,
    prefetched: Array | None = None,
    interpret: bool = False,
) -> Float[Array, "groups size"]:
    """Reads S and z of each sequence's source by a query; the output is packed. Consecutive sequences may share one."""
    sources, heads, k, d = source.S.shape

    def linear_recall(queries, S, z, *prefetched_and_out):
        *prefetched, out = prefetched_and_out
        sequence, head = pl.program_id(0), pl.program_id(1)
        _prefetch(prefetched, sequence * heads + head, batch * heads)
        q, index = queries[sequence, pl.ds(head * k, k)].astype(jnp.float32), (sequence // (batch // sources), head)
        result = (q[:, None] * S[index]).sum(0) / normalizer((q * z[index]).sum())
        _write_head(out, sequence, head, result, heads)

    call = _call(linear_recall, _attended_shape(queries, heads, d), (batch, heads), interpret, warps=4)
    return call(queries, source.S, source.z, *_prefetched_arguments(prefetched, interpret))


def _attended_shape(x: Float[Array, "sequences p"], heads: int, head_dim: int) -> jax.ShapeDtypeStruct:
    """The shape of packed outputs of all heads."""
    count = support.SEQUENCES_PER_GROUP
    return jax.ShapeDtypeStruct((len(x) // count, count * heads * head_dim), x.dtype)


def _write_head(out, sequence: Array, head: Array, result: Float[Array, "d"], heads: int) -> None:
    """In a program: writes one head's output of one sequence to a packed array."""
    count, d = support.SEQUENCES_PER_GROUP, len(result)
    indices = tiles.packed_index(sequence % count, head * d + jnp.arange(d), heads * d)
    out[sequence // count, indices] = result.astype(out.dtype)


def _prefetched_arguments(prefetched: Array | None, interpret: bool) -> list[Array]:
    """The array that a kernel is to prefetch, as an argument; none for an interpreted kernel, which has no cache."""
    return [] if prefetched is None or interpret else [prefetched]


def _prefetch(refs: Any, program: Array, programs: int) -> None:
    for ref in refs:
        prefetch(ref, program, programs)


def _call(kernel: Callable, shapes: Any, grid: tuple[int, ...], interpret: bool, *, aliases=None, warps: int = 0):
    return pl.pallas_call(
        kernel,
        name=kernel.__name__,  # shown in profiles
        grid=grid,
        out_shape=shapes,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps or support.WARPS, num_stages=1),
    )
