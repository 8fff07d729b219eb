"""A language model's decoding step in few kernels: five for each layer (Pallas: Triton, GPU).

A recurrent step is small. Left to itself it is some fifteen kernels for each layer, most of them shorter than the time
it takes to start them. Here a norm and the products after it are one kernel, a product and the residual stream after it
another, and the recurrent step between them the third. Factors are kept as `tiles` has them, and each kernel asks the
cache for those of the next.

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
from t2r.decode.prefetch import prefetch
from t2r.decode.tiles import Rows, pack, read_tile
from t2r.model.embedding import PlainEmbedding
from t2r.model.transformer import Block, DecodeState, LanguageModel, embed

MOST = 64  # texts at once; of more, products are large enough to be worth a launch


class Layer(NamedTuple):
    projections: Rows  # queries, keys, values; of merged T2R φ(q), φ(k), values
    out: Rows
    up: Rows
    down: Rows


class Packed(NamedTuple):
    """A model's matrices, in the order in which the kernels read them."""

    layers: tuple[Layer, ...]
    words: Rows | None  # None: the model's own embedding says which is likeliest


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
    """Whether to use them, here: on one NVIDIA GPU, for few texts."""
    config = model.config
    here = "NVIDIA" in jax.devices()[0].device_kind and is_alone() and config.kernels != "off"
    return here and texts <= MOST and config.dtype == "bfloat16" and suits(model)


def pack_model(model: LanguageModel) -> Packed:
    """All that a step reads of it, once more."""
    dtype, config = jnp.dtype(model.config.dtype), model.config
    plain = isinstance(model.embedding, PlainEmbedding) and config.vocab_size * config.width < 2**31  # as Triton counts
    words = pack(*_words(model.embedding), dtype) if plain else None
    return Packed(tuple(pack_layer(block, dtype) for block in model.blocks), words)


class FusedModel:
    """A model that decodes by the kernels; its state is the model's own."""

    def __init__(self, model: LanguageModel, packed: Packed, *, interpret: bool = False):
        self._model, self._packed, self._interpret = model, packed, interpret

    def __call__(self, tokens: Int[Array, "b 1"], *, state: DecodeState, mask: Bool[Array, "b 1"]):
        """As the model itself, for one token of each text."""
        model, layers, texts = self._model, self._packed.layers, len(tokens)
        x = embed(model, model.embedding, tokens, state.position[:, None] + mask - 1)[:, 0]
        stream, pasts = stream_of(x, parts=layers[0].out.count), []
        for block, layer, past, then in zip(model.blocks, layers, state.layers, [*layers[1:], None]):
            stream, past = self._layer(block, layer, stream, past, mask, self._first_matrix(then))
            pasts.append(past)
        x = tiles.texts(stream.x)[:texts]
        x = x if model.final_norm is None else model.final_norm(x)
        return x[:, None], DecodeState(tuple(pasts), state.position + mask[:, 0], None)

    def scores(self, hidden: Array) -> Array:
        return self._model.scores(hidden)

    def likeliest(self, hidden: Float[Array, "b width"]) -> Int[Array, "b"]:
        if self._packed.words is None:
            return self._model.likeliest(hidden)
        return likeliest(tiles.factors(hidden), self._packed.words, interpret=self._interpret)[: len(hidden)]

    def _first_matrix(self, layer: Layer | None) -> Array | None:
        """Of a layer, or of what comes after the last."""
        rows = self._packed.words if layer is None else layer.projections
        return None if rows is None else rows.tiles

    def _layer(
        self, block: Block, layer: Layer, stream: Stream, past: State, mask: Array, then: Array | None
    ) -> tuple[Stream, State]:
        """One layer. Each kernel asks for what the next one reads, the last for `then`."""
        eps, attention = self._model.config.norm_eps, block.attention
        kernel = dict(interpret=self._interpret)
        is_linear = isinstance(attention, MergedLinearAttention)
        features = attention.shape.heads * past.z.shape[-1] if is_linear else 0
        out, down = layer.out.tiles, layer.down.tiles
        ahead = past.S if is_linear else out
        projected = normed_product(
            stream, layer.projections, eps, relu_before=2 * features, in_rows=True, then=ahead, **kernel
        )
        if is_linear:
            attended, past = linear_step(projected, past, mask[:, 0], attention.normalizer, then=out, **kernel)
        else:
            attended, past = _softmax_step(attention, projected, past, mask)
        stream = added_product(stream.x, attended, layer.out, then=layer.up.tiles, **kernel)
        hidden = normed_product(stream, layer.up, eps, relu_before=len(layer.up.bias), then=down, **kernel)
        return added_product(stream.x, hidden, layer.down, then=then, **kernel), past


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
    stream: Stream,
    rows: Rows,
    eps: float,
    *,
    relu_before: int,
    in_rows: bool = False,
    then: Array | None = None,
    interpret: bool = False,
) -> Float[Array, "groups n"]:
    """rows · norm(x) + bias, of which the first outputs go through a relu; as factors, or a text in each row."""
    groups, outputs, width = len(stream.x), len(rows.bias), stream.x.shape[1] // tiles.TEXTS

    def normed_product(x, sums, squares, numbers, of_rows, bias, *then_and_out):
        *then, out = then_and_out
        here, group = Rows(numbers, of_rows, bias), pl.program_id(1)
        tile = read_tile(here, pl.program_id(0))
        _prefetch(then, pl.program_id(0), rows.count)
        factors, moments = tiles.read_factors(x, group, here), [part[_texts(group), :] for part in (sums, squares)]
        found = tiles.product(factors, tile)
        mean, square = (parts.sum(1, keepdims=True) / width for parts in moments)
        found = (found - mean * tile.sums) * jax.lax.rsqrt(square - mean**2 + eps) + tile.bias
        found = jnp.where(tile.rows < relu_before, jnp.maximum(found, 0.0), found).astype(out.dtype)
        if in_rows:
            out[_texts(group), pl.ds(tile.first, len(tile.bias))] = found
        else:
            out[group, tiles.indices(tile.rows, outputs)] = found

    shape = (groups * tiles.TEXTS, outputs) if in_rows else (groups, tiles.TEXTS * outputs)
    shape = jax.ShapeDtypeStruct(shape, stream.x.dtype)
    return _call(normed_product, shape, (rows.count, groups), interpret)(*stream, *rows, *_given(then, interpret))


def _texts(group: Array) -> Any:
    return pl.ds(group * tiles.TEXTS, tiles.TEXTS)


def added_product(
    x: Float[Array, "groups n"],
    inputs: Float[Array, "groups m"],
    rows: Rows,
    *,
    then: Array | None = None,
    interpret: bool = False,
) -> Stream:
    """x + rows · inputs + bias; both are factors."""

    def added_product(x, inputs, numbers, of_rows, bias, *then_and_outs):
        *then, out, sums, squares = then_and_outs
        here, number, group = Rows(numbers, of_rows, bias), pl.program_id(0), pl.program_id(1)
        tile = read_tile(here, number)
        _prefetch(then, number, rows.count)
        places = tiles.indices(tile.rows, x.shape[1] // tiles.TEXTS)
        factors, before = tiles.read_factors(inputs, group, here), x[group, places].astype(jnp.float32)
        found = (before + tiles.product(factors, tile) + tile.bias).astype(out.dtype)
        out[group, places] = found
        found = found.astype(jnp.float32)
        sums[_texts(group), number], squares[_texts(group), number] = found.sum(1), (found**2).sum(1)

    part = jax.ShapeDtypeStruct((len(x) * tiles.TEXTS, rows.count), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), part, part]
    return Stream(
        *_call(added_product, shapes, (rows.count, len(x)), interpret)(x, inputs, *rows, *_given(then, interpret))
    )


def likeliest(x: Float[Array, "groups n"], rows: Rows, *, interpret: bool = False) -> Int[Array, "texts"]:
    """The first row of which rows · x + bias is largest: that of each tile, and then of all."""
    last, count = len(rows.bias) - 1, pl.next_power_of_2(rows.count)

    def likeliest_of_tiles(x, numbers, of_rows, bias, most, which):
        here, number, group = Rows(numbers, of_rows, bias), pl.program_id(0), pl.program_id(1)
        tile = read_tile(here, number)
        found = tiles.product(tiles.read_factors(x, group, here), tile) + tile.bias
        most[_texts(group), number], which[_texts(group), number] = _largest(found, tile.rows[None, :], last)

    def likeliest_of_all(most, which, out):
        text = pl.program_id(0)
        there = jnp.arange(count) < rows.count  # beyond is what nobody has written
        found = jnp.where(there, most[text], -jnp.inf)
        out[text] = _largest(found, jnp.where(there, which[text], last), last)[1]

    texts = len(x) * tiles.TEXTS
    shapes = [jax.ShapeDtypeStruct((texts, count), dtype) for dtype in (jnp.float32, jnp.int32)]
    tops = _call(likeliest_of_tiles, shapes, (rows.count, len(x)), interpret)(x, *rows)
    return _call(likeliest_of_all, jax.ShapeDtypeStruct((texts,), jnp.int32), (texts,), interpret, warps=4)(*tops)


def _largest(found: Float[Array, "*b n"], names: Int[Array, "*b n"], none: int) -> tuple[Array, Array]:
    """The largest of each row, and the first name of those that are."""
    largest = found.max(-1)
    return largest, jnp.where(found == largest[..., None], names, none).min(-1)


def linear_step(
    projected: Float[Array, "texts p"],
    past: LinearState,
    keep: Bool[Array, "b"],
    normalizer: Normalizer,
    *,
    then: Array | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "groups n"], LinearState]:
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
        places = tiles.index(text % tiles.TEXTS, head * d + jnp.arange(d), heads * d)
        out[text // tiles.TEXTS, places] = found.astype(out.dtype)
        new_S[place], new_z[place] = state, total

    shapes = [jax.ShapeDtypeStruct((len(projected) // tiles.TEXTS, tiles.TEXTS * heads * d), projected.dtype)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (past.S, past.z)]
    call = _call(linear_step, shapes, (texts, heads), interpret, aliases={2: 1, 3: 2}, warps=4)
    out, S, z = call(projected, keep.astype(jnp.float32), past.S, past.z, *_given(then, interpret))
    return out, LinearState(S, z)


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
        compiler_params=triton.CompilerParams(num_warps=warps or tiles.WARPS, num_stages=1),
    )
