"""A decoding step in few kernels: five for each layer, three more where it sees a source (Pallas: Triton, GPU).

A recurrent step is small. Left to itself it is some fifteen kernels for each layer, most of them shorter than the time
it takes to start them. Here a norm and the products after it are one kernel, a product and the residual stream after it
another, and the recurrent step between them the third. Factors are kept as `tiles` has them, and each kernel asks the
cache for those of the next.

For what gains most: models with norms before or after, plain feed-forwards, and softmax or merged T2R attention without
rotation. It equals the model's own step, which stays the one to read.
Where `one_kernel` knows all layers, it takes the place of all these kernels but those for the words.

A norm is part of the product that reads it. Where norms come after, what was added up waits for its norm: the next
product is the first to apply it, and so does the next residual, each for itself.
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
from t2r.attention.kernels.blocks import is_alone, is_power
from t2r.attention.linear import LinearState
from t2r.attention.module import MergedLinearAttention, SoftmaxAttention, State
from t2r.decode import one_kernel, tiles
from t2r.decode.prefetch import prefetch
from t2r.decode.tiles import Matrix, Rows, pack, read_tile
from t2r.model.embedding import PlainEmbedding
from t2r.model.transformer import Block, DecodeState, LanguageModel, embed

MOST = 64  # texts at once; of more, products are large enough to be worth a launch


class Layer(NamedTuple):
    """Its matrices, plain or packed."""

    projections: Matrix | Rows  # queries, keys, values; of merged T2R φ(q), φ(k), values
    out: Matrix | Rows
    up: Matrix | Rows
    down: Matrix | Rows
    cross: Matrix | Rows | None  # queries, or φ(q); None: there is no source
    cross_out: Matrix | Rows | None


class Packed(NamedTuple):
    """A model's matrices, in the order in which the kernels read them."""

    layers: tuple[Layer, ...] | one_kernel.Blocks
    words: Rows | None  # None: the model's own embedding says which is likeliest


class Stream(NamedTuple):
    """The residual stream, and for the norm that reads it next the sums of parts of it, and of their squares."""

    x: Float[Array, "groups n"]  # as `tiles.factors`
    sums: Float[Array, "b parts"]
    squares: Float[Array, "b parts"]
    scale: Float[Array, "width"] | None = None  # of the norm that x waits for, in float32; None: x is the residual
    bias: Float[Array, "width"] | None = None

    def waiting_for(self, norm: Any) -> "Stream":
        bias = jnp.zeros_like(norm.scale[...]) if norm.bias is None else norm.bias[...]
        return self._replace(scale=norm.scale[...], bias=bias)


def suits(model: LanguageModel) -> bool:
    """Whether all layers are of kinds that the kernels know."""
    config = model.config
    inputs = (config.width, config.feedforward, config.heads * config.head_dim)
    return (
        (config.norm, config.activation) == ("layer", "relu")
        and config.norm_placement in ("before", "after")
        and not (config.gated or config.parallel or config.query_norm or config.positions == "rotary")
        and all(_is_known(block.attention) for block in model.blocks)
        and all(_cross(block) is None or _is_known(block.cross, cross=True) for block in model.blocks)
        and is_power(config.width, 32 * tiles.WARPS)
        and all(is_power(size, 32 * tiles.WARPS) or size % tiles.COLUMNS == 0 for size in inputs)
    )


def _cross(block: Block) -> Any:
    return getattr(block, "cross", None)


def _is_known(attention: Any, *, cross: bool = False) -> bool:
    shape = attention.shape
    projections = [attention.query] if cross else [attention.query, attention.key, attention.value]
    fit = sum(linear.kernel.shape[1] * linear.kernel.shape[2] for linear in projections) % 32 == 0
    if not isinstance(attention, MergedLinearAttention):
        return fit and isinstance(attention, SoftmaxAttention)
    powers = all(is_power(size, 4) for size in (attention.key.kernel.shape[2], shape.head_dim))
    return fit and powers and shape.heads == shape.kv_heads


def available(model: LanguageModel, texts: int) -> bool:
    """Whether to use them, here: on one NVIDIA GPU, for few texts."""
    config = model.config
    here = "NVIDIA" in jax.devices()[0].device_kind and is_alone()
    return config.kernels != "off" and here and texts <= MOST and config.dtype == "bfloat16" and suits(model)


def pack_model(model: LanguageModel, *, as_one: bool = False) -> Packed:
    """All that a step reads of it, once more; `as_one`: for one kernel of all layers."""
    dtype, config = jnp.dtype(model.config.dtype), model.config
    plain = isinstance(model.embedding, PlainEmbedding) and config.vocab_size * config.width < 2**31  # as Triton counts
    words = pack(_words(model.embedding), dtype) if plain else None
    layers, waits_for = [], None  # the norm that what was added up last waits for
    for block in model.blocks:
        layers.append(layer_of(block, waits_for))
        waits_for = block.feedforward_norm
    if as_one:
        features = model.blocks[0].attention.key.kernel.shape[2]
        return Packed(one_kernel.pack([layer[:4] for layer in layers], config.heads, features), words)
    return Packed(tuple(jax.tree.map(lambda x: pack(x, dtype), layer, is_leaf=_is_matrix) for layer in layers), words)


class FusedModel:
    """A model that decodes by the kernels; its state is the model's own."""

    def __init__(self, model: LanguageModel, packed: Packed, *, interpret: bool = False):
        self._model, self._packed, self._interpret = model, packed, interpret

    def __call__(self, tokens: Int[Array, "b 1"], *, state: DecodeState, mask: Bool[Array, "b 1"]):
        """As the model itself, for one token of each text."""
        model, norm = self._model, self._model.final_norm
        x = embed(model, model.embedding, tokens, state.position[:, None] + mask - 1)[:, 0]
        as_one = isinstance(self._packed.layers, one_kernel.Blocks)
        x, pasts = (self._as_one if as_one else self._by_layers)(x, state, mask)
        x = x if norm is None else norm(x)
        return x[:, None], DecodeState(pasts, state.position + mask[:, 0], state.source)

    def _as_one(self, x: Array, state: DecodeState, mask: Array) -> tuple[Array, tuple[State, ...]]:
        config, normalizer = self._model.config, self._model.blocks[0].attention.normalizer
        out, pasts = one_kernel.take_step(x, self._packed.layers, state.layers, mask[:, 0], config, normalizer)
        return out.astype(x.dtype), pasts

    def _by_layers(self, x: Array, state: DecodeState, mask: Array) -> tuple[Array, tuple[State, ...]]:
        model, layers, texts = self._model, self._packed.layers, len(x)
        eps = model.config.norm_eps if self._norms_after else None
        stream, pasts = stream_of(x, parts=layers[0].out.count, ready=eps), []
        sources = state.source or [None] * len(layers)
        for block, layer, past, source, then in zip(model.blocks, layers, state.layers, sources, [*layers[1:], None]):
            first = self._first_matrix(then)
            stream, past = self._attend(block, layer, stream, past, mask)
            stream = stream if source is None else self._see(block, layer, stream, source, texts)
            stream = self._feed(block, layer, stream, first)
            pasts.append(past)
        x = tiles.texts(stream.x)[:texts]
        return model.blocks[-1].feedforward_norm(x) if self._norms_after else x, tuple(pasts)

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

    # The branches of a layer. Each kernel asks for what the next one reads, the last for the next layer's first matrix.

    def _attend(self, block: Block, layer: Layer, stream: Stream, past: State, mask: Array) -> tuple[Stream, State]:
        attention, out = block.attention, layer.out.tiles
        is_linear = isinstance(attention, MergedLinearAttention)
        features = attention.shape.heads * past.z.shape[-1] if is_linear else 0
        ahead, kernel = past.S if is_linear else out, dict(then=out, interpret=self._interpret)
        projected = self._product(stream, layer.projections, relu_before=2 * features, in_rows=True, then=ahead)
        if is_linear:
            attended, past = linear_step(projected, past, mask[:, 0], attention.normalizer, **kernel)
        else:
            attended, past = _softmax_step(attention, projected, past, mask)
        then = (layer.cross or layer.up).tiles
        return self._added(stream, attended, layer.out, block.attention_norm, then), past

    def _see(self, block: Block, layer: Layer, stream: Stream, source: State, texts: int) -> Stream:
        attention, out = block.cross, layer.cross_out.tiles
        is_linear = isinstance(attention, MergedLinearAttention)
        relu_before, ahead = (len(layer.cross.bias), source.S) if is_linear else (0, out)
        queries = self._product(stream, layer.cross, relu_before=relu_before, in_rows=True, then=ahead)
        if is_linear:
            kernel = dict(then=out, interpret=self._interpret)
            seen = linear_recall(queries, source, texts, attention.normalizer, **kernel)
        else:
            seen = _softmax_recall(attention, queries, source, texts)
        return self._added(stream, seen, layer.cross_out, block.cross_norm, layer.up.tiles)

    def _feed(self, block: Block, layer: Layer, stream: Stream, then: Array | None) -> Stream:
        hidden = self._product(stream, layer.up, relu_before=len(layer.up.bias), then=layer.down.tiles)
        return self._added(stream, hidden, layer.down, block.feedforward_norm, then)

    @property
    def _norms_after(self) -> bool:
        return self._model.config.norm_placement == "after"

    def _product(self, stream: Stream, rows: Rows, **options: Any) -> Array:
        return normed_product(stream, rows, self._model.config.norm_eps, interpret=self._interpret, **options)

    def _added(self, stream: Stream, inputs: Array, rows: Rows, norm: Any, then: Array | None) -> Stream:
        found = added_product(stream, inputs, rows, self._model.config.norm_eps, then=then, interpret=self._interpret)
        return found.waiting_for(norm) if self._norms_after else found


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


def _softmax_recall(attention: Any, queries: Array, source: softmax.KVCache, texts: int) -> Array:
    """Likewise over a source; several texts may be translations of one."""
    shape, sources = attention.shape, len(source.valid)
    q = queries[:texts].reshape(sources, -1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    out = softmax.attend(q, source.k, source.v, source.valid[:, None, :], shape.query_scale)
    return tiles.factors(out.reshape(texts, -1))


def stream_of(x: Float[Array, "b e"], *, parts: int, ready: float | None = None) -> Stream:
    """What the first layer reads; `ready`: as it is, through a norm with this ε that finds nothing to do."""
    filled = jnp.pad(x, [(0, -len(x) % tiles.TEXTS), (0, 0)])
    numbers = filled.astype(jnp.float32).reshape(len(filled), parts, -1)
    if ready is None:
        return Stream(tiles.factors(x), numbers.sum(2), (numbers**2).sum(2))
    nothing = jnp.zeros(numbers.shape[:2], jnp.float32)
    return Stream(tiles.factors(x), nothing, nothing + (1 - ready) * numbers.shape[2])


def layer_of(block: Block, waits_for: Any = None) -> Layer:
    """A block's matrices; where norms come after, what it reads `waits_for` the one of the layer before."""
    attention, cross, feed, width = block.attention, _cross(block), block.feedforward, block.attention.shape.width
    heads = [_matrix(linear, width) for linear in (attention.query, attention.key, attention.value)]
    together = Matrix(*(jnp.concatenate(arrays) for arrays in zip(*heads)))
    norms = [block.attention_norm, *([] if cross is None else [block.cross_norm]), block.feedforward_norm]
    first, *others, last = [waits_for, *norms[:-1]] if block.norm_placement == "after" else norms
    return Layer(
        _after(first, together),
        _matrix(attention.out, -1, width),
        _after(last, _matrix(feed.up, width)),
        _matrix(feed.down, -1, width),
        None if cross is None else _after(*others, _matrix(cross.query, width)),
        None if cross is None else _matrix(cross.out, -1, width),
    )


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Matrix)


def _matrix(linear: Any, inputs: int, outputs: int = -1) -> Matrix:
    """A layer's matrix, an output in each row whatever heads it has, and its bias."""
    rows = linear.kernel[...].reshape(inputs, outputs).T
    return Matrix(rows, jnp.zeros(len(rows)) if linear.bias is None else linear.bias[...].reshape(-1))


def _words(embedding: PlainEmbedding) -> Matrix:
    """The output's matrix and bias, with rows that no text can want, up to a whole number of tiles."""
    rows = embedding.output_table()
    bias = jnp.zeros(len(rows)) if embedding.bias is None else embedding.bias[...]
    fill = (0, -len(rows) % 32)
    return Matrix(jnp.pad(rows, [fill, (0, 0)]), jnp.pad(bias, fill, constant_values=-jnp.inf))


def _after(norm: Any, matrix: Matrix) -> Matrix:
    """It, applied to what has only been brought to mean 0 and variance 1; or as it is."""
    if norm is None:
        return matrix
    bias = matrix.bias if norm.bias is None else matrix.bias + matrix.rows @ norm.bias[...]
    return Matrix(matrix.rows * norm.scale[...], bias)


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
        factors, moments = tiles.read_factors(x, group, here), _read_moments(sums, squares, group)
        found = tiles.product(factors, tile)
        mean, scale = _mean_and_scale(moments, width, eps)
        found = (found - mean * tile.sums) * scale + tile.bias
        found = jnp.where(tile.rows < relu_before, jnp.maximum(found, 0.0), found).astype(out.dtype)
        if in_rows:
            out[_texts(group), pl.ds(tile.first, len(tile.bias))] = found
        else:
            out[group, tiles.indices(tile.rows, outputs)] = found

    shape = (groups * tiles.TEXTS, outputs) if in_rows else (groups, tiles.TEXTS * outputs)
    shape = jax.ShapeDtypeStruct(shape, stream.x.dtype)
    return _call(normed_product, shape, (rows.count, groups), interpret)(*stream[:3], *rows, *_given(then, interpret))


def _read_moments(sums, squares, group: Array) -> list[Float[Array, "texts parts"]]:
    return [part[_texts(group), :] for part in (sums, squares)]


def _mean_and_scale(moments: list[Array], width: int, eps: float) -> tuple[Array, Array]:
    """What a norm takes away, and what it multiplies by."""
    mean, square = (parts.sum(1, keepdims=True) / width for parts in moments)
    return mean, jax.lax.rsqrt(square - mean**2 + eps)


def _texts(group: Array) -> Any:
    return pl.ds(group * tiles.TEXTS, tiles.TEXTS)


def added_product(
    stream: Stream,
    inputs: Float[Array, "groups m"],
    rows: Rows,
    eps: float,
    *,
    then: Array | None = None,
    interpret: bool = False,
) -> Stream:
    """The residual + rows · inputs + bias; inputs are factors."""
    x, width = stream.x, stream.x.shape[1] // tiles.TEXTS
    waits = stream.scale is not None

    def added_product(x, inputs, numbers, of_rows, bias, *others):
        *others, out, sums, squares = others
        norm, then = (others[:4], others[4:]) if waits else ((), others)
        here, number, group = Rows(numbers, of_rows, bias), pl.program_id(0), pl.program_id(1)
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

    part = jax.ShapeDtypeStruct((len(x) * tiles.TEXTS, rows.count), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), part, part]
    call = _call(added_product, shapes, (rows.count, len(x)), interpret)
    return Stream(*call(x, inputs, *rows, *(stream[1:] if waits else ()), *_given(then, interpret)))


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


def linear_recall(
    queries: Float[Array, "texts p"],
    source: LinearState,
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
        places = tiles.index(text % tiles.TEXTS, head * d + jnp.arange(d), heads * d)
        out[text // tiles.TEXTS, places] = found.astype(out.dtype)

    shape = jax.ShapeDtypeStruct((len(queries) // tiles.TEXTS, tiles.TEXTS * heads * d), queries.dtype)
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
        compiler_params=triton.CompilerParams(num_warps=warps or tiles.WARPS, num_stages=1),
    )
