"""Decoding speed and state size against generated length: unconditional, greedy, as the paper measures it."""

import statistics
import time
from typing import NamedTuple

import jax
from flax import nnx

from t2r.decode.generate import scan_steps, start, state_bytes
from t2r.decode.sampling import Sampling
from t2r.model.transformer import LanguageModel

NO_END = -1  # no token: texts are generated to their full length


class DecodeSpeed(NamedTuple):
    """One model at one length."""

    length: int
    batch: int
    seconds: float  # the median of all repetitions, compilation apart
    spread: float  # slowest less fastest, over the median
    compile_seconds: float
    state_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.length / self.seconds


def measure(model: LanguageModel, length: int, *, batch: int = 16, repeat_for: float = 2.0) -> DecodeSpeed:
    """Generates `length` tokens for each of `batch` texts, again and again until `repeat_for` seconds have passed."""
    graph, arrays = nnx.split(model)
    prompts = [[0]] * batch
    began = time.perf_counter()
    generation = start(model, prompts, length)
    compiled = scan_steps.lower(graph, arrays, generation, length, Sampling(), NO_END).compile()
    compile_seconds = time.perf_counter() - began
    times = []
    while sum(times) < repeat_for:
        generation = jax.block_until_ready(start(model, prompts, length))
        began = time.perf_counter()
        jax.block_until_ready(compiled(arrays, generation))
        times.append(time.perf_counter() - began)
    middle = statistics.median(times)
    spread = (max(times) - min(times)) / middle
    return DecodeSpeed(length, batch, middle, spread, compile_seconds, state_bytes(model, batch, length))


def linear_state_bytes(layers: int, batch: int, heads: int, features: int, head_dim: int) -> int:
    """The paper's formula: S is k × d and z is k for each head, in float32, whatever the length."""
    return layers * batch * heads * features * (head_dim + 1) * 4
