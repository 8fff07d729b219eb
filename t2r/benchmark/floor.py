"""The least time a decoding step can take, and the operations of a model: the limits that speed is compared with.

A step reads every weight of the decoder once, however large the batch is, and each sequence's state. Linear attention
writes all of its state again, softmax attention one slot. Activations are small and not counted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t2r.batch import Batch
from t2r.benchmark.models import normal
from t2r.benchmark.shared import timed_in_a_row
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.parameters import arrays_of
from t2r.model.transformer import LanguageModel

FLOAT32 = 4  # bytes; S and z are of that type, whatever activations are

# Bytes per second of a device's memory as its maker states them, for devices that are not there to be measured. A
# device of TPU v2 and v3 is one of a chip's two cores.
STATED_BANDWIDTH = {"v2": 350e9, "v3": 450e9, "v4": 1228e9, "v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9}


class Machine(NamedTuple):
    """What a device can do."""

    bandwidth: float  # bytes per second, read or written
    flops: float | None = None  # operations per second; None: nobody has said


class StepCost(NamedTuple):
    """What one step of a whole batch must do."""

    weight_bytes: int
    read_bytes: int  # of the state
    written_bytes: int  # of the state
    flops: float

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.read_bytes + self.written_bytes

    def floor(self, machine: Machine) -> float:
        """Seconds, if memory is never idle."""
        return self.bytes / machine.bandwidth

    def least_seconds(self, machine: Machine) -> float:
        """The longer of the floor and what the operations take."""
        return max(self.floor(machine), self.flops / machine.flops if machine.flops else 0.0)


def step_of(
    model: LanguageModel, batch: int, tokens: float, source: float = 0, *, weights: dict[str, int] | None = None
) -> StepCost:
    """A step with so many tokens in the state, and in the source of a translation. The model may be of shapes."""
    config = model.config
    weights = read_weights(model) if weights is None else weights
    products = sum(size for name, size in weights.items() if not name.endswith(("bias", "scale", "sigma")))
    itemsize = jnp.dtype(config.dtype).itemsize
    own = [layer_bytes(config, spec, batch, tokens) for spec in config.attention]
    slots = [layer_bytes(config, spec, batch, 1) for spec in config.attention]  # softmax writes one of them
    seen = [layer_bytes(config, spec, batch, source) for spec in config.cross_attention]
    pairs = sum(_attention_products(config, spec, tokens, writes=True) for spec in config.attention)
    pairs += sum(_attention_products(config, spec, source, writes=False) for spec in config.cross_attention)
    return StepCost(
        weight_bytes=itemsize * sum(weights.values()),
        read_bytes=round(sum(own) + sum(seen)),
        written_bytes=round(sum(slots)),
        flops=2.0 * batch * (products + pairs),
    )


def read_weights(model: LanguageModel) -> dict[str, int]:
    """How many numbers of each array a decoding step reads: nothing of the encoder, and of tables of rows only rows."""
    return {
        name: count for name, array in arrays_of(model).items() if (count := _numbers_read(name, array, model.config))
    }


def _numbers_read(name: str, array: Any, config: ModelConfig) -> int:
    # A source's keys and values were made when it was read.
    unread = name.startswith("encoder.") or ".cross.key." in name or ".cross.value." in name
    looked_up = name == "positions" or (name == "embedding.table" and not config.tied_output)
    if unread or looked_up:
        return 0
    # Of RFA's pool of random matrices, inference has one.
    return int(np.prod(array.shape)) // (array.shape[0] if name.endswith("feature_map.pool") else 1)


def layer_bytes(config: ModelConfig, spec: AttentionSpec, batch: int, tokens: float) -> float:
    """One layer's state: keys, values and a flag for each token; or S, k × d for each head, and z, k."""
    if spec.kind == "softmax":
        slot = 2 * config.kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize + 1
        return batch * tokens * slot
    scale = spec.feature_map == "performer"  # its features' common exponent
    return batch * config.kv_heads * (spec.features * (config.head_dim + 1) + scale) * FLOAT32


def state_bytes(config: ModelConfig, batch: int, length: int, source: int = 0) -> int:
    """The formula of the whole attention state, a translation model's sources among it."""
    own = sum(layer_bytes(config, spec, batch, length) for spec in config.attention)
    return int(own + sum(layer_bytes(config, spec, batch, source) for spec in config.cross_attention))


def _attention_products(config: ModelConfig, spec: AttentionSpec, tokens: float, *, writes: bool) -> float:
    """Multiplications of one text in one layer: q·k and weights·v; or φ(k) ⊗ v and φ(q)·S."""
    if spec.kind == "softmax":
        return 2 * tokens * config.heads * config.head_dim
    heads = config.heads + (config.kv_heads if writes else 0)
    return heads * spec.features * (config.head_dim + 1)


def predicted_crossover(
    transformer: LanguageModel, rnn: LanguageModel, batch: int, machine: Machine, most: int = 2**24
) -> int | None:
    """The length from which on the RNN's least time is below the transformer's; None if there is none up to `most`.

    In translation the source is as long as the target.
    """
    translates = bool(rnn.config.encoder_layers)
    models = [(model, read_weights(model)) for model in (transformer, rnn)]

    def overtakes(length: int) -> bool:
        slow, fast = (step_of(model, batch, length, length * translates, weights=read) for model, read in models)
        return fast.least_seconds(machine) < slow.least_seconds(machine)

    if not overtakes(most):
        return None
    low, high = 0, most  # not at `low`, but at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overtakes(middle) else (middle, high)
    return high


def measured_crossover(transformer: dict[int, float], rnn: dict[int, float]) -> float | str | None:
    """The same from seconds at some lengths, straight lines between them; in words where it lies outside them."""
    lengths = sorted(transformer.keys() & rnn.keys())
    if not lengths:
        return None
    ahead = [transformer[length] - rnn[length] for length in lengths]
    if ahead[0] > 0:
        return f"below {lengths[0]}"
    for place in range(1, len(lengths)):
        if ahead[place] > 0:
            before, after = ahead[place - 1], ahead[place]
            return lengths[place - 1] - before / (after - before) * (lengths[place] - lengths[place - 1])
    return f"above {lengths[-1]}"


def measure_machine(size: int | None = None) -> tuple[Machine, dict[str, float]]:
    """The memory bandwidth of the first device, the better of reading alone and of copying, and each of the two."""
    device = jax.devices()[0]
    size = size or (2**28 if device.platform == "cpu" else 2**31)
    array = normal(jax.random.key(0), (size // 2**13, 2**11), jnp.float32)
    speeds = {"read": _bandwidth(_read, array, size), "copy": _bandwidth(_copy, array, 2 * size)}
    return Machine(max(speeds.values()), peak(device)), speeds


def _bandwidth(function: Callable, array: jax.Array, moved: int) -> float:
    compiled = function.lower(array).compile()
    return moved / timed_in_a_row(lambda _: compiled(array), repeat_for=0.5).seconds


@jax.jit
def _read(x: jax.Array) -> jax.Array:
    return x.sum(1)


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return x + 1


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
