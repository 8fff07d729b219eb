"""A decoding step in few kernels: five for each layer, three more where it attends to a source (Pallas: Triton, GPU).

A decoding step is small. As plain JAX it is some fifteen kernels for each layer, most of which take longer to launch
than to run. `layer_kernels` fuses them: a norm and the product after it are one kernel, a product and its addition to
the residual stream another, and the recurrent step between them a third. `one_kernel` computes all layers at once, for
the paper's language model; then only the kernels of the vocabulary remain. `all_layers` does so for many architectures.

The kernels of each layer are for norms before or after, plain feed-forwards, and softmax or merged T2R attention
without rotary positions. The result equals the model's own step, which is the one to read.

A norm is part of the product that reads it. With norms after, a layer's sum is stored without its norm, which is then
pending: the next product and the next addition to the residual stream each apply it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2r.kernels.decoding import all_layers, layers_packing, one_kernel, reorder, tiles
from t2r.kernels.decoding.layer_kernels import (
    ResidualStream,
    added_product,
    greedy_token,
    initial_stream,
    linear_recall,
    linear_step,
    normed_product,
)
from t2r.kernels.decoding.matrices import Matrix, fold_norm, matrix_of
from t2r.kernels.decoding.support import cross_attention
from t2r.kernels.decoding.tiles import PackedMatrix, pack

MOST_ELEMENTS = 2**31  # of an array: Triton's indices are 32-bit integers


class LayerMatrices(NamedTuple):
    """The matrices of a layer, plain or packed."""

    qkv: Matrix | PackedMatrix  # queries, keys, values; for merged T2R φ(q), φ(k), values
    out: Matrix | PackedMatrix
    up: Matrix | PackedMatrix
    down: Matrix | PackedMatrix
    cross_query: Matrix | PackedMatrix | None  # queries, or φ(q); None: there is no source
    cross_out: Matrix | PackedMatrix | None


class PackedModel(NamedTuple):
    """A model's matrices, in the layout that the kernels read."""

    layers: tuple[LayerMatrices, ...] | one_kernel.PackedLayers | layers_packing.PackedLayers
    vocabulary: PackedMatrix | None  # None: the model's own embedding computes the greedy token


def pack_model(model: Any, kernels: str = "layers", batch: int = 1) -> PackedModel:
    """A copy of the weights that a step reads, for the kernels that `support.choice` names and batches of this size."""
    if kernels == "all":
        return PackedModel(layers_packing.pack(model, batch), None)
    dtype, config = jnp.dtype(model.config.dtype), model.config
    has_kernel = not config.adaptive_cutoffs and config.vocab_size * config.width < MOST_ELEMENTS
    vocabulary = pack(_vocabulary_matrix(model.embedding), dtype) if has_kernel else None
    layers, pending_norm = [], None
    for block in model.blocks:
        layers.append(layer_matrices(block, pending_norm))
        pending_norm = block.feedforward_norm
    if kernels == "one":
        features = model.blocks[0].attention.key.kernel.shape[2]
        return PackedModel(one_kernel.pack([layer[:4] for layer in layers], config.heads, features), vocabulary)
    packed = (jax.tree.map(lambda x: pack(x, dtype), layer, is_leaf=_is_matrix) for layer in layers)
    return PackedModel(tuple(packed), vocabulary)


class FusedModel:
    """A model that decodes by the kernels; its state is the model's own."""

    def __init__(self, model: Any, packed: PackedModel, *, interpret: bool = False):
        self._model, self._packed, self._interpret = model, packed, interpret

    def __call__(self, tokens: Int[Array, "b 1"], *, state: Any, mask: Bool[Array, "b 1"] | None = None):
        """Equals the model's own call, for one token of each sequence."""
        model, norm = self._model, self._model.final_norm
        mask = jnp.ones(tokens.shape, bool) if mask is None else mask
        x = model.embed(tokens, state.position[:, None] + mask - 1)[:, 0]
        by_kernels = {one_kernel.PackedLayers: self._by_one_kernel, layers_packing.PackedLayers: self._by_all_layers}
        x, layer_states = by_kernels.get(type(self._packed.layers), self._by_layers)(x, state, mask)
        x = x if norm is None else norm(x)
        return x[:, None], state._replace(layers=layer_states, position=state.position + mask[:, 0])

    def _by_one_kernel(self, x: Array, state: Any, mask: Array) -> tuple[Array, tuple[Any, ...]]:
        config, normalizer = self._model.config, self._model.blocks[0].attention.normalizer
        out, layer_states = one_kernel.run(x, self._packed.layers, state.layers, mask[:, 0], config, normalizer)
        return out.astype(x.dtype), layer_states

    def _by_all_layers(self, x: Array, state: Any, mask: Array) -> tuple[Array, tuple[Any, ...]]:
        positions = state.position + mask[:, 0] - 1
        arguments = (x, self._packed.layers, state.layers, mask[:, 0], positions, self._model)
        out, layer_states, _ = all_layers.run(*arguments, sources=state.source or ())
        out = self._model.blocks[-1].feedforward_norm(out) if self._norms_after else out
        return out.astype(x.dtype), layer_states

    def _by_layers(self, x: Array, state: Any, mask: Array) -> tuple[Array, tuple[Any, ...]]:
        model, layers, batch = self._model, self._packed.layers, len(x)
        eps = model.config.norm_eps if self._norms_after else None
        stream, layer_states = initial_stream(x, parts=layers[0].out.tile_count, identity_eps=eps), []
        sources, next_layers = state.source or [None] * len(layers), [*layers[1:], None]
        for block, layer, past, source, next_layer in zip(model.blocks, layers, state.layers, sources, next_layers):
            next_matrix = self._first_matrix(next_layer)
            stream, past = self._self_attention(block, layer, stream, past, mask)
            stream = stream if source is None else self._cross_attention(block, layer, stream, source, batch)
            stream = self._feedforward(block, layer, stream, next_matrix)
            layer_states.append(past)
        x = tiles.unpack_activations(stream.x)[:batch]
        return model.blocks[-1].feedforward_norm(x) if self._norms_after else x, tuple(layer_states)

    @property
    def embedding(self) -> Any:
        return self._model.embedding

    def logits(self, hidden: Array) -> Array:
        return self._model.logits(hidden)

    def greedy_token(self, hidden: Float[Array, "b width"]) -> Int[Array, "b"]:
        if self._packed.vocabulary is None:
            return self._model.greedy_token(hidden)
        packed = tiles.pack_activations(hidden)
        return greedy_token(packed, self._packed.vocabulary, interpret=self._interpret)[: len(hidden)]

    def reorder(self, state: Any, parents: Int[Array, "sequences"], beams: int) -> Any:
        """Equals the model's own; in place, where the kernel of all layers runs."""
        arrays, structure = jax.tree.flatten((state.layers, state.position))
        moved = [index for index, array in enumerate(arrays) if array.ndim]
        in_place = isinstance(self._packed.layers, layers_packing.PackedLayers)
        if not in_place or not reorder.fits([arrays[index] for index in moved], beams):
            return self._model.reorder(state, parents, beams)
        for index, array in zip(moved, reorder.reorder([arrays[index] for index in moved], parents, beams)):
            arrays[index] = array
        layers, position = jax.tree.unflatten(structure, arrays)
        return state._replace(layers=layers, position=position)

    def _first_matrix(self, layer: LayerMatrices | None) -> Array | None:
        """The first matrix that a layer reads; after the last layer (None), that of the vocabulary."""
        matrix = self._packed.vocabulary if layer is None else layer.qkv
        return None if matrix is None else matrix.tiles

    # The branches of a layer. Each kernel prefetches what the next one reads; the last one, the next layer's matrix.

    def _self_attention(
        self, block: Any, layer: LayerMatrices, stream: ResidualStream, past: Any, mask: Array
    ) -> tuple[ResidualStream, Any]:
        attention, out = block.attention, layer.out.tiles
        is_linear = attention.kind == "merged"
        features = attention.shape.heads * past.z.shape[-1] if is_linear else 0
        prefetched = past.S if is_linear else out
        projected = self._product(stream, layer.qkv, relu_outputs=2 * features, unpacked=True, prefetched=prefetched)
        if is_linear:
            options = dict(prefetched=out, interpret=self._interpret)
            attended, past = linear_step(projected, past, mask[:, 0], attention.normalizer, **options)
        else:
            attended, past = _softmax_step(attention, projected, past, mask)
        next_matrix = (layer.cross_query or layer.up).tiles
        return self._added(stream, attended, layer.out, block.attention_norm, next_matrix), past

    def _cross_attention(
        self, block: Any, layer: LayerMatrices, stream: ResidualStream, source: Any, batch: int
    ) -> ResidualStream:
        attention, out = block.cross, layer.cross_out.tiles
        is_linear = attention.kind == "merged"
        relu_outputs, prefetched = (len(layer.cross_query.bias), source.S) if is_linear else (0, out)
        queries = self._product(
            stream, layer.cross_query, relu_outputs=relu_outputs, unpacked=True, prefetched=prefetched
        )
        if is_linear:
            options = dict(prefetched=out, interpret=self._interpret)
            attended = linear_recall(queries, source, batch, attention.normalizer, **options)
        else:
            attended = _softmax_recall(attention, queries, source, batch)
        return self._added(stream, attended, layer.cross_out, block.cross_norm, layer.up.tiles)

    def _feedforward(
        self, block: Any, layer: LayerMatrices, stream: ResidualStream, next_matrix: Array | None
    ) -> ResidualStream:
        hidden = self._product(stream, layer.up, relu_outputs=len(layer.up.bias), prefetched=layer.down.tiles)
        return self._added(stream, hidden, layer.down, block.feedforward_norm, next_matrix)

    @property
    def _norms_after(self) -> bool:
        return self._model.config.norm_placement == "after"

    def _product(self, stream: ResidualStream, matrix: PackedMatrix, **options: Any) -> Array:
        return normed_product(stream, matrix, self._model.config.norm_eps, interpret=self._interpret, **options)

    def _added(
        self, stream: ResidualStream, inputs: Array, matrix: PackedMatrix, norm: Any, prefetched: Array | None
    ) -> ResidualStream:
        eps, options = self._model.config.norm_eps, dict(prefetched=prefetched, interpret=self._interpret)
        stream = added_product(stream, inputs, matrix, eps, **options)
        return stream.with_pending_norm(norm) if self._norms_after else stream


def _softmax_step(attention: Any, projected: Array, past: Any, mask: Array) -> tuple[Array, Any]:
    """Softmax attention over the cache, by the model's own functions; the output is packed."""
    shape = attention.shape
    q, k, v = jnp.split(
        projected[: len(mask)].reshape(len(mask), 1, -1, shape.head_dim),
        [shape.heads, shape.heads + shape.kv_heads],
        axis=2,
    )
    q = q.reshape(len(mask), 1, shape.kv_heads, -1, shape.head_dim)
    out, past = attention.attend_cached(q, k, v, past, mask)
    return tiles.pack_activations(out.reshape(len(mask), -1)), past


def _softmax_recall(attention: Any, queries: Array, source: Any, batch: int) -> Array:
    """Softmax attention over the source, by the model's own functions; consecutive sequences may share a source."""
    shape, sources = attention.shape, len(source.valid)
    q = queries[:batch].reshape(sources, -1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    out = attention.attend_state(q, source)
    return tiles.pack_activations(out.reshape(batch, -1))


def layer_matrices(block: Any, pending_norm: Any = None) -> LayerMatrices:
    """A layer's matrices, with its norms folded into them.

    With norms after, the norms to fold in are those of the branches before: `pending_norm` is the previous layer's.
    """
    attention, cross, feedforward = block.attention, cross_attention(block), block.feedforward
    width = attention.shape.width
    projections = [matrix_of(linear, width) for linear in (attention.query, attention.key, attention.value)]
    qkv = Matrix(*(jnp.concatenate(arrays) for arrays in zip(*projections)))
    norms = [block.attention_norm, *([] if cross is None else [block.cross_norm]), block.feedforward_norm]
    if block.norm_placement == "after":
        norms = [pending_norm, *norms[:-1]]
    return LayerMatrices(
        fold_norm(norms[0], qkv),
        matrix_of(attention.out, -1, width),
        fold_norm(norms[-1], matrix_of(feedforward.up, width)),
        matrix_of(feedforward.down, -1, width),
        None if cross is None else fold_norm(norms[1], matrix_of(cross.query, width)),
        None if cross is None else matrix_of(cross.out, -1, width),
    )


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Matrix)


def _vocabulary_matrix(embedding: Any) -> Matrix:
    """The output embedding and its bias, padded to whole tiles by tokens with a logit of -inf."""
    weights = embedding.output_table()
    bias = jnp.zeros(len(weights)) if embedding.bias is None else embedding.bias[...]
    padding = (0, -len(weights) % tiles.MOST_OUTPUTS_PER_TILE)
    return Matrix(jnp.pad(weights, [padding, (0, 0)]), jnp.pad(bias, padding, constant_values=-jnp.inf))
