"""The size of a decoding state by formula: what a model keeps of the tokens it has read, from its config alone."""

import jax.numpy as jnp

from t2r.model.config import AttentionSpec, ModelConfig

FLOAT32 = 4  # bytes; S and z are always float32
INT32 = 4
LENGTH = 2048  # tokens of the sequence whose state is compared, if neither the user nor the model says how long


def state_bytes(config: ModelConfig, batch: int, length: int, source: int = 0) -> int:
    """Bytes of the attention state of all layers by the formula, including that of a translation model's source."""
    causal = sum(layer_bytes(config, spec, batch, length) for spec in config.attention)
    return int(causal + sum(layer_bytes(config, spec, batch, source) for spec in config.cross_attention))


def sequence_bytes(config: ModelConfig, length: int) -> int:
    """Bytes of the state of one sequence; the source of a translation is as long as its target."""
    return state_bytes(config, 1, length, length if config.encoder_layers else 0)


def natural_length(config: ModelConfig) -> int:
    """The length at which states are compared, if none is given: the model's learned positions, or LENGTH."""
    return config.max_positions or LENGTH


def layer_bytes(config: ModelConfig, spec: AttentionSpec, batch: int, tokens: float) -> float:
    """Bytes of one layer's state. Softmax: keys, values, a mask byte per token. Linear: S (k × d), z (k) per head.

    Windowed: as linear, and the keys and values of the window and the sinks, and a counter for each sequence.
    """
    slot = 2 * config.kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    if spec.kind == "softmax":
        return batch * tokens * (slot + 1)
    scale = spec.feature_map == "performer"  # one more value per head: the running maximum of the exponents
    sums = config.kv_heads * (spec.features * (config.head_dim + 1) + scale) * FLOAT32
    exact = exact_tokens(spec) * slot + INT32 if spec.kind == "windowed" else 0
    return batch * (sums + exact)


def exact_tokens(spec: AttentionSpec) -> int:
    """The tokens to which windowed attention is exact; 0 for other linear attention."""
    return spec.window + spec.sinks if spec.kind == "windowed" else 0
