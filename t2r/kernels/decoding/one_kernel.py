"""All layers of a language model's decoding step as one kernel (CUDA, compute capability 9.0).

The five kernels for each layer of `layer_kernels` spend most of their time on launches and on waiting for what the
kernel before has written. The kernel of `one_kernel.cu` is launched once. It is for the paper's language models, with
merged T2R attention in all layers, and for up to 16 sequences. This module packs the weights and launches it.

Thread blocks add their results in the order in which they finish, so the last bits of activations may differ from run
to run; with kernels="off" they do not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from t2r.kernels.decoding import launch
from t2r.kernels.decoding.matrices import Matrix
from t2r.kernels.decoding.support import CLUSTERS, RANKS, SHARED_MEMORY, THREADS
from t2r.kernels.decoding.support import ONE_KERNEL_SEQUENCES as SEQUENCES
from t2r.kernels.decoding.tiles import rearrange
from t2r.normalizer import Normalizer

UPDATE_BUFFERS = 3  # one_kernel.cu adds to one of them, while another is read and the third is set to zero
COUNTER_STRIDE = 32  # each rank's counter has a cache line of its own: 32 values of 4 bytes


class PackedLayers(NamedTuple):
    """All layers' weights for each thread block: matrices as tensor-core fragments, and vectors (see `_pack_layer`)."""

    head_chunks: UInt32[Array, "head_blocks layers a"]
    feed_chunks: UInt32[Array, "feed_blocks layers b"]
    head_vectors: Float[Array, "head_blocks layers c"]
    feed_vectors: Float[Array, "feed_blocks layers d"]


def units_per_cluster(feedforward: int, clusters: int) -> int:
    """How many feed-forward units a cluster computes: a multiple of 32, so the last cluster may have padding units."""
    return -(-feedforward // (32 * clusters)) * 32


def pack(
    layers: Sequence[tuple[Matrix, Matrix, Matrix, Matrix]], heads: int, features: int, clusters: int = CLUSTERS
) -> PackedLayers:
    """Packs each layer's (qkv, out, up, down), with norms folded in."""
    packed = [_pack_layer(*layer, heads, features, clusters) for layer in layers]
    return PackedLayers(*(jnp.stack(arrays, 1) for arrays in zip(*packed)))


def _pack_layer(qkv: Matrix, out: Matrix, up: Matrix, down: Matrix, heads: int, features: int, clusters: int):
    """The four arrays of `PackedLayers` for one layer, (blocks, size): a block is a rank of a cluster.

    Attention: a cluster has a head. Feed-forward: a cluster has `units_per_cluster` units. Of the first matrix of each
    (qkv, up) a rank has a slice of the inputs, of the second (out, down) a slice of the outputs.
    """
    units = units_per_cluster(len(up.bias), clusters) * clusters
    up = Matrix(*(jnp.pad(x, [(0, units - len(x)), *[(0, 0)] * (x.ndim - 1)]) for x in up))
    down = down._replace(weights=jnp.pad(down.weights, [(0, 0), (0, units - down.weights.shape[1])]))
    qkv_weights, qkv_bias = (_by_head(x, heads, features) for x in qkv)
    qkv_weights, up_weights = (x.astype(jnp.bfloat16) for x in (qkv_weights, up.weights))
    qkv_sums, up_sums = (x.sum(-1, dtype=jnp.float32) for x in (qkv_weights, up_weights))
    by_rank = (clusters, RANKS, -1)
    return (
        _concatenate(_fragments(_split_inputs(qkv_weights)), _fragments(_split_outputs(out.weights, heads))),
        _concatenate(
            _fragments(_split_inputs(up_weights.reshape(clusters, -1, up_weights.shape[1]))),
            _fragments(_split_outputs(down.weights, clusters), by_inputs=True),
        ),
        _concatenate(_repeat_for_ranks(qkv_sums), _repeat_for_ranks(qkv_bias)),
        _concatenate(
            up_sums.reshape(by_rank),
            up.bias.reshape(by_rank),
            _split_by_rank(down.bias, clusters),
            _split_by_rank(out.bias, clusters),
        ),
    )


def _by_head(x: Float[Array, "outputs *inputs"], heads: int, features: int) -> Float[Array, "heads qkv *inputs"]:
    """Brings each head's query, key and value together; x has the queries of all heads, then keys, then values."""
    first_key, first_value = heads * features, 2 * heads * features
    kinds = jnp.split(x, [first_key, first_value])
    return jnp.concatenate([kind.reshape(heads, -1, *kind.shape[1:]) for kind in kinds], 1)


def _repeat_for_ranks(vectors: Float[Array, "clusters n"]) -> Float[Array, "clusters ranks n"]:
    return jnp.repeat(vectors[:, None], RANKS, 1)


def _split_by_rank(bias: Float[Array, "n"], clusters: int) -> Float[Array, "clusters ranks n_per_rank"]:
    return jnp.repeat(bias.reshape(1, RANKS, -1), clusters, 0)


def _split_inputs(weights: Float[Array, "clusters n k"]) -> Float[Array, "clusters ranks n k_per_rank"]:
    clusters, outputs, _ = weights.shape
    sizes = dict(cluster=clusters, output=outputs, rank=RANKS, input=-1)
    return rearrange(weights, sizes, "cluster rank output input")


def _split_outputs(
    weights: Float[Array, "n k"], clusters: int
) -> Float[Array, "clusters ranks n_per_rank k_per_cluster"]:
    sizes = dict(rank=RANKS, output=-1, cluster=clusters, input=weights.shape[1] // clusters)
    return rearrange(weights, sizes, "cluster rank output input")


def _fragments(weights: Float[Array, "c r n k"], by_inputs: bool = False) -> UInt32[Array, "c r size"]:
    """Weights as threads read them, two bfloat16 values in 32 bits: 32 × 32 blocks of fragments for tensor cores.

    A fragment is 8 outputs of 32 inputs; its 32 threads, (output_quad, output_parity, input_quad), have 16 bytes each.
    Blocks are ordered by outputs, then by inputs; with `by_inputs`, by inputs, then by outputs.
    """
    clusters, ranks, outputs, inputs = weights.shape
    sizes = dict(cluster=clusters, rank=ranks)  # then the axes of an output, from coarse to fine, and of an input
    sizes |= dict(output_block=outputs // 32, output_half=2, output_quad=4, output_pair=2, output_parity=2)
    sizes |= dict(input_block=inputs // 32, input_half=2, input_quad=4, input_pair=2, input_parity=2)
    blocks = "input_block output_block" if by_inputs else "output_block input_block"
    fragment, thread = "output_half output_pair", "output_quad output_parity input_quad"
    order = f"cluster rank {blocks} {fragment} {thread} input_half input_pair input_parity"
    pairs = rearrange(weights.astype(jnp.bfloat16), sizes, order).reshape(clusters, ranks, -1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)


def _concatenate(*parts: Array) -> Array:
    """(clusters, ranks, …) arrays as one of (blocks, size), a block's parts one after the other."""
    parts = [x if x.dtype == jnp.uint32 else x.astype(jnp.float32) for x in parts]
    return jnp.concatenate([x.reshape(x.shape[0] * x.shape[1], -1) for x in parts], 1)


def run(
    x: Float[Array, "b width"],
    layers: PackedLayers,
    states: tuple[Any, ...],
    keep: Bool[Array, "b"],
    config: Any,
    normalizer: Normalizer,
) -> tuple[Float[Array, "b width"], tuple[Any, ...]]:
    """The residual stream after all layers, and the new states; those of sequences not to `keep` do not change."""
    batch, features = len(x), states[0].z.shape[-1]
    kernel = launch.compile_files("one_kernel.cu", macros=definitions(config, features, batch, normalizer))
    size = dict(blocks=CLUSTERS * RANKS, threads=THREADS, memory=SHARED_MEMORY)
    outputs = launch.call_in_place(kernel, "decode_step", *arguments(x, layers, states, keep), **size)
    return results(outputs, x.shape, states)


def arguments(x: Array, layers: PackedLayers, states: tuple[Any, ...], keep: Array) -> tuple[list, list]:
    """The arrays that the kernel reads, and those that it updates in place: its work space, and the states.

    The work space is the residual stream, `UPDATE_BUFFERS` arrays of its size, and counters.
    """
    padding = (0, SEQUENCES - len(x))
    stream = jnp.pad(x.astype(jnp.float32), [padding, (0, 0)])
    counters = COUNTER_STRIDE * RANKS
    work = jnp.pad(stream.reshape(-1), (0, UPDATE_BUFFERS * stream.size + counters))
    inputs = [*layers, jnp.pad(keep.astype(jnp.float32), padding)]
    return inputs, [work, *(array for state in states for array in (state.S, state.z))]


def results(
    updated: Sequence[Array | np.ndarray], shape: tuple[int, ...], states: tuple[Any, ...]
) -> tuple[Array | np.ndarray, tuple[Any, ...]]:
    """The residual stream, of this shape, and the new states, from the arrays that the kernel has updated."""
    work, *arrays = updated
    new_states = (state._replace(S=S, z=z) for state, S, z in zip(states, arrays[::2], arrays[1::2]))
    return work[: shape[0] * shape[1]].reshape(shape), tuple(new_states)


def definitions(
    config: Any, features: int, batch: int, normalizer: Normalizer, clusters: int = CLUSTERS
) -> dict[str, Any]:
    """The macros that one_kernel.cu is compiled with.

    Updated arrays are parameters twice, as XLA passes inputs and outputs; as they are aliased, both are the same.
    """
    layers = range(config.layers)
    parameters = ["const uint4* head_chunks", "const uint4* feed_chunks"]
    parameters += ["const HeadVectors* head_vectors", "const FeedVectors* feed_vectors", "const float* keep"]
    parameters += ["float* input_work", *(f"float* input_S{i}, float* input_z{i}" for i in layers)]
    parameters += ["float* work", *(f"float* S{i}, float* z{i}" for i in layers)]
    return dict(
        LAYERS=config.layers,
        WIDTH=config.width,
        HEADS=config.heads,
        FEATURES=features,
        HEAD_DIM=config.head_dim,
        CLUSTERS=clusters,
        UNITS=units_per_cluster(config.feedforward, clusters),
        BATCH=batch,
        NORM_EPS=f"{config.norm_eps:e}f",
        NORMALIZER_CLAMPS=int(normalizer.clamp),
        NORMALIZER_VALUE=f"{normalizer.value:e}f",
        SHARED_MEMORY=SHARED_MEMORY,
        PARAMETERS=", ".join(parameters),
        STATE_POINTERS=", ".join(f"S{i}, z{i}" for i in layers),
    )
