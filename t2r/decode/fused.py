"""A language model's decoding step in few kernels: five for each layer (Pallas: Triton, GPU).

A recurrent step is small. Left to itself it is some fifteen kernels for each layer, most of them shorter than the time
it takes to start them. Here a norm and the products after it are one kernel, a product and the residual stream after it
another, and the recurrent step between them the third. Factors are kept as `tiles` has them.

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
from t2r.attention.feature_map import Normalizer
from t2r.attention.kernels.blocks import is_alone
from t2r.attention.linear import LinearState
from t2r.attention.module import MergedLinearAttention, SoftmaxAttention, State
from t2r.decode import tiles
from t2r.decode.tiles import Rows, Tile, pack, read_tile
from t2r.model.embedding import PlainEmbedding
from t2r.model.transformer import Block, DecodeState, LanguageModel, embed

MOST = 64  # texts at once; of more, products are large enough to be worth a launch


class Layer(NamedTuple):
    projections: Rows  # queries, keys, values; of merged T2R φ(q), φ(k), values
    out: Rows
    up: Rows
    down: Rows


class Stream(NamedTuple):
    """The residual stream, and for the norm that reads it next the sums of parts of it, and of their squares."""

    x: Float[Array, "groups n"]  # as `tiles.factors`
    sums: Float[Array, "b parts"]
    squares: Float[Array, "b parts"]


def suits(model: LanguageModel) -> bool:
    """Whether all layers are of kinds that the kernels know."""
    config = model.config
    inputs = (config.width, config.feedforward, config.heads * config.head_dim)
    return (
        not config.encoder_layers
        and (config.norm, config.norm_placement, config.activation) == ("layer", "before", "relu")
        and not (config.gated or config.parallel or config.query_norm or config.positions == "rotary")
        and all(_is_known(block.attention) for block in model.blocks)
        and _is_power(config.width, 32 * tiles.WARPS)
        and all(_is_power(size, 32 * tiles.WARPS) or size % tiles.COLUMNS == 0 for size in inputs)
    )


def _is_known(attention: Any) -> bool:
    shape = attention.shape
    projections = [attention.query, attention.key, attention.value]
    fit = sum(linear.kernel.shape[1] * linear.kernel.shape[2] for linear in projections) % 32 == 0
    if not isinstance(attention, MergedLinearAttention):
        return fit and isinstance(attention, SoftmaxAttention)
    powers = all(_is_power(size, 16) for size in (attention.key.kernel.shape[2], shape.head_dim))
    return fit and powers and shape.heads == shape.kv_heads


def _is_power(size: int, least: int) -> bool:
    """Of two, as are all sizes in Triton."""
    return size >= least and size & (size - 1) == 0


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
        self._layers = [pack_layer(block, dtype) for block in model.blocks]  # once, not at each step
        self._words = pack(*_words(model.embedding), dtype) if isinstance(model.embedding, PlainEmbedding) else None

    def __call__(self, tokens: Int[Array, "b 1"], *, state: DecodeState, mask: Bool[Array, "b 1"]):
        """As the model itself, for one token of each text."""
        model, texts = self._model, len(tokens)
        x = embed(model, model.embedding, tokens, state.position[:, None] + mask - 1)[:, 0]
        x, pasts = self._all_layers(stream_of(x, parts=self._layers[0].out.count), state.layers, mask)
        x = tiles.texts(x)[:texts]
        x = x if model.final_norm is None else model.final_norm(x)
        return x[:, None], DecodeState(pasts, state.position + mask[:, 0], None)

    def stacked(self, state: DecodeState) -> DecodeState:
        """A model's state as this form's."""
        return state

    def unstacked(self, state: DecodeState) -> DecodeState:
        """And back."""
        return state

    def scores(self, hidden: Array) -> Array:
        return self._model.scores(hidden)

    def likeliest(self, hidden: Float[Array, "b width"]) -> Int[Array, "b"]:
        if self._words is None:
            return self._model.likeliest(hidden)
        return likeliest(tiles.factors(hidden), self._words, interpret=self._interpret)[: len(hidden)]

    def _all_layers(self, stream: Stream, pasts: tuple, mask: Array) -> tuple[Float[Array, "groups n"], tuple]:
        """The residual stream after them, and their states."""
        after = []
        for block, layer, past in zip(self._model.blocks, self._layers, pasts):
            stream, past = self._layer(block, layer, stream, past, mask)
            after.append(past)
        return stream.x, tuple(after)

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
    return tiles.factors(out.reshape(len(mask), -1)), past


def stream_of(x: Float[Array, "b e"], *, parts: int) -> Stream:
    """What the first layer reads."""
    filled = jnp.pad(x, [(0, -len(x) % tiles.TEXTS), (0, 0)])
    numbers = filled.astype(jnp.float32).reshape(len(filled), parts, -1)
    return Stream(tiles.factors(x), numbers.sum(2), (numbers**2).sum(2))


def pack_layer(block: Block, dtype: Any) -> Layer:
    """A block's matrices."""
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


def normed_product(
    stream: Stream, rows: Rows, eps: float, *, relu_before: int, in_rows: bool = False, interpret: bool = False
) -> Float[Array, "groups n"]:
    """rows · norm(x) + bias, of which the first outputs go through a relu; as factors, or a text in each row."""
    groups, outputs = len(stream.x), len(rows.bias)
    norm = Norm(eps, relu_before)

    def kernel(x, sums, squares, numbers, of_rows, bias, out):
        here, group = Rows(numbers, of_rows, bias), pl.program_id(1)
        tile = read_tile(here, pl.program_id(0))
        found = multiply_normed(Stream(x, sums, squares), group, here, tile, norm)
        put = put_in_rows if in_rows else put_as_factors
        put(out, group, tile, found)

    shape = (groups * tiles.TEXTS, outputs) if in_rows else (groups, tiles.TEXTS * outputs)
    shape = jax.ShapeDtypeStruct(shape, stream.x.dtype)
    return _call(kernel, shape, (rows.count, groups), interpret)(*stream, *rows)


class Norm(NamedTuple):
    """What stands before a product, and after it."""

    eps: float
    relu_before: int  # outputs up to here go through a relu


def multiply_normed(
    stream: Stream, group: Array, rows: Rows, tile: Tile, norm: Norm, turn: Array | None = None
) -> Float[Array, "texts rows"]:
    """In a program: the outputs of a tile."""
    numbers = tiles.read_factors(stream.x, group, rows, turn)
    moments = [tiles.read(parts, (_texts(group), slice(None)), turn) for parts in (stream.sums, stream.squares)]
    found = tiles.product(numbers, tile, turn)
    width = stream.x.shape[1] // tiles.TEXTS
    mean, square = (parts.sum(1, keepdims=True) / width for parts in moments)
    found = (found - mean * tile.sums) * jax.lax.rsqrt(square - mean**2 + norm.eps) + tile.bias
    return jnp.where(tile.rows < norm.relu_before, jnp.maximum(found, 0.0), found)


def put_in_rows(out: Any, group: Array, tile: Tile, found: Array) -> None:
    out[_texts(group), pl.ds(tile.first, len(tile.bias))] = found.astype(out.dtype)


def put_as_factors(out: Any, group: Array, tile: Tile, found: Array) -> None:
    out[group, tiles.indices(tile.rows, out.shape[1] // tiles.TEXTS)] = found.astype(out.dtype)


def _texts(group: Array) -> Any:
    return pl.ds(group * tiles.TEXTS, tiles.TEXTS)


def added_product(
    x: Float[Array, "groups n"], inputs: Float[Array, "groups m"], rows: Rows, *, interpret: bool = False
) -> Stream:
    """x + rows · inputs + bias; both are factors."""

    def kernel(x, inputs, numbers, of_rows, bias, out, sums, squares):
        here, number, group = Rows(numbers, of_rows, bias), pl.program_id(0), pl.program_id(1)
        tile = read_tile(here, number)
        multiply_and_add(x, inputs, group, here, tile, number, Stream(out, sums, squares))

    part = jax.ShapeDtypeStruct((len(x) * tiles.TEXTS, rows.count), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), part, part]
    return Stream(*_call(kernel, shapes, (rows.count, len(x)), interpret)(x, inputs, *rows))


def multiply_and_add(
    x: Any, inputs: Any, group: Array, rows: Rows, tile: Tile, number: Array, out: Stream, turn: Array | None = None
) -> None:
    """In a program: the residual stream's columns that are a tile's outputs, and their part of the next norm's sums."""
    places = tiles.indices(tile.rows, x.shape[1] // tiles.TEXTS)
    numbers, before = tiles.read_factors(inputs, group, rows, turn), tiles.read(x, (group, places), turn)
    found = before.astype(jnp.float32) + tiles.product(numbers, tile, turn) + tile.bias
    found = found.astype(out.x.dtype)
    out.x[group, places] = found
    found = found.astype(jnp.float32)
    out.sums[_texts(group), number], out.squares[_texts(group), number] = found.sum(1), (found**2).sum(1)


def likeliest(x: Float[Array, "groups n"], rows: Rows, *, interpret: bool = False) -> Int[Array, "texts"]:
    """The first row of which rows · x + bias is largest."""

    def kernel(x, numbers, of_rows, bias, most, which):
        here, number, group = Rows(numbers, of_rows, bias), pl.program_id(0), pl.program_id(1)
        tile = read_tile(here, number)
        found = tiles.product(tiles.read_factors(x, group, here), tile) + tile.bias
        largest = found.max(1)
        row = jnp.where(found == largest[:, None], tile.rows[None, :], len(rows.bias) - 1)
        most[_texts(group), number], which[_texts(group), number] = largest, row.min(1)

    sizes = (len(x) * tiles.TEXTS, rows.count)
    shapes = [jax.ShapeDtypeStruct(sizes, dtype) for dtype in (jnp.float32, jnp.int32)]
    most, which = _call(kernel, shapes, (rows.count, len(x)), interpret)(x, *rows)
    return jnp.take_along_axis(which, jnp.argmax(most, 1)[:, None], 1)[:, 0]


def linear_step(
    projected: Float[Array, "texts p"],
    past: LinearState,
    keep: Bool[Array, "b"],
    normalizer: Normalizer,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "groups n"], LinearState]:
    """S and z of each text's head take in a key and a value, and are read by a query; not of texts that have ended."""
    texts, heads, _, d = past.S.shape

    def kernel(projected, keep, S, z, out, new_S, new_z):
        head = read_head(S, z, keep, pl.program_id(0), pl.program_id(1))
        attend(projected, head, out, new_S, new_z, normalizer)

    shapes = [jax.ShapeDtypeStruct((len(projected) // tiles.TEXTS, tiles.TEXTS * heads * d), projected.dtype)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (past.S, past.z)]
    call = _call(kernel, shapes, (texts, heads), interpret, aliases={2: 1, 3: 2}, warps=4)
    out, S, z = call(projected, keep.astype(jnp.float32), past.S, past.z)
    return out, LinearState(S, z)


class Head(NamedTuple):
    """A text's head before a step, in a program."""

    text: Array
    head: Array
    S: Float[Array, "k d"]
    z: Float[Array, "k"]
    keep: Array  # 1, or 0 of texts that have ended


def read_head(S: Any, z: Any, keep: Any, text: Array, head: Array, layer: tuple = ()) -> Head:
    place = (*layer, text, head)
    return Head(text, head, S[place], z[place], keep[text])


def attend(
    projected: Any,
    head: Head,
    out: Any,
    S: Any,
    z: Any,
    normalizer: Normalizer,
    layer: tuple = (),
    turn: Array | None = None,
) -> None:
    """In a program: one text's head."""
    heads, k, d = S.shape[-3:]

    def vector(first: int, size: int) -> Array:
        place = (head.text, pl.ds(first + head.head * size, size))
        return tiles.read(projected, place, turn).astype(jnp.float32)

    q, key, v = vector(0, k), vector(heads * k, k) * head.keep, vector(2 * heads * k, d)
    state, total = head.S + key[:, None] * v[None, :], head.z + key
    found = (q[:, None] * state).sum(0) / normalizer((q * total).sum())
    places = tiles.index(head.text % tiles.TEXTS, head.head * d + jnp.arange(d), heads * d)
    out[head.text // tiles.TEXTS, places] = found.astype(out.dtype)
    place = (*layer, head.text, head.head)
    S[place], z[place] = state, total


def _call(kernel: Callable, shapes: Any, grid: tuple[int, int], interpret: bool, *, aliases=None, warps: int = 0):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shapes,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps or tiles.WARPS, num_stages=1),
    )
