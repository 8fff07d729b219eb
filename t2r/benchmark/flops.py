"""Floating-point operations a model's definition asks for, and what devices can do: the two sides of utilisation."""

import jax

from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.loss import Batch

# Dense bfloat16 operations per second of one device, as its maker states them, by a part of JAX's name for it. A
# device of TPU v2 and v3 is one of a chip's two cores.
PEAK = {
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "TPU v2": 22.5e12, "TPU v3": 61.5e12, "TPU v4": 275e12,
    "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}  # fmt: skip


def peak(device: jax.Device) -> float | None:
    """What a device can do at most; None if it is not in the table."""
    return next((value for name, value in PEAK.items() if name in device.device_kind), None)


def training_flops(config: ModelConfig, batch: Batch) -> float:
    """Operations of one step's forward and backward pass (twice the forward) on a batch of this shape.

    Products only. Causal attention counts the half it needs; of an adaptive softmax only the first band counts, which
    every token needs; dropped layers count.
    """
    rows, targets = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    total = targets * _output(config)
    feedforward = (3 if config.gated else 2) * config.width * config.feedforward
    for spec in config.attention:
        total += targets * (_projections(config) + feedforward) + _attention(config, spec, targets, targets) / 2
    if config.encoder_layers:
        sources = batch.source.shape[1]
        for spec in config.cross_attention:
            total += (targets + sources) / 2 * _projections(config) + _attention(config, spec, targets, sources)
        encoder = sources * (_projections(config) + feedforward) + _attention(config, AttentionSpec(), sources, sources)
        total += config.encoder_layers * encoder
    return 3 * 2 * rows * total


def _projections(config: ModelConfig) -> int:
    """Multiplications per token: queries and outputs, keys and values."""
    return 2 * config.width * config.head_dim * (config.heads + config.kv_heads)


def _attention(config: ModelConfig, spec: AttentionSpec, queries: int, keys: int) -> float:
    """Multiplications of all queries over all keys, twice those of causal attention."""
    size = config.heads * config.head_dim
    if spec.kind == "softmax":
        return 2 * queries * keys * size
    maps = 0 if spec.kind == "merged" or spec.feature_map == "elu" else spec.features * size
    return 2 * (queries + keys) / 2 * (2 * spec.features * size + 2 * maps)


def _output(config: ModelConfig) -> int:
    words = config.adaptive_cutoffs[0] + len(config.adaptive_cutoffs) if config.adaptive_cutoffs else config.vocab_size
    return config.width * words
