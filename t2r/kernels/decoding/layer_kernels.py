"""The kernels of a decoding step: five for each layer, three more where it attends to a source (Pallas: Triton, GPU).

A norm and the products after it are one kernel, a product and the residual stream after it another, and the recurrent
step between them the third. Activations and matrices are laid out as `tiles` has them, and each kernel prefetches the
matrix of the next.
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
from t2r.kernels.decoding.tiles import PackedMatrix, read_tile
from t2r.normalizer import Normalizer


class ResidualStream(NamedTuple):
    """The residual stream, and for the norm that reads it next the sums of parts of it, and of their squares."""

    x: Float[Array, "groups n"]  # as `tiles.factors`
    sums: Float[Array, "b parts"]
    squares: Float[Array, "b parts"]
    scale: Float[Array, "width"] | None = None  # of the norm that x waits for, in float32; None: x is the residual
    bias: Float[Array, "width"] | None = None

    def waiting_for(self, norm: Any) -> "ResidualStream":
        bias = jnp.zeros_like(norm.scale[...]) if norm.bias is None else norm.bias[...]
        return self._replace(scale=norm.scale[...], bias=bias)


def stream_of(x: Float[Array, "b e"], *, parts: int, ready: float | None = None) -> ResidualStream:
    """What the first layer reads; `ready`: as it is, through a norm with this ε that finds nothing to do."""
    filled = jnp.pad(x, [(0, -len(x) % support.TEXTS), (0, 0)])
    numbers = filled.astype(jnp.float32).reshape(len(filled), parts, -1)
    if ready is None:
        return ResidualStream(tiles.factors(x), numbers.sum(2), (numbers**2).sum(2))
    nothing = jnp.zeros(numbers.shape[:2], jnp.float32)
    return ResidualStream(tiles.factors(x), nothing, nothing + (1 - ready) * numbers.shape[2])


def normed_product(
    stream: ResidualStream,
    rows: PackedMatrix,
    eps: float,
    *,
    relu_before: int,
    in_rows: bool = False,
    then: Array | None = None,
    interpret: bool = False,
) -> Float[Array, "groups n"]:
    """rows · norm(x) + bias, of which the first outputs go through a relu; as factors, or a text in each row."""
    groups, outputs, width = len(stream.x), len(rows.bias), stream.x.shape[1] // support.TEXTS

    def normed_product(x, sums, squares, numbers, of_rows, bias, *then_and_out):
        *then, out = then_and_out
        here, group = PackedMatrix(numbers, of_rows, bias), pl.program_id(1)
        tile = read_tile(here, pl.program_id(0))
        _prefetch(then, pl.program_id(0), rows.count)
        factors, moments = tiles.read_factors(x, group, here), _read_moments(sums, squares, group)
        found = tiles.product(factors, tile)
        mean, scale = _mean_and_scale(moments, width, eps)
        found = (found - mean * tile.sums) * scale + tile.bias
        found = jnp.where(tile.rows < relu_before, jnp.maximum(found, 0.0), found).astype(out.dtype)
        if in_rows:
            out[_texts(group), pl.ds(tile.first, len(tile.bias))] = found
        else:
            out[group, tiles.indices(tile.rows, outputs)] = found

    shape = (groups * support.TEXTS, outputs) if in_rows else (groups, support.TEXTS * outputs)
    shape = jax.ShapeDtypeStruct(shape, stream.x.dtype)
    return _call(normed_product, shape, (rows.count, groups), interpret)(*stream[:3], *rows, *_given(then, interpret))


def _read_moments(sums, squares, group: Array) -> list[Float[Array, "texts parts"]]:
    return [part[_texts(group), :] for part in (sums, squares)]


def _mean_and_scale(moments: list[Array], width: int, eps: float) -> tuple[Array, Array]:
    """What a norm takes away, and what it multiplies by."""
    mean, square = (parts.sum(1, keepdims=True) / width for parts in moments)
    return mean, jax.lax.rsqrt(square - mean**2 + eps)


def _texts(group: Array) -> Any:
    return pl.ds(group * support.TEXTS, support.TEXTS)


def added_product(
    stream: ResidualStream,
    inputs: Float[Array, "groups m"],
    rows: PackedMatrix,
    eps: float,
    *,
    then: Array | None = None,
    interpret: bool = False,
) -> ResidualStream:
    """The residual + rows · inputs + bias; inputs are factors."""
    x, width = stream.x, stream.x.shape[1] // support.TEXTS
    waits = stream.scale is not None

    def added_product(x, inputs, numbers, of_rows, bias, *others):
        *others, out, sums, squares = others
        norm, then = (others[:4], others[4:]) if waits else ((), others)
        here, number, group = PackedMatrix(numbers, of_rows, bias), pl.program_id(0), pl.program_id(1)
        tile = read_tile(here, number)
        _prefetch(then, number, rows.count)
        places = tiles.indices(tile.rows, width)
        factors, before = tiles.read_factors(inputs, group, here), x[group, places].astype(jnp.float32)
        if waits:
            scale, shift = (ref[pl.ds(tile.first, len(tile.bias))] for ref in norm[2:])
            mean, deviation = _mean_and_scale(_read_moments(*norm[:2], group), width, eps)
            before = (before - mean) * deviation * scale + shift
        found = (before + tiles.product(factors, tile) + tile.bias).astype(out.dtype)
        out[group, places] = found
        found = found.astype(jnp.float32)
        sums[_texts(group), number], squares[_texts(group), number] = found.sum(1), (found**2).sum(1)

    part = jax.ShapeDtypeStruct((len(x) * support.TEXTS, rows.count), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), part, part]
    call = _call(added_product, shapes, (rows.count, len(x)), interpret)
    return ResidualStream(*call(x, inputs, *rows, *(stream[1:] if waits else ()), *_given(then, interpret)))


def greedy_token(x: Float[Array, "groups n"], rows: PackedMatrix, *, interpret: bool = False) -> Int[Array, "texts"]:
    """The first row of which rows · x + bias is largest: that of each tile, and then of all."""
    last, count = len(rows.bias) - 1, pl.next_power_of_2(rows.count)

    def likeliest_of_tiles(x, numbers, of_rows, bias, most, which):
        here, number, group = PackedMatrix(numbers, of_rows, bias), pl.program_id(0), pl.program_id(1)
        tile = read_tile(here, number)
        found = tiles.product(tiles.read_factors(x, group, here), tile) + tile.bias
        most[_texts(group), number], which[_texts(group), number] = _largest(found, tile.rows[None, :], last)

    def likeliest_of_all(most, which, out):
        text = pl.program_id(0)
        there = jnp.arange(count) < rows.count  # beyond is what nobody has written
        found = jnp.where(there, most[text], -jnp.inf)
        out[text] = _largest(found, jnp.where(there, which[text], last), last)[1]

    texts = len(x) * support.TEXTS
    shapes = [jax.ShapeDtypeStruct((texts, count), dtype) for dtype in (jnp.float32, jnp.int32)]
    tops = _call(likeliest_of_tiles, shapes, (rows.count, len(x)), interpret)(x, *rows)
    return _call(likeliest_of_all, jax.ShapeDtypeStruct((texts,), jnp.int32), (texts,), interpret, warps=4)(*tops)


def _largest(found: Float[Array, "*b n"], names: Int[Array, "*b n"], none: int) -> tuple[Array, Array]:
    """The largest of each row, and the first name of those that are."""
    largest = found.max(-1)
    return largest, jnp.where(found == largest[..., None], names, none).min(-1)


def linear_step(
    projected: Float[Array, "texts p"],
    past: Any,
    keep: Bool[Array, "b"],
    normalizer: Normalizer,
    *,
    then: Array | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "groups n"], Any]:
    """S and z of each text's head take in a key and a value, and are read by a query; not of texts that have ended."""
    texts, heads, k, d = past.S.shape

    def linear_step(projected, keep, S, z, *then_and_outs):
        *then, out, new_S, new_z = then_and_outs
        text, head = place = pl.program_id(0), pl.program_id(1)
        _prefetch(then, text * heads + head, texts * heads)

        def vector(first: int, size: int) -> Array:
            return projected[text, pl.ds(first + head * size, size)].astype(jnp.float32)

        q, key, v = vector(0, k), vector(heads * k, k) * keep[text], vector(2 * heads * k, d)
        state, total = S[place] + key[:, None] * v[None, :], z[place] + key
        found = (q[:, None] * state).sum(0) / normalizer((q * total).sum())
        places = tiles.index(text % support.TEXTS, head * d + jnp.arange(d), heads * d)
        out[text // support.TEXTS, places] = found.astype(out.dtype)
        new_S[place], new_z[place] = state, total

    shapes = [jax.ShapeDtypeStruct((len(projected) // support.TEXTS, support.TEXTS * heads * d), projected.dtype)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (past.S, past.z)]
    call = _call(linear_step, shapes, (texts, heads), interpret, aliases={2: 1, 3: 2}, warps=4)
    out, S, z = call(projected, keep.astype(jnp.float32), past.S, past.z, *_given(then, interpret))
    return out, past._replace(S=S, z=z)


def linear_recall(
    queries: Float[Array, "texts p"],
    source: Any,
    texts: int,
    normalizer: Normalizer,
    *,
    then: Array | None = None,
    interpret: bool = False,
) -> Float[Array, "groups n"]:
    """What each text's query reads in S and z of its source; several texts, side by side, may share one."""
    sources, heads, k, d = source.S.shape

    def linear_recall(queries, S, z, *then_and_out):
        *then, out = then_and_out
        text, head = pl.program_id(0), pl.program_id(1)
        _prefetch(then, text * heads + head, texts * heads)
        q, place = queries[text, pl.ds(head * k, k)].astype(jnp.float32), (text // (texts // sources), head)
        found = (q[:, None] * S[place]).sum(0) / normalizer((q * z[place]).sum())
        places = tiles.index(text % support.TEXTS, head * d + jnp.arange(d), heads * d)
        out[text // support.TEXTS, places] = found.astype(out.dtype)

    shape = jax.ShapeDtypeStruct((len(queries) // support.TEXTS, support.TEXTS * heads * d), queries.dtype)
    call = _call(linear_recall, shape, (texts, heads), interpret, warps=4)
    return call(queries, source.S, source.z, *_given(then, interpret))


def _given(then: Array | None, interpret: bool) -> list[Array]:
    """What there is to ask for ahead; interpreted kernels have no cache."""
    return [] if then is None or interpret else [then]


def _prefetch(then: Any, program: Array, programs: int) -> None:
    for ref in then:
        prefetch(ref, program, programs)


def _call(kernel: Callable, shapes: Any, grid: tuple[int, ...], interpret: bool, *, aliases=None, warps: int = 0):
    return pl.pallas_call(
        kernel,
        name=kernel.__name__,  # in profiles
        grid=grid,
        out_shape=shapes,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps or support.WARPS, num_stages=1),
    )
