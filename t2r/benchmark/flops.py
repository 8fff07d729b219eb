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

    Products only, and those that the function needs: causal attention counts half of all pairs, φ its merged form
    where there is one, an adaptive softmax the first band, which every token needs, and layer dropout the layers that
    it leaves on average.
    """
    rows, targets = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    feedforward = (3 if config.gated else 2) * config.width * config.feedforward
    total = 0.0
    for spec in config.attention:
        queries, keys = _projections(config, spec)
        total += targets * (queries + keys + feedforward) + _attention(config, spec, targets, targets) / 2
    if config.encoder_layers:
        sources, plain = batch.source.shape[1], AttentionSpec()
        for spec in config.cross_attention:
            queries, keys = _projections(config, spec)
            total += targets * queries + sources * keys + _attention(config, spec, targets, sources)
        encoder = sources * (sum(_projections(config, plain)) + feedforward)
        total += config.encoder_layers * (encoder + _attention(config, plain, sources, sources))
    return 3 * 2 * rows * ((1 - config.layer_dropout) * total + targets * _output(config))


def _projections(config: ModelConfig, spec: AttentionSpec) -> tuple[int, int]:
    """Multiplications per token of queries and outputs, and of keys and values."""
    narrow = config.head_dim
    if _merges(config, spec):
        narrow = min(narrow, spec.features)
    return tuple(config.width * heads * (narrow + config.head_dim) for heads in (config.heads, config.kv_heads))


def _merges(config: ModelConfig, spec: AttentionSpec) -> bool:
    return spec.feature_map == "t2r" and config.positions != "rotary" and not config.query_norm


def _attention(config: ModelConfig, spec: AttentionSpec, queries: int, keys: int) -> float:
    """Multiplications of all queries over all keys, twice those of causal attention."""
    size = config.heads * config.head_dim
    if spec.kind == "softmax":
        return 2 * queries * keys * size
    maps = 0 if _merges(config, spec) or spec.feature_map == "elu" else spec.features * size
    return 2 * (queries + keys) / 2 * (2 * spec.features * size + 2 * maps)


def _output(config: ModelConfig) -> int:
    words = config.adaptive_cutoffs[0] + len(config.adaptive_cutoffs) if config.adaptive_cutoffs else config.vocab_size
    return config.width * words
