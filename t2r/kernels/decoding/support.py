"""Which models and GPUs have decoding kernels, and the sizes these are written for. Does not import Pallas."""

import functools
from typing import Any, NamedTuple

from t2r.console import say
from t2r.kernels.decoding import cuda
from t2r.kernels.support import HOPPER, Device, gpu_has_kernels, is_one_device, is_power_of_two, this_device

# The kernels of each layer, `layer_kernels.py`.
MOST_SEQUENCES = 64  # in larger batches, products are large enough to be worth a launch each
SEQUENCES_PER_GROUP = 16  # sequences that tensor cores multiply at once; a batch is padded to whole groups
WARPS = 8  # of a program
INPUTS_PER_PART = 1024  # inputs (columns of a matrix) that a program multiplies at once
LEAST_PROGRAMS = 128  # per product, if it has enough outputs: about as many as a GPU has multiprocessors

# The kernel of all layers, `one_kernel.cu`. It runs as clusters of thread blocks, one block on each multiprocessor. A
# block's number within its cluster is its rank. Each cluster computes a share of the feed-forward units.
ONE_KERNEL_SEQUENCES = 16  # in a batch, at most
RANKS = 8  # blocks in a cluster: the most that CUDA guarantees
THREADS = 320  # of a block: nine warps that compute, one that loads
CLUSTERS = 15  # as many as run on an H200 at once
SHARED_MEMORY = 227 * 1024  # bytes per block: all that a multiprocessor has
ONE_KERNEL_FEATURES = 32
ONE_KERNEL_SIZES = (1024, 8, 128, 4096)  # width, heads, head_dim, feedforward of the paper's language model
ONE_KERNEL_LAYERS = 64  # at most; each adds four pointers to the kernel's parameters


# The kernel of all layers for many architectures, `all_layers.cu`; also in clusters of blocks.
ALL_LAYERS_SEQUENCES = 32  # in a batch, at most
# Where it is used without being asked for (results/NOTES.md): it was measured to be faster than XLA with layers of 7 MB
# and of 121 MB; and with 4 softmax layers of 30, each of which takes two thirds of XLA's time.
FASTER_LAYER_BYTES = 128 * 2**20
FASTER_SOFTMAX_SHARE = 1 / 3


class Grid(NamedTuple):
    """How many thread blocks of the kernel of all layers run, and how much shared memory each has."""

    clusters: int = CLUSTERS
    ranks: int = RANKS  # blocks of a cluster
    warps: int = 8  # of a block
    memory: int = SHARED_MEMORY
    slots: int = 64  # of a warp's ring of weights, at most

    @property
    def blocks(self) -> int:
        return self.clusters * self.ranks

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps


def grid_for(model: Any) -> Grid:
    """More and smaller clusters where there are more heads than clusters: none should compute two, one by one."""
    grid = Grid()
    smaller = Grid(2 * grid.clusters, grid.ranks // 2)
    return smaller if grid.clusters < model.config.kv_heads <= smaller.clusters else grid


def cross_attention(block: Any) -> Any:
    """A decoder layer's attention over the source; None if it has none."""
    return getattr(block, "cross", None)


def suits(model: Any) -> bool:
    """Whether the kernels of each layer can compute all layers of this model."""
    config = model.config
    inputs = (config.width, config.feedforward, config.heads * config.head_dim)
    crosses = [cross_attention(block) for block in model.blocks]
    return (
        (config.norm, config.activation) == ("layer", "relu")
        and config.norm_placement in ("before", "after")
        and not (config.gated or config.parallel or config.query_norm or config.positions == "rotary")
        and all(_suits_attention(block.attention) for block in model.blocks)
        and all(cross is None or _suits_attention(cross, cross=True) for cross in crosses)
        and is_power_of_two(config.width, 32 * WARPS)
        and all(is_power_of_two(size, 32 * WARPS) or size % INPUTS_PER_PART == 0 for size in inputs)
    )


def _suits_attention(attention: Any, *, cross: bool = False) -> bool:
    shape = attention.shape
    projections = [attention.query] if cross else [attention.query, attention.key, attention.value]
    fit = sum(linear.kernel.shape[1] * linear.kernel.shape[2] for linear in projections) % 32 == 0
    if attention.kind != "merged":
        return fit and attention.kind == "softmax"
    powers = all(is_power_of_two(size, 4) for size in (attention.key.kernel.shape[2], shape.head_dim))
    return fit and powers and shape.heads == shape.kv_heads


def available(model: Any, batch: int, device: Device | None = None) -> bool:
    """Whether the kernels of each layer run this model: on one NVIDIA GPU, in bfloat16, for small batches."""
    config = model.config
    on_gpu = gpu_has_kernels(config.kernels, device or this_device()) and is_one_device()
    return on_gpu and batch <= MOST_SEQUENCES and config.dtype == "bfloat16" and suits(model)


def suits_one_kernel(model: Any) -> bool:
    """Whether a model that `suits` accepts is one that the kernel of all layers is written for: the paper's T2R LM."""
    config, attentions = model.config, [block.attention for block in model.blocks]
    if config.norm_placement != "before" or config.encoder_layers:
        return False
    if not all(attention.kind == "merged" for attention in attentions):
        return False
    kinds = {(attention.key.kernel.shape[2], attention.normalizer) for attention in attentions}
    if len(kinds) != 1 or kinds.pop()[0] != ONE_KERNEL_FEATURES:
        return False
    sizes = (config.width, config.heads, config.head_dim, config.feedforward)
    return sizes == ONE_KERNEL_SIZES and config.layers <= ONE_KERNEL_LAYERS


def all_layers_problems(model: Any) -> list[str]:
    """Why the kernel of all layers for many architectures cannot compute this model's layers; [] if it can."""
    config, attentions, specs = model.config, [block.attention for block in model.blocks], model.config.attention
    recurrent = [spec for spec in (*specs, *config.cross_attention) if spec.kind != "softmax"]
    windows = {(spec.window, spec.sinks) for spec in recurrent if spec.kind == "windowed"}
    maps = {spec.feature_map for spec in recurrent}
    rotated = {len(a.shape.rotary.frequencies(config.head_dim)) for a in attentions if a.shape.rotary is not None}
    problems = {
        "cross attention has query norms": config.encoder_layers and config.query_norm,
        f"norm_placement={config.norm_placement!r}": config.norm_placement not in ("before", "after"),
        "its branches are parallel": config.parallel,
        "its query norms are over all heads": config.query_norm and config.query_norm_heads,
        "a feature map is neither T2R's nor Hedgehog's": maps - {"t2r", "hedgehog"},
        "layers have different feature maps": len(maps) > 1,
        "softmax layers have a window": any(spec.window for spec in specs if spec.kind == "softmax"),
        "layers have different windows": len(windows) > 1,
        "layers have rotary positions of different sizes": len(rotated) > 1,
        "head_dim is above 256": config.head_dim > 256,
        f"it has more than {ONE_KERNEL_LAYERS} layers": config.layers > ONE_KERNEL_LAYERS,
        "width is not a multiple of 16": config.width % 16,
        "head_dim is not a multiple of 16": config.head_dim % 16,
        "a feature size is not a multiple of 4": any((spec.features or 0) % 4 for spec in recurrent),
    }
    return [problem for problem, holds in problems.items() if holds]


def all_layers_slower(config: Any) -> list[str]:
    """Why XLA is at least as fast for this model as the kernel of all layers, or may be; [] if the kernel is faster."""
    attention = config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
    feedforward = config.width * config.feedforward * (3 if config.gated else 2)
    kinds = [spec.kind for spec in (*config.attention, *config.cross_attention)]
    problems = []
    if 2 * (attention + feedforward) > FASTER_LAYER_BYTES:  # in bfloat16
        problems.append(f"a layer has more than {FASTER_LAYER_BYTES >> 20} MiB of weights")
    if kinds.count("softmax") > FASTER_SOFTMAX_SHARE * len(kinds):
        problems.append("more than a third of its attention is softmax")
    return [f"{problem}, with which XLA may be faster (kernels=on: a kernel all the same)" for problem in problems]


def in_8_bits(model: Any) -> bool:
    """Whether a model's matrices are integers of 8 bits, each row with a scale: see `t2r.model.rows`."""
    return getattr(model, "weights", None) == "int8"


def all_layers_available(model: Any, batch: int, device: Device | None = None) -> bool:
    """Whether the kernel of all layers for many architectures runs this model: on an H100 or H200, in bfloat16.

    On such a GPU, one line says why it does not.
    """
    config, device = model.config, device or this_device()
    if not gpu_has_kernels(config.kernels, device) or device.capability != HOPPER:
        return False
    reasons = why_not_all_layers(model, batch)
    if reasons:
        _say_once(f"decoding this model without kernels: {', '.join(reasons)}")
    return not reasons


def why_not_all_layers(model: Any, batch: int) -> list[str]:
    """Why that kernel is not used on an H100 or H200; [] if it is."""
    config = model.config
    problems = all_layers_problems(model) + (all_layers_slower(config) if config.kernels == "auto" else [])
    if batch > ALL_LAYERS_SEQUENCES:
        problems.append(f"the batch has more than {ALL_LAYERS_SEQUENCES} sequences")
    if config.dtype != "bfloat16":
        problems.append(f"it computes in {config.dtype}, not in bfloat16")
    if not is_one_device():
        problems.append("it is on several devices")
    grid = grid_for(model)
    if not problems and cuda.clusters_at_once(grid.ranks, grid.threads, grid.memory) < grid.clusters:
        problems.append("NVRTC is missing or newer than the driver, or the GPU runs too few blocks at once")
    return problems


@functools.cache
def _say_once(text: str) -> None:
    say(text)


def choice(model: Any, batch: int) -> str | None:
    """The decoding kernels for a model: "one" or "all", one kernel of all layers; "layers", some for each; None."""
    if in_8_bits(model) or not available(model, batch):
        return "all" if all_layers_available(model, batch) else None
    if one_kernel_available(model, batch):
        return "one"
    # Both can compute it. In translation the kernel of all layers is faster (results/NOTES.md).
    faster = model.config.encoder_layers and this_device().capability == HOPPER and not why_not_all_layers(model, batch)
    return "all" if faster else "layers"


def one_kernel_available(model: Any, batch: int) -> bool:
    """Whether the kernel of all layers runs a model for which `available` is true: on an H100 or H200."""
    if batch > ONE_KERNEL_SEQUENCES or not suits_one_kernel(model) or this_device().capability != HOPPER:
        return False
    return cuda.clusters_at_once(RANKS, THREADS, SHARED_MEMORY) >= CLUSTERS
