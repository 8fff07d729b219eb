"""Which models the decoding kernels can run, and where. Loads nothing of Pallas."""

from typing import Any

import jax

from t2r.kernels.decoding import cuda
from t2r.kernels.support import is_one_device, is_power_of_two

MOST_TEXTS = 64  # with more at once, products are large enough to be worth a launch
TEXTS = 16  # of one product
WARPS = 8  # of a program
COLUMNS = 1024  # that it multiplies at once
PROGRAMS = 128  # at least, if there are rows enough: about as many as a GPU has multiprocessors

# The kernel of all layers, `one_kernel.cu`: its launch, and what it is compiled for.
ONE_KERNEL_TEXTS, RANKS, THREADS = 16, 8, 320
FEEDERS = 15  # clusters that divide the feed-forward: as many as an H200 has room for
MEMORY = 227 * 1024  # bytes that a block of threads can have: all of a multiprocessor's


def cross_attention(block: Any) -> Any:
    """A decoder layer's attention over the source; None if it has none."""
    return getattr(block, "cross", None)


def suits(model: Any) -> bool:
    """Whether all layers are of kinds that the kernels of each layer know."""
    config = model.config
    inputs = (config.width, config.feedforward, config.heads * config.head_dim)
    crosses = [cross_attention(block) for block in model.blocks]
    return (
        (config.norm, config.activation) == ("layer", "relu")
        and config.norm_placement in ("before", "after")
        and not (config.gated or config.parallel or config.query_norm or config.positions == "rotary")
        and all(_is_known(block.attention) for block in model.blocks)
        and all(cross is None or _is_known(cross, cross=True) for cross in crosses)
        and is_power_of_two(config.width, 32 * WARPS)
        and all(is_power_of_two(size, 32 * WARPS) or size % COLUMNS == 0 for size in inputs)
    )


def _is_known(attention: Any, *, cross: bool = False) -> bool:
    shape = attention.shape
    projections = [attention.query] if cross else [attention.query, attention.key, attention.value]
    fit = sum(linear.kernel.shape[1] * linear.kernel.shape[2] for linear in projections) % 32 == 0
    if attention.kind != "merged":
        return fit and attention.kind == "softmax"
    powers = all(is_power_of_two(size, 4) for size in (attention.key.kernel.shape[2], shape.head_dim))
    return fit and powers and shape.heads == shape.kv_heads


def available(model: Any, batch: int) -> bool:
    """Whether the kernels of each layer run here: on one NVIDIA GPU, for small batches in bfloat16."""
    config = model.config
    here = "NVIDIA" in jax.devices()[0].device_kind and is_one_device()
    return config.kernels != "off" and here and batch <= MOST_TEXTS and config.dtype == "bfloat16" and suits(model)


def suits_one_kernel(model: Any) -> bool:
    """Of models that `suits` accepts, those that the kernel of all layers is written for: the paper's T2R models."""
    config, attentions = model.config, [block.attention for block in model.blocks]
    if config.norm_placement != "before" or config.encoder_layers:
        return False
    if not all(attention.kind == "merged" for attention in attentions):
        return False
    kinds = {(attention.key.kernel.shape[2], attention.normalizer) for attention in attentions}
    sizes = (config.width, config.heads, config.head_dim, config.feedforward)
    return len(kinds) == 1 and kinds.pop()[0] == 32 and sizes == (1024, 8, 128, 4096) and config.layers <= 64


def one_kernel_available(model: Any, batch: int) -> bool:
    """Whether the kernel of all layers runs here, for a model whose layers have kernels: on an H100 or H200."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    if batch > ONE_KERNEL_TEXTS or not suits_one_kernel(model) or capability != "9.0":
        return False
    return cuda.clusters_at_once(RANKS, THREADS, MEMORY) >= FEEDERS
