"""All layers of a decoding step as one kernel (CUDA, compute capability 9.0), for many architectures.

The kernel is `all_layers.cu`, which says how it works. It is compiled for the architecture at hand: this module writes
the sizes as macros and launches it, with weights that `layers_packing` has put into the order of reading.

It computes pre- or post-norm layers (layer or RMS norms), plain or gated feed-forwards, with or without biases, rotary
positions, query norms, grouped heads, and in each layer merged or plain T2R attention, Hedgehog, either of them with a
window, or softmax. In translation models, cross attention is one of these without a window, over the state of each
source.

Thread blocks add their results in the order in which they finish, so the last bits of activations may differ from run
to run; with kernels="off" they do not.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from t2r.console import say
from t2r.kernels.decoding import launch
from t2r.kernels.decoding.layers_packing import (
    REDUCED,
    ROUND_OPERANDS,
    TILE,
    PackedLayers,
    Sizes,
    features_of,
    is_hedgehog,
    kernel_layers,
    tile_order,
)
from t2r.kernels.decoding.support import Grid, grid_for

COUNTER_STRIDE = 32  # each rank's counter has a cache line of its own: 32 values of 4 bytes
CLOCK_POINTS = 15
PARTS = ("layers_plan.cuh", "layers_weights.cuh", "layers_products.cuh", "layers_attention.cuh", "all_layers.cu")
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_exact": "GELU_EXACT", "swish": "SWISH"}
MOST_MIXTURE = 30.0  # of a window's mixture above the largest exact score, as in the plain form


def run(
    x: Float[Array, "b width"],
    layers: PackedLayers,
    states: tuple[Any, ...],
    keep: Bool[Array, "b"],
    positions: Int[Array, "b"],
    model: Any,
    grid: Grid | None = None,
    *,
    sources: tuple[Any, ...] = (),
    clocks: bool = False,
) -> tuple[Float[Array, "b width"], tuple[Any, ...], Array | None]:
    """The residual stream after all layers, and the new states; those of sequences not to `keep` do not change.

    `sources` are the states of cross attention; consecutive sequences may share a source. With `clocks` also the times
    of each block in each layer, at the points MARK of all_layers.cu.
    """
    grid = grid or grid_for(model)
    source_count = len(sources[0][0]) if sources else None
    options = dict(source_count=source_count, own_lengths=have_own_lengths(states), clocks=clocks)
    kernel = compile_for(definitions(model, len(x), grid, **options))
    inputs, updated = arguments(x, layers, states, keep, positions, model, grid, sources=sources, clocks=clocks)
    size = dict(blocks=grid.blocks, threads=grid.threads, memory=grid.memory)
    outputs = launch.call_in_place(kernel, "decode_step", inputs, updated, **size)
    return results(outputs, x.shape, states, phases(model), clocks=clocks)


def phases(model: Any) -> int:
    """How many times the residual stream is added to: once for each attention and feed-forward."""
    return sum(1 + (layer.feedforward is not None) for layer in kernel_layers(model))


UPDATED = {  # the arrays of each kind of state that the kernel updates in place, and their types
    "merged": {"S": "float*", "z": "float*"},
    "linear": {"S": "float*", "z": "float*"},
    "windowed": {"S": "float*", "z": "float*", "k": "u32*", "v": "u32*", "count": "int*"},
    "softmax": {"k": "u32*", "v": "u32*", "index": "int*", "valid": "unsigned char*"},
    "cross_merged": {},
    "cross_linear": {},
    "cross_softmax": {},
}
READ = {  # the arrays of each kind of state of a source, and their types
    "cross_merged": {"S": "float*", "z": "float*"},
    "cross_linear": {"S": "float*", "z": "float*"},
    "cross_softmax": {"k": "u32*", "v": "u32*", "valid": "unsigned char*"},
}


def state_kind(state: Any) -> str:
    """The kind of attention that has this state; `linear` for both kinds that have S and z only."""
    return "softmax" if "valid" in state._fields else "windowed" if "count" in state._fields else "linear"


def arguments(
    x: Array,
    layers: PackedLayers,
    states: tuple[Any, ...],
    keep: Array,
    positions: Array,
    model: Any,
    grid: Grid,
    *,
    sources: tuple[Any, ...] = (),
    clocks: bool = False,
) -> tuple[list, list]:
    """The arrays that the kernel reads, and those that it updates in place: its work space, and the states.

    The work space is three buffers of the residual stream, 16 channels of each sequence after the other, and counters.
    """
    batch, width = x.shape
    rows = -(-batch // 16) * 16
    stream = jnp.pad(x.astype(jnp.float32), [(0, rows - batch), (0, 0)])
    stream = stream.reshape(rows, width // TILE, TILE).transpose(1, 0, 2).reshape(-1)
    work = jnp.pad(stream, (0, 2 * rows * width + COUNTER_STRIDE * grid.ranks))
    inputs = [*layers.tiles, *layers.vectors, keep.astype(jnp.float32), rotary_angles(model, positions)]
    inputs.append(jnp.array([capacity_of(states), capacity_of(sources)]))
    for source in sources:
        inputs += [getattr(source, name) for name in READ[f"cross_{state_kind(source)}"]]
    updated = [work]
    if clocks:
        updated.append(jnp.zeros(grid.blocks * len(layers.tiles) * CLOCK_POINTS, jnp.uint32))
    for state in states:
        updated += [getattr(state, name) for name in UPDATED[state_kind(state)]]
    return inputs, updated


def have_own_lengths(states: tuple[Any, ...]) -> bool:
    """Whether each sequence has a place of its own in the caches of softmax layers: see `KVCache.index`."""
    return any("valid" in state._fields and state.index.ndim for state in states)


def capacity_of(states: tuple[Any, ...]) -> int:
    """The tokens that caches have space for; 0 if there are no caches."""
    return max([state.valid.shape[1] for state in states if "valid" in state._fields], default=0)


def results(
    updated: Sequence[Array | np.ndarray],
    shape: tuple[int, ...],
    states: tuple[Any, ...],
    phases: int,
    *,
    clocks: bool = False,
) -> tuple[Array | np.ndarray, tuple[Any, ...], Array | None]:
    """The residual stream, of this shape, the new states, and the times, from the arrays that the kernel updates."""
    work, *arrays = updated
    (batch, width), rows = shape, -(-shape[0] // 16) * 16
    first = phases % 3 * rows * width
    stream = work[first : first + rows * width].reshape(width // TILE, rows, TILE)
    stream = stream.transpose(1, 0, 2).reshape(rows, width)[:batch]
    times = arrays.pop(0) if clocks else None
    new_states = []
    for state in states:
        names = UPDATED[state_kind(state)]
        new_states.append(state._replace(**{name: arrays.pop(0) for name in names}))
    return stream, tuple(new_states), times


def rotaries(model: Any) -> list[Any]:
    """The different rotary positions of layers."""
    found = []
    for block in model.blocks:
        rotary = block.attention.shape.rotary
        if rotary is not None and rotary not in found:
            found.append(rotary)
    return found


def rotary_angles(model: Any, positions: Int[Array, "b"]) -> Float[Array, "tables b 2 pairs"]:
    """Cosines and sines of each sequence's rotation."""
    tables = []
    for rotary in rotaries(model):
        frequency = jnp.asarray(rotary.frequencies(model.config.head_dim), jnp.float32)
        angle = positions[:, None].astype(jnp.float32) * frequency
        tables.append(jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1) * rotary.gain)
    return jnp.stack(tables) if tables else jnp.zeros((1, len(positions), 2, 1))


def definitions(
    model: Any,
    batch: int,
    grid: Grid | None = None,
    *,
    source_count: int | None = None,
    own_lengths: bool = False,
    clocks: bool = False,
) -> dict[str, Any]:
    """The macros that all_layers.cu is compiled with.

    The sequences of a batch share `source_count` sources; None: each has its own. Updated arrays are parameters twice,
    as XLA passes inputs and outputs; as they are aliased, both are the same.
    """
    grid = grid or grid_for(model)
    config, sizes = model.config, Sizes.of(model, batch, grid)
    layers, tables = kernel_layers(model), rotaries(model)
    attentions = [layer.attention for layer in layers]
    windows = {(attention.window, attention.sinks) for attention in attentions if attention.kind == "windowed"}
    window, sinks = windows.pop() if windows else (1, 0)
    normalizers = {attention.normalizer for attention in attentions if attention.kind in ("linear", "merged")}
    clamps, value = normalizers.pop() if normalizers else (True, 1.0)
    hedgehog = any(map(is_hedgehog, attentions))
    inputs = [f"const Fragment* weights{i}" for i in range(len(layers))]
    inputs += [f"const Vectors* vectors{i}" for i in range(len(layers))]
    inputs += ["const float* keep", "const float* angles", "const int* capacity"]
    updated, pointers = ["float* {}work"] + ["u32* {}clocks"] * clocks, []
    for number, (kind, attention, *_) in enumerate(layers):
        names = UPDATED[kind]
        updated += [f"{type} {{}}{name}{number}" for name, type in names.items()]
        own = {name: f"{name}{number}" for name in names}
        if kind in READ:
            inputs += [f"const {type} {name}{number}" for name, type in READ[kind].items()]
            own = {name: f"({type}){name}{number}" for name, type in READ[kind].items()}
        arrays = [own.get(name, own.get("index", "0") if name == "count" else "0") for name in STATE_FIELDS]
        table = -1 if attention.shape.rotary is None else tables.index(attention.shape.rotary)
        room = tile_order(sizes, kind).shape[1] // sizes.chunk_tiles
        fields = [kind.upper(), table, features_of(attention), f"weights{number}", room, f"vectors{number}", *arrays]
        pointers.append(f"{{{', '.join(map(str, fields))}}}")
    parameters = inputs + [text.format("input_") for text in updated] + [text.format("") for text in updated]
    rotated = {2 * len(rotary.frequencies(config.head_dim)) for rotary in tables}
    macros = dict(
        LAYERS=len(layers),
        BATCH=batch,
        SHARING=batch // (source_count or batch),
        TRANSLATES=int(sizes.translates),
        OWN_LENGTHS=int(own_lengths),
        WIDTH=config.width,
        KV_HEADS=sizes.kv_heads,
        QUERIES=sizes.queries,
        HEAD_PARTS=sizes.head_parts,
        HEAD_DIM=sizes.head_dim,
        FEATURES=sizes.features,
        FEEDFORWARD=sizes.units,
        CLUSTERS=grid.clusters,
        RANKS=grid.ranks,
        WARPS=grid.warps,
        SHARED_MEMORY=grid.memory,
        MOST_SLOTS=grid.slots,
        INT8=int(sizes.int8),
        CHUNK_TILES=sizes.chunk_tiles,
        OUTPUTS_AT_ONCE=sizes.outputs_at_once,
        LARGE=int(sizes.large),
        REDUCED=REDUCED,
        ROUND_OPERANDS=ROUND_OPERANDS,
        GATED=int(config.gated),
        ACTIVATION=ACTIVATIONS[config.activation],
        RMS_NORM=int(config.norm == "rms"),
        NORMS_AFTER=int(config.norm_placement == "after"),
        NORM_EPS=f"{config.norm_eps:e}f",
        QUERY_NORM=int(config.query_norm),
        QUERY_SCALE=f"{config.head_dim**-0.5:.9e}f",
        HEDGEHOG=int(hedgehog),
        MAP_QUERY_SCALE="1.f" if hedgehog else "QUERY_SCALE",
        NORMALIZER_CLAMPS=int(clamps),
        NORMALIZER_VALUE=f"{value:e}f",
        MOST_QKV=sizes.qkv_most,
        HAS_MERGED=int(any(kind.endswith("merged") for kind in sizes.kinds)),
        PADDED=int(any(features_of(attention) not in (0, sizes.features) for attention in attentions)),
        HAS_WINDOW=int("windowed" in sizes.kinds),
        HAS_SOFTMAX=int(any(kind.endswith("softmax") for kind in sizes.kinds)),
        WINDOW_SLOTS=window + sinks,
        SINKS=sinks,
        MOST_MIXTURE=f"{MOST_MIXTURE:e}f",
        ROTARY_TABLES=max(1, len(tables)),
        ROTATED=rotated.pop() if rotated else 0,
        PARAMETERS=", ".join(parameters),
        LAYER_POINTERS=", ".join(pointers),
    )
    return macros | (dict(CLOCK_POINTS=CLOCK_POINTS) if clocks else {})


STATE_FIELDS = ("S", "z", "k", "v", "count", "valid")  # of the struct `Layer`


def fits(model: Any, batch: int) -> bool:
    """Whether the kernel compiles for a model; one line says if it does not, because shared memory is too small."""
    try:
        compile_for(definitions(model, batch))
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
        say(f"decoding this model without kernels: {lines[0].strip()}")
        return False
    return True


def compile_for(macros: dict[str, Any]) -> str:
    """PTX for these macros."""
    return launch.compile_files(*PARTS, macros=macros, rounded_division=True)
