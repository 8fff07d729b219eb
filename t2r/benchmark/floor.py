"""Lower bounds on time: the bytes and operations of a decoding step, and the operations of a training step.

A decoding step reads every weight of the decoder once, whatever the batch size, and the state of each sequence. Linear
attention writes its sums back, softmax attention one slot of its cache, windowed attention both. Activations are not
counted.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t2r.batch import Batch
from t2r.benchmark.models import normal
from t2r.benchmark.shared import time_short_calls
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.parameters import arrays_of
from t2r.model.state_size import exact_tokens, layer_bytes
from t2r.model.transformer import LanguageModel

# Memory bandwidth in bytes per second by the vendor's data sheet, for TPUs that are compiled for but not measured. A
# device of TPU v2 and v3 is one of the two cores of a chip.
STATED_BANDWIDTH = {"v2": 350e9, "v3": 450e9, "v4": 1228e9, "v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9}


class Machine(NamedTuple):
    """The limits of a device."""

    bandwidth: float  # bytes per second, read or written
    flops: float | None = None  # operations per second; None: unknown


class ReadArray(NamedTuple):
    """What a decoding step reads of an array."""

    elements: int
    bytes: int


class StepCost(NamedTuple):
    """The minimum cost of one decoding step of a whole batch."""

    weight_bytes: int
    read_bytes: int  # of the state
    written_bytes: int  # of the state
    flops: float

    @property
    def bytes(self) -> int:
        """All bytes that are read or written."""
        return self.weight_bytes + self.read_bytes + self.written_bytes

    def floor(self, machine: Machine) -> float:
        """Seconds at full memory bandwidth."""
        return self.bytes / machine.bandwidth

    def least_seconds(self, machine: Machine) -> float:
        """The longer of the floor and the time of the operations at the peak rate."""
        return max(self.floor(machine), self.flops / machine.flops if machine.flops else 0.0)


def step_cost(
    model: LanguageModel, batch: int, tokens: float, source: float = 0, *, weights: dict[str, ReadArray] | None = None
) -> StepCost:
    """The cost of a step with `tokens` tokens in the state and `source` in the source. The model may be abstract."""
    config = model.config
    weights = read_weights(model) if weights is None else weights
    products = sum(read.elements for name, read in weights.items() if not name.endswith(("bias", "scale", "sigma")))
    causal = [layer_bytes(config, spec, batch, tokens) for spec in config.attention]
    written = [_written_bytes(config, spec, batch) for spec in config.attention]
    cross = [layer_bytes(config, spec, batch, source) for spec in config.cross_attention]
    pairs = sum(_attention_products(config, spec, tokens, writes=True) for spec in config.attention)
    pairs += sum(_attention_products(config, spec, source, writes=False) for spec in config.cross_attention)
    return StepCost(
        weight_bytes=sum(read.bytes for read in weights.values()),
        read_bytes=round(sum(causal) + sum(cross)),
        written_bytes=round(sum(written)),
        flops=2.0 * batch * (products + pairs),
    )


def read_weights(model: LanguageModel) -> dict[str, ReadArray]:
    """array name → what a decoding step reads of it. Matrices in 8 bits are read with the scales of their rows.

    Arrays that are not read, and lookup tables, of which a step reads a few entries, are left out.
    """
    counts = {name: (_elements_read(name, array, model.config), array) for name, array in arrays_of(model).items()}
    return {name: ReadArray(count, count * array.dtype.itemsize) for name, (count, array) in counts.items() if count}


def _elements_read(name: str, array: Any, config: ModelConfig) -> int:
    # The keys and values of the source are computed once, when it is encoded.
    unread = name.startswith("encoder.") or ".cross.key." in name or ".cross.value." in name
    looked_up = name == "positions" or (name.startswith("embedding.table") and not config.tied_output)
    if unread or looked_up:
        return 0
    # RFA has a pool of random matrices; inference uses one of them.
    return int(np.prod(array.shape)) // (array.shape[0] if name.endswith("feature_map.pool") else 1)


def _written_bytes(config: ModelConfig, spec: AttentionSpec, batch: int) -> float:
    """Bytes of one layer's state that a step writes: S and z, and one slot of the keys and values that are exact."""
    if spec.kind == "windowed":
        spec = dataclasses.replace(spec, window=1, sinks=0)
    return layer_bytes(config, spec, batch, 1)


def _attention_products(config: ModelConfig, spec: AttentionSpec, tokens: float, *, writes: bool) -> float:
    """Multiplications for one sequence in one layer. Softmax: q·k and weights·v; linear: φ(k) ⊗ v and φ(q)·S."""
    if spec.kind == "softmax":
        return 2 * tokens * config.heads * config.head_dim
    heads = config.heads + (config.kv_heads if writes else 0)
    exact = 2 * min(exact_tokens(spec), tokens) * config.heads * config.head_dim
    return heads * spec.features * (config.head_dim + 1) + exact


def predicted_crossover(
    transformer: LanguageModel, rnn: LanguageModel, batch: int, machine: Machine, most: int = 2**24
) -> int | None:
    """The shortest length at which the RNN's least time is below the transformer's; None if there is none up to `most`.

    In translation the source is as long as the target.
    """
    translates = bool(rnn.config.encoder_layers)
    models = [(model, read_weights(model)) for model in (transformer, rnn)]

    def overtakes(length: int) -> bool:
        slow, fast = (step_cost(model, batch, length, length * translates, weights=read) for model, read in models)
        return fast.least_seconds(machine) < slow.least_seconds(machine)

    if not overtakes(most):
        return None
    low, high = 0, most  # bisection: the RNN overtakes at `high`, not at `low`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overtakes(middle) else (middle, high)
    return high


def measured_crossover(transformer: dict[int, float], rnn: dict[int, float]) -> float | str | None:
    """The length from which on the RNN is faster, at all measured lengths, interpolated linearly between two of them.

    "below N" or "above N" if it is out of range.
    """
    lengths = sorted(transformer.keys() & rnn.keys())
    if not lengths:
        return None
    lead = [transformer[length] - rnn[length] for length in lengths]
    slower = [i for i, seconds in enumerate(lead) if seconds <= 0]
    if not slower:
        return f"below {lengths[0]}"
    i = slower[-1]
    if i == len(lengths) - 1:
        return f"above {lengths[i]}"
    return lengths[i] - lead[i] / (lead[i + 1] - lead[i]) * (lengths[i + 1] - lengths[i])


def measure_machine(size: int | None = None) -> tuple[Machine, dict[str, float]]:
    """The first device with its measured memory bandwidth (the higher of reading and copying), and both bandwidths."""
    device = jax.devices()[0]
    size = size or (2**28 if device.platform == "cpu" else 2**31)  # bytes: far more than any cache
    array = normal(jax.random.key(0), (size // 2**13, 2**11), jnp.float32)
    speeds = {"read": _bandwidth(_read, array, size), "copy": _bandwidth(_copy, array, 2 * size)}
    return Machine(max(speeds.values()), peak_flops(device)), speeds


def _bandwidth(function: Callable, array: jax.Array, moved: int) -> float:
    compiled = function.lower(array).compile()
    return moved / time_short_calls(lambda _: compiled(array), repeat_for=0.5).seconds


@jax.jit
def _read(x: jax.Array) -> jax.Array:
    return x.sum(1)


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return x + 1


# Dense bfloat16 operations per second of one device by the vendor's data sheet; keys are parts of JAX's device_kind. A
# device of TPU v2 and v3 is one of the two cores of a chip.
PEAK_FLOPS = {
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "TPU v2": 22.5e12, "TPU v3": 61.5e12, "TPU v4": 275e12,
    "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}  # fmt: skip


def peak_flops(device: Any) -> float | None:
    """Peak bfloat16 operations per second of a device; None if it is not in the table."""
    return next((value for name, value in PEAK_FLOPS.items() if name in device.device_kind), None)


def training_flops(config: ModelConfig, batch: Batch) -> float:
    """Operations of the forward and backward pass (twice the forward) on a batch of this shape.

    Only matrix products that the definition of the model requires: causal attention counts half of all query-key pairs,
    φ its merged form where one exists, adaptive softmax only the first band (which every token needs), layer dropout
    the expected number of layers.
    """
    sequences, targets = batch.tokens.shape[0], batch.tokens.shape[1] - 1
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
    return 3 * 2 * sequences * ((1 - config.layer_dropout) * total + targets * _output(config))


def _projections(config: ModelConfig, spec: AttentionSpec) -> tuple[int, int]:
    """Multiplications per token: (query and output projections, key and value projections)."""
    query_size = config.head_dim
    if _merges(config, spec):
        query_size = min(query_size, spec.features)
    return tuple(config.width * heads * (query_size + config.head_dim) for heads in (config.heads, config.kv_heads))


def _merges(config: ModelConfig, spec: AttentionSpec) -> bool:
    """Whether φ can be merged into the query and key projections."""
    directly = config.positions != "rotary" and not config.query_norm and spec.kind != "windowed"
    return spec.feature_map == "t2r" and directly


def _attention(config: ModelConfig, spec: AttentionSpec, queries: int, keys: int) -> float:
    """Multiplications of full attention; causal attention needs half of them."""
    size = config.heads * config.head_dim
    if spec.kind == "softmax":
        return 2 * queries * keys * size
    maps = 0 if _merges(config, spec) or spec.feature_map == "elu" else spec.features * size
    if spec.feature_map == "hedgehog":  # W x gives both halves
        maps //= 2
    near = min(exact_tokens(spec), keys)  # the first tokens have fewer; a window over all is full attention
    exact = 2 * near * (2 * queries - near) * size
    return 2 * (queries + keys) / 2 * (2 * spec.features * size + 2 * maps) + exact


def _output(config: ModelConfig) -> int:
    """Multiplications per token of the output projection; of an adaptive softmax, its first band and the classes."""
    cutoffs = config.adaptive_cutoffs
    return config.width * (cutoffs[0] + len(cutoffs) if cutoffs else config.vocab_size)
