"""The weights of the kernel of all layers, in the order in which each thread block reads them.

`Sizes` says which block computes what; it must agree with layers_plan.cuh. A layer's matrices are cut into tiles, which
are dealt to warps; its vectors become the struct `Vectors` of each block.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from t2r.integers import quantise
from t2r.kernels.decoding.matrices import Matrix, fold_norm, matrix_of
from t2r.kernels.decoding.support import Grid, cross_attention, grid_for, in_8_bits

TILE = 16  # outputs and inputs of a tile
MOST_CHUNK_TILES = 8  # of a chunk, which is loaded at once; 8-bit weights: twice as many, which are as many bytes
MOST_CHUNKS = 12  # of a warp and layer; with more, layers are LARGE
REDUCED = 4  # tiles whose sums are added up at once
LEAST_EXPONENT = -1e30  # of features that are padding
ROUND_OPERANDS = 32  # 16 channels of 16 sequences each: those that a thread has registers for


class PackedLayers(NamedTuple):
    """For each layer the matrices of all warps of all thread blocks as tiles, and the vectors of blocks.

    The tiles of large layers have the chunks as first axis: what warps read at about the same time is together.
    """

    tiles: tuple[Array, ...]  # (blocks * warps, chunks, chunk_tiles * TILE²), or chunks first; bfloat16 or int8
    vectors: tuple[Array, ...]  # (blocks, size) float32


class Layer(NamedTuple):
    """What the kernel calls a layer: attention and the feed-forward after it.

    In translation, cross attention comes between them, and is a layer of its own: causal attention then has no
    feed-forward. The norms are of what attention and feed-forward read; None: there is none.
    """

    kind: str  # of the attention, as in `enum Kind`
    attention: Any
    attention_norm: Any
    feedforward: Any
    feedforward_norm: Any


def kernel_layers(model: Any) -> list[Layer]:
    """The layers of a model. One with cross attention is two."""
    layers, stream_norm = [], None
    for block in model.blocks:
        cross, feedforward = cross_attention(block), block.feedforward
        norms = [block.attention_norm, *([] if cross is None else [block.cross_norm]), block.feedforward_norm]
        if block.norm_placement == "after":  # then what the first attention reads has the norm of the layer before
            norms, stream_norm = [stream_norm, *norms[:-1]], norms[-1]
        if cross is None:
            layers.append(Layer(block.attention.kind, block.attention, norms[0], feedforward, norms[1]))
        else:
            layers.append(Layer(block.attention.kind, block.attention, norms[0], None, None))
            layers.append(Layer(f"cross_{cross.kind}", cross, norms[1], feedforward, norms[2]))
    return layers


class Sizes(NamedTuple):
    """The architecture, as the kernel sees it."""

    width: int
    kv_heads: int
    queries: int  # query heads for each key/value head
    head_parts: int  # clusters that share a key/value head and its queries, in layers that are not softmax
    head_dim: int
    features: int  # the most of all layers, padded to whole tiles
    gated: bool
    units: int  # of the feed-forward, padded to whole tiles for each rank of a cluster
    kinds: tuple[str, ...]  # of each layer's attention
    grid: Grid
    groups: int  # of 16 sequences
    int8: bool  # the type of the weights

    @classmethod
    def of(cls, model: Any, batch: int, grid: Grid) -> "Sizes":
        config, layers = model.config, kernel_layers(model)
        features = max(1, *(features_of(layer.attention) for layer in layers))
        rank_units = grid.ranks * (8 if config.gated else TILE)
        queries = config.heads // config.kv_heads
        parts = (n for n in range(queries, 0, -1) if queries % n == 0 and n * config.kv_heads <= grid.clusters)
        return cls(
            config.width,
            config.kv_heads,
            queries,
            next(parts, 1),
            config.head_dim,
            -(-features // TILE) * TILE,
            config.gated,
            -(-config.feedforward // rank_units) * rank_units,
            tuple(layer.kind for layer in layers),
            grid,
            -(-batch // 16),
            in_8_bits(model),
        )

    @property
    def unit_tile(self) -> int:
        """Feed-forward units of a tile; with gates, each has two outputs."""
        return 8 if self.gated else TILE

    # What is called a head here is a key/value head with its queries, or one of `head_parts` of it, with some of them.

    def parts(self, kind: str) -> int:
        return 1 if kind.endswith("softmax") else self.head_parts

    def all_heads(self, kind: str) -> int:
        return self.kv_heads * self.parts(kind)

    def queries_of(self, kind: str) -> int:
        """The query heads of each head."""
        return self.queries // self.parts(kind)

    @property
    def most_queries(self) -> int:
        """The query heads of each head, in the layers that have most."""
        return max(map(self.queries_of, self.kinds))

    def attended(self, kind: str) -> int:
        """Attention outputs for each head."""
        return self.queries_of(kind) * self.head_dim

    def qkv(self, kind: str) -> int:
        """Outputs of the projections for each head."""
        queries = self.queries_of(kind)
        sizes = {
            "merged": (queries + 1) * self.features + self.head_dim,
            "cross_merged": queries * self.features,
            "cross_linear": queries * self.head_dim,
            "cross_softmax": queries * self.head_dim,
        }
        return sizes.get(kind, (queries + 2) * self.head_dim)

    @property
    def qkv_most(self) -> int:
        """Outputs of the projections in the layers that have most."""
        return max(map(self.qkv, self.kinds))

    @property
    def translates(self) -> bool:
        return any(kind.startswith("cross") for kind in self.kinds)

    def has_units(self, kind: str) -> bool:
        """Whether a layer has a feed-forward."""
        return kind.startswith("cross") or not self.translates

    @property
    def up_tiles(self) -> list[int]:
        """Tiles of feed-forward units of each rank, by cluster; those with more are last, because others have heads."""
        rows, clusters = self.units // (self.unit_tile * self.grid.ranks), self.grid.clusters
        return [rows // clusters + (cluster >= clusters - rows % clusters) for cluster in range(clusters)]

    def heads(self, kind: str, cluster: int) -> list[int]:
        """The heads of a cluster. In softmax layers, clusters that would have none share those of others."""
        clusters = self.grid.clusters
        replicas = clusters // self.kv_heads
        if kind.endswith("softmax") and replicas > 1:
            return [cluster % self.kv_heads] if cluster < replicas * self.kv_heads else []
        return list(range(cluster, self.all_heads(kind), clusters))

    @property
    def most_heads(self) -> int:
        return -(-self.kv_heads * self.head_parts // self.grid.clusters)

    def dealt(self, tiles: int, rank: int) -> np.ndarray:
        """Tiles of a matrix's outputs that a rank has."""
        return np.arange(rank, tiles, self.grid.ranks)

    def most(self, tiles: int) -> int:
        return -(-tiles // self.grid.ranks)

    @property
    def chunk_tiles(self) -> int:
        """Tiles of a chunk."""
        return _chunk_tiles(self)

    @property
    def outputs_at_once(self) -> int:
        """Tiles of outputs that a warp computes together in a product that is added to the stream."""
        return _outputs_at_once(self, self.chunk_tiles)

    @property
    def large(self) -> bool:
        """Whether memory must not be idle: rings of weights hold a small part of a layer."""
        chunks = max(tile_order(self, kind).shape[1] // self.chunk_tiles for kind in self.kinds)
        return chunks > MOST_CHUNKS

    @property
    def rounds(self) -> int:
        """How many times a product with the stream reads a part of it; with several, for every REDUCED tiles again."""
        operands = -(-self.warp_steps // self.chunk_tiles) * self.chunk_tiles * self.groups
        return -(-operands // max(ROUND_OPERANDS, self.chunk_tiles * self.groups))

    @property
    def warp_steps(self) -> int:
        """Of a product with the stream, for 16 channels each."""
        return -(-self.width // TILE // self.grid.warps)

    @property
    def round_steps(self) -> int:
        """The same of a round, in whole chunks."""
        chunks = -(-self.warp_steps // self.chunk_tiles)
        return -(-chunks // self.rounds) * self.chunk_tiles


@functools.lru_cache(maxsize=16)
def _chunk_tiles(sizes: Sizes) -> int:
    """The number of tiles of a chunk with which the blocks that have a head and most units have least to do."""
    heads, units, ranks = sizes.most_heads, max(sizes.up_tiles), sizes.grid.ranks
    stream = -(-sizes.width // TILE // ranks // sizes.grid.warps)

    def cost(tiles: int) -> int:  # of all layers; waiting for a chunk takes about as long as multiplying two tiles
        chunks = 0
        for kind in sizes.kinds:
            products = heads * sizes.most(sizes.qkv(kind) // TILE) + units
            inputs = [sizes.attended(kind) // TILE] * heads + [units * ranks * sizes.unit_tile // TILE]
            outputs = _outputs_at_once(sizes, tiles)
            chunks += products * -(-sizes.warp_steps // tiles)
            chunks += stream // outputs * sum(-(-steps * outputs // tiles) for steps in inputs)
        return chunks * (tiles + 2)

    def fits(tiles: int) -> bool:  # into registers: the chunk, and the inputs that it is multiplied by
        return tiles // _outputs_at_once(sizes, tiles) <= MOST_CHUNK_TILES

    most = MOST_CHUNK_TILES * (2 if sizes.int8 else 1)
    return min(filter(fits, range(most, 2, -1)), key=cost)


def _outputs_at_once(sizes: Sizes, chunk_tiles: int) -> int:
    """2 if all warps have pairs of them: then inputs are read half as often, and less is padded."""
    pairs = (sizes.width // TILE) % (2 * sizes.grid.ranks * sizes.grid.warps) == 0
    return 2 if pairs and chunk_tiles % 2 == 0 else 1


def features_of(attention: Any) -> int:
    """The feature size of T2R or Hedgehog attention; 0 for softmax."""
    if attention.kind == "merged":
        return attention.key.kernel.shape[2]
    if attention.kind == "softmax":
        return 0
    rows = attention.feature_map.weight.shape[1]
    return 2 * rows if is_hedgehog(attention) else rows


def is_hedgehog(attention: Any) -> bool:
    """Whether φ is softmax([W x, −W x]); otherwise it is T2R's."""
    return getattr(getattr(attention, "feature_map", None), "maps_by_softmax", False)


# Packing. A layer's four matrices are cut into tiles, which have numbers: of all outputs' tiles one after the other, by
# inputs. `warp_tiles` lists those of a warp in the order of reading, which is the order of `all_layers.cu`.


class RoundedMatrix(NamedTuple):
    """scale · weights · x + bias, where the weights are bfloat16 or int8."""

    weights: Array  # (outputs, inputs)
    scale: Float[Array, "outputs"]
    bias: Float[Array, "outputs"]

    @classmethod
    def of(cls, matrix: Matrix, int8: bool) -> "RoundedMatrix":
        if not int8:
            return cls(matrix.weights.astype(jnp.bfloat16), jnp.ones(len(matrix.weights)), matrix.bias)
        return cls(*quantise(matrix.weights), matrix.bias)

    @property
    def sums(self) -> Float[Array, "outputs"]:
        """Of the weights of each output."""
        return self.weights.sum(1, dtype=jnp.float32) * self.scale


class LayerMatrices(NamedTuple):
    qkv: RoundedMatrix  # for each key/value head: its queries, key and value; of cross attention, only queries
    out: RoundedMatrix
    up: RoundedMatrix | None  # with gates, tiles of 8 units: two gates, two units, and so on
    down: RoundedMatrix | None


def pack(model: Any, batch: int, grid: Grid | None = None) -> PackedLayers:
    """A copy of all layers' weights for batches of this size."""
    sizes = Sizes.of(model, batch, grid or grid_for(model))
    tiles, vectors, norms_after = [], [], model.config.norm_placement == "after"
    for layer in kernel_layers(model):
        matrices = layer_matrices(layer, sizes)
        cut = jnp.concatenate([cut_into_tiles(matrix.weights) for matrix in matrices if matrix is not None])
        cut = jnp.pad(cut, [(0, 1), (0, 0)])  # the last tile is zero: padding
        if sizes.int8:
            cut ^= jnp.int8(-128)  # 128 more, as bytes: the kernel makes numbers of them in fewer instructions
        order = tile_order(sizes, layer.kind)
        chunks = order.reshape(len(order), -1, sizes.chunk_tiles)
        chunks = chunks.swapaxes(0, 1) if sizes.large else chunks
        tiles.append(cut[chunks].reshape(*chunks.shape[:2], -1))
        vectors.append(pack_vectors(layer, matrices, sizes, norms_after))
    return PackedLayers(tuple(tiles), tuple(vectors))


def layer_matrices(layer: Layer, sizes: Sizes) -> LayerMatrices:
    """A layer's matrices, with norms folded in."""
    qkv = fold_norm(layer.attention_norm, projections(layer, sizes))
    out, up, down = matrix_of(layer.attention.out, -1, sizes.width), None, None
    if layer.feedforward is not None:
        up, down = feedforward_matrices(layer.feedforward, sizes)
        up = fold_norm(layer.feedforward_norm, up)
    rounded = (None if x is None else RoundedMatrix.of(x, sizes.int8) for x in (qkv, out, up, down))
    return LayerMatrices(*rounded)


def projections(layer: Layer, sizes: Sizes) -> Matrix:
    """Of each head its queries, key and value, or φ of them; φ is padded to `sizes.features`."""
    attention, is_cross = layer.attention, layer.kind.startswith("cross")
    linears = [attention.query] if is_cross else [attention.query, attention.key, attention.value]
    parts = []
    for linear in linears:
        part = Matrix(*(x.reshape(*linear.kernel.shape[1:], *x.shape[1:]) for x in matrix_of(linear, sizes.width)))
        if layer.kind.endswith("merged") and linear is not getattr(attention, "value", None):
            extra = sizes.features - part.bias.shape[1]
            part = Matrix(*(jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)]) for x in part))
        repeats = 1 if linear is attention.query else sizes.parts(layer.kind)  # parts of a head have the same key
        count = sizes.all_heads(layer.kind) // repeats
        part = (jnp.repeat(x.reshape(count, -1, *x.shape[2:]), repeats, 0) for x in part)
        parts.append(Matrix(*part))
    return Matrix(*(jnp.concatenate(arrays, 1).reshape(-1, *arrays[0].shape[2:]) for arrays in zip(*parts)))


def feedforward_matrices(feedforward: Any, sizes: Sizes) -> tuple[Matrix, Matrix]:
    """Up, with gates beside their units, and down; padded to `sizes.units`."""
    width = sizes.width
    extra = sizes.units - feedforward.down.kernel.shape[0]
    pad = lambda x: jnp.pad(x, [(0, extra), *[(0, 0)] * (x.ndim - 1)])  # noqa: E731
    up = Matrix(*map(pad, matrix_of(feedforward.up, width)))
    if sizes.gated:
        gate = Matrix(*map(pad, matrix_of(feedforward.gate, width)))
        pairs = lambda x: x.reshape(-1, 2, *x.shape[1:])  # noqa: E731
        up = Matrix(*(jnp.stack([pairs(g), pairs(u)], 1).reshape(-1, *u.shape[1:]) for g, u in zip(gate, up)))
    down = matrix_of(feedforward.down, -1, width)
    return up, down._replace(weights=pad(down.weights.T).T)


def cut_into_tiles(weights: Num[Array, "n k"]) -> Num[Array, "tiles size"]:
    """Tiles of 16 outputs × 16 inputs, by outputs, then by inputs; each of 32 threads has 8 consecutive values.

    Thread (a, b, c) has inputs 4c to 4c + 3 of outputs 4a + b and 4a + 2 + b.
    """
    outputs, inputs = weights.shape
    axes = weights.reshape(outputs // TILE, 4, 2, 2, inputs // TILE, 4, 4)  # (tile, a, half, b, tile, c, input)
    return axes.transpose(0, 4, 1, 3, 5, 2, 6).reshape(-1, TILE * TILE)


@functools.lru_cache(maxsize=16)
def tile_order(sizes: Sizes, kind: str) -> Int[np.ndarray, "warps tiles"]:
    """The numbers of the tiles of each block's warps; -1 is padding."""
    blocks = itertools.product(range(sizes.grid.clusters), range(sizes.grid.ranks))
    places = itertools.product(blocks, range(sizes.grid.warps))
    warps = [np.concatenate(list(warp_tiles(sizes, kind, *block, warp))) for block, warp in places]
    most = max(map(len, warps))
    return np.stack([np.pad(tiles, (0, most - len(tiles)), constant_values=-1) for tiles in warps])


def warp_tiles(sizes: Sizes, kind: str, cluster: int, rank: int, warp: int) -> Iterator[Int[np.ndarray, "n"]]:
    """The numbers of a warp's tiles, in the order of reading.

    Of n warps it has every n-th 16 channels in a product with the stream; in the others, every n-th tile of outputs.
    The tiles of outputs that are computed together are padded to whole chunks.
    """
    steps, warps = sizes.width // TILE, sizes.grid.warps
    stream, own_steps = sizes.dealt(steps, rank)[warp::warps], np.arange(warp, steps, warps)
    qkv_tiles, head_steps, unit_steps = sizes.qkv(kind) // TILE, sizes.attended(kind) // TILE, sizes.units // TILE
    heads = sizes.all_heads(kind)
    first_out = heads * qkv_tiles * steps
    first_up = first_out + steps * heads * head_steps
    first_down = first_up + sizes.units // sizes.unit_tile * steps
    for head in sizes.heads(kind, cluster):
        own = sizes.dealt(qkv_tiles, rank)
        yield from stream_tiles(sizes, (head * qkv_tiles + own) * steps, own_steps)
        rows = first_out + stream * (heads * head_steps)
        yield from operand_tiles(sizes, rows, head * head_steps + np.arange(head_steps))
    if not sizes.has_units(kind):
        yield np.zeros(0, int)  # it may have none
        return
    count = sizes.up_tiles[cluster]
    before = sum(sizes.up_tiles[:cluster]) * sizes.grid.ranks  # tiles of the clusters before
    own = before + rank * count + np.arange(count)
    yield from stream_tiles(sizes, first_up + own * steps, own_steps)
    cluster_steps = before * sizes.unit_tile // TILE + np.arange(count * sizes.grid.ranks * sizes.unit_tile // TILE)
    yield from operand_tiles(sizes, first_down + stream * unit_steps, cluster_steps)
    yield np.zeros(0, int)  # it may have none


def stream_tiles(
    sizes: Sizes, rows: Int[np.ndarray, "n"], steps: Int[np.ndarray, "k"]
) -> Iterator[Int[np.ndarray, "tiles"]]:
    """Tiles at `rows` (each the number of its first) and `steps`, of a product with the stream, in whole chunks."""
    at_once = REDUCED if sizes.rounds > 1 else max(1, len(rows))
    for first in range(0, len(rows), at_once):
        for begin in range(0, sizes.rounds * sizes.round_steps, sizes.round_steps):
            for row in rows[first : first + at_once]:
                yield padded(row + steps[begin : begin + sizes.round_steps], sizes.round_steps)


def operand_tiles(
    sizes: Sizes, rows: Int[np.ndarray, "n"], steps: Int[np.ndarray, "k"]
) -> Iterator[Int[np.ndarray, "tiles"]]:
    """The same of a product whose outputs are added to the stream."""
    outputs = sizes.outputs_at_once
    for first in range(0, len(rows), outputs):
        tiles = (rows[first : first + outputs] + steps[:, None]).reshape(-1)  # of these outputs in turn
        yield padded(tiles, -(-len(tiles) // sizes.chunk_tiles) * sizes.chunk_tiles)


def padded(tiles: Int[np.ndarray, "n"], size: int) -> Int[np.ndarray, "size"]:
    return np.pad(tiles, (0, size - len(tiles)), constant_values=-1)


def pack_vectors(layer: Layer, matrices: LayerMatrices, sizes: Sizes, norms_after: bool) -> Float[Array, "blocks size"]:
    """The struct `Vectors` of all_layers.cu for each block."""
    sources = vector_sources(layer, matrices, sizes)
    lengths = tuple((name, len(vector)) for name, vector in sources.items())
    order = vector_order(sizes, layer.kind, lengths, norms_after)
    return jnp.concatenate([vector.astype(jnp.float32) for vector in sources.values()])[order]


def vector_sources(layer: Layer, matrices: LayerMatrices, sizes: Sizes) -> dict[str, Array]:
    """The vectors of a layer, whole."""
    heads = [head_vectors(layer, sizes, head) for head in range(sizes.all_heads(layer.kind))]
    sources = dict(zero=jnp.zeros(1), heads=jnp.concatenate(heads))
    for name in ("qkv", "up"):
        matrix = getattr(matrices, name)
        if matrix is not None:
            sources |= {f"{name}_sums": matrix.sums, f"{name}_bias": matrix.bias, f"{name}_scale": matrix.scale}
    for name, norm in (("out", layer.attention_norm), ("down", layer.feedforward_norm)):
        matrix = getattr(matrices, name)
        if matrix is None:
            continue
        scale, bias = jnp.ones(sizes.width), jnp.zeros(sizes.width)
        if norm is not None:
            scale, bias = norm.scale[...], bias if getattr(norm, "bias", None) is None else norm.bias[...]
        sources |= {f"{name}_bias": matrix.bias, f"{name}_scale": matrix.scale}
        sources |= {f"{name}_norm": scale, f"{name}_norm_bias": bias}
    return sources


@functools.lru_cache(maxsize=16)
def vector_order(
    sizes: Sizes, kind: str, lengths: tuple[tuple[str, int], ...], norms_after: bool
) -> Int[np.ndarray, "blocks size"]:
    """Where each value of the struct `Vectors` of each block is in the concatenation of `vector_sources`."""
    starts = dict(zip((name for name, _ in lengths), np.cumsum([0] + [length for _, length in lengths])))
    head_size = dict(lengths)["heads"] // sizes.all_heads(kind)
    qkv_tiles, stream_tiles = sizes.qkv(kind) // TILE, sizes.width // TILE
    most_qkv, most_stream, ranks = sizes.most(sizes.qkv_most // TILE), sizes.most(stream_tiles), sizes.grid.ranks

    def padding(count: int) -> np.ndarray:
        return np.zeros(count, int)  # the source of zeros is first

    def of_tiles(name: str, tiles: np.ndarray, most: int) -> np.ndarray:
        own = starts.get(name, 0) + (tiles[:, None] * TILE + np.arange(TILE)).reshape(-1)
        return np.concatenate([own, padding((most - len(tiles)) * TILE)])

    def scale_of(name: str, tiles: np.ndarray, most: int) -> list[np.ndarray]:
        return [of_tiles(f"{name}_scale", tiles, most) if sizes.int8 else padding(4)]

    def of_outputs(name: str, tiles: np.ndarray, most: int) -> list[np.ndarray]:  # the struct `Outputs`
        vectors = [of_tiles(f"{name}_{vector}", tiles, most) for vector in ("sums", "bias")]
        return vectors + scale_of(name, tiles, most)

    outputs_size = sum(map(len, of_outputs("qkv", np.arange(0), most_qkv)))
    rows = []
    for cluster in range(sizes.grid.clusters):
        count, before, heads = (
            sizes.up_tiles[cluster],
            sum(sizes.up_tiles[:cluster]) * ranks,
            sizes.heads(kind, cluster),
        )
        for rank in range(ranks):
            parts = []
            for head in heads:
                own = head * qkv_tiles + sizes.dealt(qkv_tiles, rank)
                parts += of_outputs("qkv", own, most_qkv)
                parts.append(starts["heads"] + head * head_size + np.arange(head_size))
            parts.append(padding((sizes.most_heads - len(heads)) * (outputs_size + head_size)))
            own = before + rank * count + np.arange(count)
            parts += of_outputs("up", own if sizes.has_units(kind) else np.arange(0), max(sizes.up_tiles))
            for name in ("out", "down"):
                absent = name == "down" and not sizes.has_units(kind)
                stream = np.arange(0) if absent else sizes.dealt(stream_tiles, rank)
                parts += [of_tiles(f"{name}_bias", stream, most_stream), *scale_of(name, stream, most_stream)]
                for vector in (f"{name}_norm", f"{name}_norm_bias"):
                    parts += [of_tiles(vector, stream, most_stream)] * norms_after + [padding(4)]
            rows.append(np.concatenate(parts))
    return np.stack(rows)


def head_vectors(layer: Layer, sizes: Sizes, head: int) -> Float[Array, "n"]:
    """The rest of the struct `HeadVectors`: φ, the scales of query norms, and the mixture of a window."""
    attention, dim, features, most = layer.attention, sizes.head_dim, sizes.features, sizes.most_queries
    kv_head = head // sizes.parts(layer.kind)
    extra = features - features_of(attention)  # φ is padded by features that are always zero
    pairs, map_bias = jnp.zeros(dim // 2 * features), jnp.zeros(features)
    scales = [jnp.ones(dim), jnp.ones(dim)]
    mixture = [jnp.zeros(most * dim), jnp.zeros(-(-most // 4) * 4)]
    if attention.kind in ("linear", "windowed"):
        phi = attention.feature_map
        weight = phi.weight[...][kv_head]  # (features, dim)
        if is_hedgehog(attention):
            weight = phi.input_scale * jnp.concatenate([weight, -weight])
            map_bias = jnp.where(jnp.arange(features) < len(weight), 0.0, LEAST_EXPONENT)
        else:
            map_bias = jnp.pad(phi.bias[...][kv_head], (0, extra))
        weight = jnp.pad(weight.astype(jnp.bfloat16), [(0, extra), (0, 0)])
        pairs = jax.lax.bitcast_convert_type(weight.reshape(features, dim // 2, 2), jnp.float32).T.reshape(-1)
    if attention.kind != "merged" and attention.shape.norm_eps is not None:
        scales = [norm.scale[...] for norm in (attention.query_norm, attention.key_norm)]
    if attention.kind == "windowed":
        own = (
            x[...].reshape(sizes.all_heads(layer.kind), -1)[head]
            for x in (attention.mixture.weight, attention.mixture.bias)
        )
        mixture = [jnp.pad(vector, (0, len(space) - len(vector))) for vector, space in zip(own, mixture)]
    return jnp.concatenate([x.astype(jnp.float32) for x in (pairs, map_bias, *scales, *mixture)])
