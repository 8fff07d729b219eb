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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2r.kernels.decoding import one_kernel, tiles
from t2r.kernels.decoding.layer_kernels import (
    ResidualStream,
    added_product,
    greedy_token,
    linear_recall,
    linear_step,
    normed_product,
    stream_of,
)
from t2r.kernels.decoding.support import cross_attention
from t2r.kernels.decoding.tiles import Matrix, PackedMatrix, pack


class Layer(NamedTuple):
    """Its matrices, plain or packed."""

    projections: Matrix | PackedMatrix  # queries, keys, values; of merged T2R φ(q), φ(k), values
    out: Matrix | PackedMatrix
    up: Matrix | PackedMatrix
    down: Matrix | PackedMatrix
    cross: Matrix | PackedMatrix | None  # queries, or φ(q); None: there is no source
    cross_out: Matrix | PackedMatrix | None


class Packed(NamedTuple):
    """A model's matrices, in the order in which the kernels read them."""

    layers: tuple[Layer, ...] | one_kernel.PackedLayers
    words: PackedMatrix | None  # None: the model's own embedding says which is likeliest


def pack_model(model: Any, *, as_one: bool = False) -> Packed:
    """All that a step reads of it, once more; `as_one`: for one kernel of all layers."""
    dtype, config = jnp.dtype(model.config.dtype), model.config
    plain = not config.adaptive_cutoffs and config.vocab_size * config.width < 2**31  # as Triton counts
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

    def __init__(self, model: Any, packed: Packed, *, interpret: bool = False):
        self._model, self._packed, self._interpret = model, packed, interpret

    def __call__(self, tokens: Int[Array, "b 1"], *, state: Any, mask: Bool[Array, "b 1"]):
        """As the model itself, for one token of each text."""
        model, norm = self._model, self._model.final_norm
        x = model.embed(tokens, state.position[:, None] + mask - 1)[:, 0]
        as_one = isinstance(self._packed.layers, one_kernel.PackedLayers)
        x, pasts = (self._as_one if as_one else self._by_layers)(x, state, mask)
        x = x if norm is None else norm(x)
        return x[:, None], state._replace(layers=pasts, position=state.position + mask[:, 0])

    def _as_one(self, x: Array, state: Any, mask: Array) -> tuple[Array, tuple[Any, ...]]:
        config, normalizer = self._model.config, self._model.blocks[0].attention.normalizer
        out, pasts = one_kernel.take_step(x, self._packed.layers, state.layers, mask[:, 0], config, normalizer)
        return out.astype(x.dtype), pasts

    def _by_layers(self, x: Array, state: Any, mask: Array) -> tuple[Array, tuple[Any, ...]]:
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

    def logits(self, hidden: Array) -> Array:
        return self._model.logits(hidden)

    def greedy_token(self, hidden: Float[Array, "b width"]) -> Int[Array, "b"]:
        if self._packed.words is None:
            return self._model.greedy_token(hidden)
        return greedy_token(tiles.factors(hidden), self._packed.words, interpret=self._interpret)[: len(hidden)]

    def _first_matrix(self, layer: Layer | None) -> Array | None:
        """Of a layer, or of what comes after the last."""
        rows = self._packed.words if layer is None else layer.projections
        return None if rows is None else rows.tiles

    # The branches of a layer. Each kernel asks for what the next one reads, the last for the next layer's first matrix.

    def _attend(
        self, block: Any, layer: Layer, stream: ResidualStream, past: Any, mask: Array
    ) -> tuple[ResidualStream, Any]:
        attention, out = block.attention, layer.out.tiles
        is_linear = attention.kind == "merged"
        features = attention.shape.heads * past.z.shape[-1] if is_linear else 0
        ahead, kernel = past.S if is_linear else out, dict(then=out, interpret=self._interpret)
        projected = self._product(stream, layer.projections, relu_before=2 * features, in_rows=True, then=ahead)
        if is_linear:
            attended, past = linear_step(projected, past, mask[:, 0], attention.normalizer, **kernel)
        else:
            attended, past = _softmax_step(attention, projected, past, mask)
        then = (layer.cross or layer.up).tiles
        return self._added(stream, attended, layer.out, block.attention_norm, then), past

    def _see(self, block: Any, layer: Layer, stream: ResidualStream, source: Any, texts: int) -> ResidualStream:
        attention, out = block.cross, layer.cross_out.tiles
        is_linear = attention.kind == "merged"
        relu_before, ahead = (len(layer.cross.bias), source.S) if is_linear else (0, out)
        queries = self._product(stream, layer.cross, relu_before=relu_before, in_rows=True, then=ahead)
        if is_linear:
            kernel = dict(then=out, interpret=self._interpret)
            seen = linear_recall(queries, source, texts, attention.normalizer, **kernel)
        else:
            seen = _softmax_recall(attention, queries, source, texts)
        return self._added(stream, seen, layer.cross_out, block.cross_norm, layer.up.tiles)

    def _feed(self, block: Any, layer: Layer, stream: ResidualStream, then: Array | None) -> ResidualStream:
        hidden = self._product(stream, layer.up, relu_before=len(layer.up.bias), then=layer.down.tiles)
        return self._added(stream, hidden, layer.down, block.feedforward_norm, then)

    @property
    def _norms_after(self) -> bool:
        return self._model.config.norm_placement == "after"

    def _product(self, stream: ResidualStream, rows: PackedMatrix, **options: Any) -> Array:
        return normed_product(stream, rows, self._model.config.norm_eps, interpret=self._interpret, **options)

    def _added(
        self, stream: ResidualStream, inputs: Array, rows: PackedMatrix, norm: Any, then: Array | None
    ) -> ResidualStream:
        found = added_product(stream, inputs, rows, self._model.config.norm_eps, then=then, interpret=self._interpret)
        return found.waiting_for(norm) if self._norms_after else found


def _softmax_step(attention: Any, projected: Array, past: Any, mask: Array) -> tuple[Array, Any]:
    """The transformer's attention, by its own functions."""
    shape = attention.shape
    q, k, v = jnp.split(
        projected[: len(mask)].reshape(len(mask), 1, -1, shape.head_dim),
        [shape.heads, shape.heads + shape.kv_heads],
        axis=2,
    )
    q = q.reshape(len(mask), 1, shape.kv_heads, -1, shape.head_dim)
    out, past = attention.attend_cached(q, k, v, past, mask)
    return tiles.factors(out.reshape(len(mask), -1)), past


def _softmax_recall(attention: Any, queries: Array, source: Any, texts: int) -> Array:
    """Likewise over a source; several texts may be translations of one."""
    shape, sources = attention.shape, len(source.valid)
    q = queries[:texts].reshape(sources, -1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    out = attention.attend_state(q, source)
    return tiles.factors(out.reshape(texts, -1))


def layer_of(block: Any, waits_for: Any = None) -> Layer:
    """A block's matrices; where norms come after, what it reads `waits_for` the one of the layer before."""
    attention, cross, feed, width = (
        block.attention,
        cross_attention(block),
        block.feedforward,
        block.attention.shape.width,
    )
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


def _words(embedding: Any) -> Matrix:
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
