"""A language model's whole decoding step, up to its words, as one kernel (CUDA, compute capability 9.0).

Five kernels for each layer, as `fused` has them, spend most of their time on starting, and on waiting for what the one
before has written. The kernel of `one_kernel.cu` starts once. It is for what the paper's language models are, all
layers T2R with merged maps, and for up to 16 texts. Here is what it reads, and how it is called.

Blocks of threads add up in the order in which they come, so the last bits of a text's numbers may differ from run to
run; with kernels="off" they never do.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from t2r.kernels.decoding import cuda
from t2r.kernels.decoding.support import FEEDERS, MEMORY, RANKS, THREADS
from t2r.kernels.decoding.support import ONE_KERNEL_TEXTS as TEXTS
from t2r.kernels.decoding.tiles import Matrix
from t2r.normalizer import Normalizer


class PackedLayers(NamedTuple):
    """What blocks of threads read of all layers: matrices as fragments, and what belongs to their rows."""

    head_chunks: UInt32[Array, "head_blocks layers a"]
    feed_chunks: UInt32[Array, "feed_blocks layers b"]
    head_rows: Float[Array, "head_blocks layers c"]
    feed_rows: Float[Array, "feed_blocks layers d"]


def units(feedforward: int, feeders: int) -> int:
    """Of the feed-forward that are a cluster's; some of the last may be nobody's."""
    return -(-feedforward // (32 * feeders)) * 32


def pack(
    layers: Sequence[tuple[Matrix, Matrix, Matrix, Matrix]], heads: int, features: int, feeders: int = FEEDERS
) -> PackedLayers:
    """Each layer's queries, keys and values as one, output projection, and feed-forward up and down."""
    packed = [_pack_layer(*layer, heads, features, feeders) for layer in layers]
    return PackedLayers(*(jnp.stack(arrays, 1) for arrays in zip(*packed)))


def _pack_layer(projections: Matrix, out: Matrix, up: Matrix, down: Matrix, heads: int, features: int, feeders: int):
    """Divided among clusters (the first axis) and their ranks (the second)."""
    count = units(len(up.bias), feeders) * feeders
    up = Matrix(*(jnp.pad(x, [(0, count - len(x)), *[(0, 0)] * (x.ndim - 1)]) for x in up))
    down = down._replace(rows=jnp.pad(down.rows, [(0, 0), (0, count - down.rows.shape[1])]))
    of_heads = [
        jnp.concatenate([part.reshape(heads, -1, *part.shape[1:]) for part in jnp.split(x, _kinds(heads, features))], 1)
        for x in projections
    ]
    rows, up_rows = (x.astype(jnp.bfloat16) for x in (of_heads[0], up.rows))
    sums, up_sums = (x.sum(-1, dtype=jnp.float32) for x in (rows, up_rows))
    units_of = (feeders, RANKS, -1)
    return (
        _together(_fragments(_columns(rows)), _fragments(_outputs(out.rows, heads))),
        _together(
            _fragments(_columns(up_rows.reshape(feeders, -1, up_rows.shape[1]))),
            _fragments(_outputs(down.rows, feeders), by_columns=True),
        ),
        _together(_of_all_ranks(sums), _of_all_ranks(of_heads[1])),
        _together(
            up_sums.reshape(units_of),
            up.bias.reshape(units_of),
            _slices(down.bias, feeders),
            _slices(out.bias, feeders),
        ),
    )


def _kinds(heads: int, features: int) -> list[int]:
    """Where keys begin, and values."""
    return [heads * features, 2 * heads * features]


def _of_all_ranks(of_rows: Float[Array, "clusters n"]) -> Float[Array, "clusters ranks n"]:
    return jnp.repeat(of_rows[:, None], RANKS, 1)


def _slices(bias: Float[Array, "n"], clusters: int) -> Float[Array, "clusters ranks n/ranks"]:
    return jnp.repeat(bias.reshape(1, RANKS, -1), clusters, 0)


def _columns(rows: Float[Array, "clusters n k"]) -> Float[Array, "clusters ranks n k/ranks"]:
    return rows.reshape(*rows.shape[:2], RANKS, -1).swapaxes(1, 2)


def _outputs(rows: Float[Array, "n k"], clusters: int) -> Float[Array, "clusters ranks n/ranks k/clusters"]:
    return rows.reshape(RANKS, -1, clusters, rows.shape[1] // clusters).transpose(2, 0, 1, 3)


def _fragments(rows: Float[Array, "c r n k"], by_columns: bool = False) -> UInt32[Array, "c r size"]:
    """Rows 4t + 2b + e of 16 as tensor cores take them, 8 at once, and four columns of a thread side by side.

    After 32 rows come the next 32 columns of these, or `by_columns` the next rows.
    """
    c, r, n, k = rows.shape
    apart = rows.astype(jnp.bfloat16).reshape(c, r, n // 32, 2, 4, 2, 2, k // 32, 2, 4, 2, 2)
    #       cluster, rank, 32 rows, 16 rows, t, b, e, 32 columns, 16 columns, thread, pair, column → as it is read
    order = (7, 2) if by_columns else (2, 7)
    pairs = apart.transpose(0, 1, *order, 3, 5, 4, 6, 9, 8, 10, 11).reshape(c, r, -1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)


def _together(*parts: Array) -> Array:
    """What is a block's, one after the other."""
    parts = [x if x.dtype == jnp.uint32 else x.astype(jnp.float32) for x in parts]
    return jnp.concatenate([x.reshape(x.shape[0] * x.shape[1], -1) for x in parts], 1)


def take_step(
    x: Float[Array, "b width"],
    blocks: PackedLayers,
    states: tuple[Any, ...],
    keep: Bool[Array, "b"],
    config: Any,
    normalizer: Normalizer,
) -> tuple[Float[Array, "b width"], tuple[Any, ...]]:
    """The stream after all layers, and the states; those of texts not to `keep` stay as they are."""
    texts, features = len(x), states[0].z.shape[-1]
    kernel = _compiled(tuple(definitions(config, features, texts, normalizer).items()))
    given, changed = arguments(x, blocks, states, keep)
    call = jax.ffi.ffi_call(
        "__gpu$xla.gpu.ptx",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed],
        input_output_aliases={len(given) + index: index for index in range(len(changed))},
    )
    size = dict(grid_x=FEEDERS * RANKS, grid_y=1, grid_z=1, block_x=THREADS, block_y=1, block_z=1)
    launch = {name: np.int32(number) for name, number in dict(size, shared_mem_bytes=MEMORY).items()}
    found = call(*given, *changed, name="decode_step", kernel_type="ptx", kernel_data=kernel, **launch)
    return results(found, x.shape, states)


def arguments(x: Array, blocks: PackedLayers, states: tuple[Any, ...], keep: Array) -> tuple[list, list]:
    """What the kernel reads, and what it changes: its work space, which begins with the stream, and states."""
    fill = (0, TEXTS - len(x))
    stream = jnp.pad(x.astype(jnp.float32), [fill, (0, 0)])
    counters = 32 * RANKS  # a cache line for each rank
    work = jnp.pad(stream.reshape(-1), (0, 3 * stream.size + counters))  # and three changes of it
    given = [*blocks, jnp.pad(keep.astype(jnp.float32), fill)]
    return given, [work, *(array for state in states for array in (state.S, state.z))]


def results(changed: Sequence[Array], shape: tuple[int, ...], before: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
    """The stream, and the states, from what the kernel has changed."""
    work, *arrays = changed
    states = (state._replace(S=S, z=z) for state, S, z in zip(before, arrays[::2], arrays[1::2]))
    return work[: shape[0] * shape[1]].reshape(shape), tuple(states)


def definitions(
    config: Any, features: int, texts: int, normalizer: Normalizer, feeders: int = FEEDERS
) -> dict[str, Any]:
    numbers = range(config.layers)
    pointers = ["const uint4* head_chunks", "const uint4* feed_chunks"]
    pointers += ["const HeadRows* head_rows", "const FeedRows* feed_rows", "const float* keep"]
    pointers += ["float* work_before", *(f"float* S{i}_before, float* z{i}_before" for i in numbers)]
    pointers += ["float* work", *(f"float* S{i}, float* z{i}" for i in numbers)]
    return dict(
        LAYERS=config.layers,
        WIDTH=config.width,
        HEADS=config.heads,
        FEATURES=features,
        HEAD=config.head_dim,
        FEEDERS=feeders,
        UNITS=units(config.feedforward, feeders),
        BATCH=texts,
        EPSILON=f"{config.norm_eps:e}f",
        CLAMP=int(normalizer.clamp),
        LEAST=f"{normalizer.value:e}f",
        MEMORY=MEMORY,
        POINTERS=", ".join(pointers),
        STATES=", ".join(f"S{i}, z{i}" for i in numbers),
    )


def source(*names: str) -> str:
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


@functools.cache
def _compiled(defined: tuple[tuple[str, Any], ...]) -> str:
    options = ["--gpu-architecture=compute_90", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in defined]
    return cuda.compile_cuda(source("hopper.cuh", "one_kernel.cu"), options)
