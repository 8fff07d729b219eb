"""A language model's decoding step in few kernels: five for each layer (Pallas: Triton, GPU).

A recurrent step is small. Left to itself it is some fifteen kernels for each layer, most of them shorter than the time
it takes to start them. Here a norm and the products after it are one kernel, a product and the residual stream after it
another, and the recurrent step between them the third. Both factors of a product are kept as the GPU's threads multiply
them, so that nothing has to move between reading and multiplying.

For what gains most: language models with norms before, plain feed-forwards, and softmax or merged T2R attention without
rotation. It equals the model's own step, which stays the one to read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from t2r.attention import softmax
from t2r.attention.kernels.blocks import is_alone
from t2r.attention.linear import LinearState
from t2r.attention.module import MergedLinearAttention, SoftmaxAttention, State
from t2r.decode.warps import add_product_by_warps
from t2r.model.embedding import PlainEmbedding
from t2r.model.transformer import Block, DecodeState, LanguageModel, embed

TEXTS = 16  # of a product of blocks
MOST = 64  # texts at once; of more, products are large enough to be worth a launch
WARPS = 8  # of a program that multiplies
COLUMNS = 1024  # that it multiplies at once


class Rows(NamedTuple):
    """A matrix with an output in each row, in tiles for one program each, and what belongs to its rows, in float32.

    The scale and bias of a norm before it are part of it: of the product with a normed x they leave
    (x · rowᵀ − mean · Σ row) / deviation + bias.
    """

    tiles: Float[Array, "tiles parts size"]
    sums: Float[Array, "n"]
    bias: Float[Array, "n"]

    @property
    def per_tile(self) -> int:
        return len(self.bias) // len(self.tiles)

    @property
    def columns(self) -> int:
        """Of one part."""
        return self.tiles.shape[2] // self.per_tile


class Layer(NamedTuple):
    projections: Rows  # queries, keys, values; of merged T2R φ(q), φ(k), values
    out: Rows
    up: Rows
    down: Rows


class Factors(NamedTuple):
    """Numbers of each text that are to be multiplied by matrices: `TEXTS` texts, then so many more, each in the order
    of `_index`."""

    numbers: Float[Array, "groups n"]
    columns: int

    @classmethod
    def of(cls, x: Float[Array, "b n"]) -> "Factors":
        """From rows, filled up to what products of blocks need."""
        texts, columns = x.shape
        part, filled = min(columns, COLUMNS), jnp.pad(x, [(0, -texts % TEXTS), (0, 0)])
        apart = filled.reshape(-1, 2, 8, columns // part, WARPS, part // WARPS // 16, 2, 4, 2)
        #       group, 8 texts, text, part, warp, 16 columns, 8 columns, pair, column → as they are read
        return cls(apart.transpose(0, 3, 5, 4, 2, 7, 6, 1, 8).reshape(-1, TEXTS * columns), columns)

    def rows(self, texts: int) -> Float[Array, "b n"]:
        """And back."""
        part = min(self.columns, COLUMNS)
        apart = self.numbers.reshape(-1, self.columns // part, part // WARPS // 16, WARPS, 8, 4, 2, 2, 2)
        return apart.transpose(0, 7, 4, 1, 3, 2, 6, 5, 8).reshape(-1, self.columns)[:texts]


def _index(text: Array, column: Array, columns: int) -> Array:
    """Where a number stands in its group. A thread reads 8 at once, for products of 16 × 16 by 16 × 8 numbers: of the
    texts g and g + 8 columns 2t and 2t + 1, and the same 8 columns further."""
    part, each = min(columns, COLUMNS), min(columns, COLUMNS) // WARPS
    warp, block, within = column % part // each, column % each // 16, column % 16
    thread = (block * WARPS + warp) * 32 + text % 8 * 4 + within % 8 // 2
    return column // part * (TEXTS * part) + thread * 8 + within // 8 * 4 + text // 8 * 2 + column % 2


class Stream(NamedTuple):
    """The residual stream, and for the norm that reads it next the sums of parts of it, and of their squares."""

    x: Float[Array, "groups n"]  # as `Factors`
    sums: Float[Array, "b parts"]
    squares: Float[Array, "b parts"]


def suits(model: LanguageModel) -> bool:
    """Whether all layers are of kinds that the kernels know."""
    config = model.config
    sizes = (config.width, config.feedforward, config.heads * config.head_dim)
    return (
        not config.encoder_layers
        and (config.norm, config.norm_placement, config.activation) == ("layer", "before", "relu")
        and not (config.gated or config.parallel or config.query_norm or config.positions == "rotary")
        and all(_is_known(block.attention) for block in model.blocks)
        and all(size % (32 * WARPS) == 0 and (size <= COLUMNS or size % COLUMNS == 0) for size in sizes)
    )


def _is_known(attention: Any) -> bool:
    if not isinstance(attention, MergedLinearAttention):
        return isinstance(attention, SoftmaxAttention)
    shape, features = attention.shape, attention.key.kernel.shape[-1]
    powers = all(size >= 16 and size & (size - 1) == 0 for size in (features, shape.head_dim))
    return powers and shape.heads == shape.kv_heads


def available(model: LanguageModel, texts: int) -> bool:
    """Whether to use them, here: on a GPU alone, for few texts."""
    config = model.config
    here = jax.default_backend() == "gpu" and is_alone() and config.kernels != "off"
    return here and texts <= MOST and config.dtype == "bfloat16" and suits(model)


class FusedModel:
    """A model that decodes by the kernels; its state is the model's own."""

    def __init__(self, model: LanguageModel, *, interpret: bool = False):
        dtype = jnp.dtype(model.config.dtype)
        self._model, self._interpret = model, interpret
        self._layers = [_layer(block, dtype) for block in model.blocks]  # once, not at each step
        self._words = pack(*_words(model.embedding), dtype) if isinstance(model.embedding, PlainEmbedding) else None

    def __call__(self, tokens: Int[Array, "b 1"], *, state: DecodeState, mask: Bool[Array, "b 1"]):
        """As the model itself, for one token of each text."""
        model, texts = self._model, len(tokens)
        x = embed(model, model.embedding, tokens, state.position[:, None] + mask - 1)[:, 0]
        stream = _stream(x, parts=len(self._layers[0].out.tiles))
        pasts = []
        for block, layer, past in zip(model.blocks, self._layers, state.layers):
            stream, past = self._layer(block, layer, stream, past, mask)
            pasts.append(past)
        x = Factors(stream.x, x.shape[1]).rows(texts)
        x = x if model.final_norm is None else model.final_norm(x)
        return x[:, None], DecodeState(tuple(pasts), state.position + mask[:, 0], None)

    def scores(self, hidden: Array) -> Array:
        return self._model.scores(hidden)

    def likeliest(self, hidden: Float[Array, "b width"]) -> Int[Array, "b"]:
        if self._words is None:
            return self._model.likeliest(hidden)
        return likeliest(Factors.of(hidden).numbers, self._words, interpret=self._interpret)[: len(hidden)]

    def _layer(self, block: Block, layer: Layer, stream: Stream, past: State, mask: Array) -> tuple[Stream, State]:
        eps, attention = self._model.config.norm_eps, block.attention
        kernel = dict(interpret=self._interpret)
        is_linear = isinstance(attention, MergedLinearAttention)
        features = attention.shape.heads * past.z.shape[-1] if is_linear else 0
        projected = normed_product(stream, layer.projections, eps, relu_before=2 * features, in_rows=True, **kernel)
        if is_linear:
            attended, past = linear_step(projected, past, mask[:, 0], attention.normalizer, **kernel)
        else:
            attended, past = _softmax_step(attention, projected, past, mask)
        stream = added_product(stream.x, attended, layer.out, **kernel)
        hidden = normed_product(stream, layer.up, eps, relu_before=len(layer.up.bias), **kernel)
        return added_product(stream.x, hidden, layer.down, **kernel), past


def _softmax_step(attention: Any, projected: Array, past: softmax.KVCache, mask: Array) -> tuple[Array, State]:
    """The transformer's attention, by its own functions."""
    shape = attention.shape
    q, k, v = jnp.split(
        projected[: len(mask)].reshape(len(mask), 1, -1, shape.head_dim),
        [shape.heads, shape.heads + shape.kv_heads],
        axis=2,
    )
    past = softmax.append(past, k, v, mask)
    q = q.reshape(len(mask), 1, shape.kv_heads, -1, shape.head_dim)
    out = softmax.attend(q, past.k, past.v, softmax.cached_mask(past, 1, shape.window), shape.query_scale)
    return Factors.of(out.reshape(len(mask), -1)).numbers, past


def _stream(x: Float[Array, "b e"], *, parts: int) -> Stream:
    filled = jnp.pad(x, [(0, -len(x) % TEXTS), (0, 0)])
    numbers = filled.astype(jnp.float32).reshape(len(filled), parts, -1)
    return Stream(Factors.of(x).numbers, numbers.sum(2), (numbers**2).sum(2))


def _layer(block: Block, dtype: Any) -> Layer:
    attention, feed, width = block.attention, block.feedforward, block.attention.shape.width
    heads = [_matrix(linear, width) for linear in (attention.query, attention.key, attention.value)]
    together = [jnp.concatenate(arrays) for arrays in zip(*heads)]
    return Layer(
        pack(*_after(block.attention_norm, *together), dtype),
        pack(*_matrix(attention.out, -1, width), dtype),
        pack(*_after(block.feedforward_norm, *_matrix(feed.up, width)), dtype),
        pack(*_matrix(feed.down, -1, width), dtype),
    )


def _matrix(linear: Any, inputs: int, outputs: int = -1) -> tuple[Array, Array]:
    """A layer's matrix, an output in each row whatever heads it has, and its bias."""
    rows = linear.kernel[...].reshape(inputs, outputs).T
    return rows, jnp.zeros(len(rows)) if linear.bias is None else linear.bias[...].reshape(-1)


def _words(embedding: PlainEmbedding) -> tuple[Array, Array]:
    """The output's matrix and bias, with rows that no text can want, up to a whole number of tiles."""
    rows = embedding.output_table()
    bias = jnp.zeros(len(rows)) if embedding.bias is None else embedding.bias[...]
    fill = (0, -len(rows) % 32)
    return jnp.pad(rows, [fill, (0, 0)]), jnp.pad(bias, fill, constant_values=-jnp.inf)


def _after(norm: Any, rows: Array, bias: Array) -> tuple[Array, Array]:
    """These, applied to what has only been brought to mean 0 and variance 1."""
    return rows * norm.scale[...], bias if norm.bias is None else bias + rows @ norm.bias[...]


def pack(rows: Float[Array, "n k"], bias: Float[Array, "n"], dtype: Any) -> Rows:
    """A matrix as the kernels read it.

    Threads read 8 numbers each, one after the other, warp after warp. In this order each finds there its own factors of
    products of 16 × 16 by 16 × 8 numbers, two for each: of a row columns 2t and 2t + 1, and the same 8 further.
    """
    rows = rows.astype(dtype)
    count = 8 if len(rows) <= 2048 else 16 if len(rows) <= 8192 else 32  # a tile for each multiprocessor or more
    columns = min(rows.shape[1], COLUMNS)
    apart = rows.reshape(-1, count // 8, 8, rows.shape[1] // columns, WARPS, columns // WARPS // 32, 4, 4, 2)
    #       tile, 8 rows, row, part, warp, 32 columns, 8 columns, pair, column → tile, part, then as they are read
    tiles = apart.transpose(0, 3, 1, 5, 4, 2, 7, 6, 8).reshape(len(rows) // count, -1, count * columns)
    return Rows(tiles, rows.sum(1, dtype=jnp.float32), bias)


def _unpack(tile: Float[Array, "size"], columns: int) -> Float[Array, "warps rows columns/warps"]:
    """A part of a tile, with each warp's columns: for threads nothing moves."""
    rows = tile.size // columns
    apart = tile.reshape(rows // 8, columns // WARPS // 32, WARPS, 8, 4, 4, 2)
    return apart.transpose(2, 0, 3, 1, 5, 4, 6).reshape(WARPS, rows, columns // WARPS)


def normed_product(
    stream: Stream, rows: Rows, eps: float, *, relu_before: int, in_rows: bool = False, interpret: bool = False
) -> Float[Array, "groups n"]:
    """rows · norm(x) + bias, of which the first outputs go through a relu; as `Factors`, or a text in each row."""
    groups, outputs, width = len(stream.x), len(rows.bias), stream.x.shape[1] // TEXTS

    def kernel(x, sums, squares, tiles, of_rows, bias, out):
        group, here = pl.program_id(1), _rows_of_program(rows)
        factors, texts = _factors(x, tiles, rows), pl.ds(group * TEXTS, TEXTS)
        moments, of_rows, bias = (sums[texts, :], squares[texts, :]), of_rows[here], bias[here]
        zero = _zero_after(interpret)
        mean, square = (parts.sum(1, keepdims=True) / width for parts in moments)
        scale = jax.lax.rsqrt(square - mean**2 + eps)
        found = scale * (_product(factors, zero) - mean * of_rows) + bias
        is_relu = here.start + jnp.arange(here.size) < relu_before
        found = jnp.where(is_relu, jnp.maximum(found, 0.0), found).astype(out.dtype)
        if in_rows:
            out[texts, here] = found
        else:
            out[group, _indices(here, outputs)] = found

    shape = (groups * TEXTS, outputs) if in_rows else (groups, TEXTS * outputs)
    shape = jax.ShapeDtypeStruct(shape, stream.x.dtype)
    return _call(kernel, shape, (len(rows.tiles), groups), interpret)(*stream, *rows)


def added_product(
    x: Float[Array, "groups n"], inputs: Float[Array, "groups m"], rows: Rows, *, interpret: bool = False
) -> Stream:
    """x + rows · inputs + bias; both are `Factors`."""
    width = x.shape[1] // TEXTS

    def kernel(x, inputs, tiles, of_rows, bias, out, sums, squares):
        tile, group, here = pl.program_id(0), pl.program_id(1), _rows_of_program(rows)
        factors, texts = _factors(inputs, tiles, rows), pl.ds(group * TEXTS, TEXTS)
        before, bias = x[group, _indices(here, width)], bias[here]
        zero = _zero_after(interpret)
        found = (before.astype(jnp.float32) + _product(factors, zero) + bias).astype(out.dtype)
        out[group, _indices(here, width)] = found
        found = found.astype(jnp.float32)
        sums[texts, tile], squares[texts, tile] = found.sum(1), (found**2).sum(1)

    part = jax.ShapeDtypeStruct((len(x) * TEXTS, len(rows.tiles)), jnp.float32)
    shapes = Stream(jax.ShapeDtypeStruct(x.shape, x.dtype), part, part)
    return Stream(*_call(kernel, list(shapes), (len(rows.tiles), len(x)), interpret)(x, inputs, *rows))


def likeliest(x: Float[Array, "groups n"], rows: Rows, *, interpret: bool = False) -> Int[Array, "texts"]:
    """The first row of which rows · x + bias is largest."""

    def kernel(x, tiles, of_rows, bias, most, which):
        tile, group, here = pl.program_id(0), pl.program_id(1), _rows_of_program(rows)
        factors, bias, texts = _factors(x, tiles, rows), bias[here], pl.ds(group * TEXTS, TEXTS)
        found = _product(factors, _zero_after(interpret)) + bias
        largest = found.max(1)
        row = jnp.where(found == largest[:, None], here.start + jnp.arange(here.size)[None, :], len(rows.bias) - 1)
        most[texts, tile], which[texts, tile] = largest, row.min(1)

    sizes = (len(x) * TEXTS, len(rows.tiles))
    shapes = [jax.ShapeDtypeStruct(sizes, dtype) for dtype in (jnp.float32, jnp.int32)]
    most, which = _call(kernel, shapes, (len(rows.tiles), len(x)), interpret)(x, *rows)
    return jnp.take_along_axis(which, jnp.argmax(most, 1)[:, None], 1)[:, 0]


def _zero_after(interpret: bool) -> Array | float:
    """Zero, but compilers know it only when all threads have asked for what they are to read. Products that start from
    it start after that; else, to spare registers, little would be asked for at a time."""
    return 0.0 if interpret else jnp.minimum(jnp.arange(32 * WARPS), 0).max(0).astype(jnp.float32)


def _rows_of_program(rows: Rows) -> Any:
    return pl.ds(pl.program_id(0) * rows.per_tile, rows.per_tile)


def _indices(here: Any, columns: int) -> Int[Array, "texts rows"]:
    """Where a program's outputs stand, as factors of the next product."""
    return _index(jnp.arange(TEXTS)[:, None], here.start + jnp.arange(here.size)[None, :], columns)


def _factors(x: Any, tiles: Any, rows: Rows) -> list[tuple[Array, Array]]:
    """A program's texts and rows, part by part, with each warp's columns. All are asked for before one is needed."""
    parts, columns = range(rows.tiles.shape[1]), rows.columns
    tile = [tiles[pl.program_id(0), part, :] for part in parts]
    numbers = [x[pl.program_id(1), pl.ds(part * TEXTS * columns, TEXTS * columns)] for part in parts]
    apart = [part.reshape(columns // WARPS // 16, WARPS, 8, 4, 2, 2, 2) for part in numbers]
    by_warps = [part.transpose(1, 5, 2, 0, 4, 3, 6).reshape(WARPS, TEXTS, -1) for part in apart]
    return [(part, _unpack(numbers, columns)) for part, numbers in zip(by_warps, tile)]


def _product(factors: list[tuple[Array, Array]], zero: Array | float) -> Float[Array, "b n"]:
    found = jnp.full((WARPS, TEXTS, factors[0][1].shape[1]), zero, jnp.float32)
    for x, rows in factors:
        found = add_product_by_warps(found, x, rows)
    return found.sum(0)


def linear_step(
    projected: Float[Array, "texts p"],
    past: LinearState,
    keep: Bool[Array, "b"],
    normalizer: Callable[[Array], Array],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "groups n"], LinearState]:
    """S and z of each text's head take in a key and a value, and are read by a query; not of texts that have ended."""
    texts, heads, k, d = past.S.shape

    def kernel(projected, keep, S, z, out, new_S, new_z):
        text, head = pl.program_id(0), pl.program_id(1)

        def vector(first: int, size: int) -> Array:
            return projected[text, pl.ds(first + head * size, size)].astype(jnp.float32)

        old_S, old_z = S[text, head, :, :], z[text, head, :]
        q, key, v = vector(0, k), vector(heads * k, k) * keep[text], vector(2 * heads * k, d)
        state, total = old_S + key[:, None] * v[None, :], old_z + key
        found = (q[:, None] * state).sum(0) / normalizer((q * total).sum())
        out[text // TEXTS, _index(text % TEXTS, head * d + jnp.arange(d), heads * d)] = found.astype(out.dtype)
        new_S[text, head, :, :], new_z[text, head, :] = state, total

    shapes = [jax.ShapeDtypeStruct((len(projected) // TEXTS, TEXTS * heads * d), projected.dtype)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (past.S, past.z)]
    call = _call(kernel, shapes, (texts, heads), interpret, aliases={2: 1, 3: 2}, warps=4)
    out, S, z = call(projected, keep.astype(jnp.float32), past.S, past.z)
    return out, LinearState(S, z)


def _call(kernel: Callable, shapes: Any, grid: tuple[int, int], interpret: bool, *, aliases=None, warps: int = 0):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shapes,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps or WARPS, num_stages=1),
    )
