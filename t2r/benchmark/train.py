"""Training speed of a config: its real training step, with random parameters and random tokens."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from t2r import environment
from t2r.batch import Batch
from t2r.benchmark.floor import peak_flops, training_flops
from t2r.benchmark.shared import is_out_of_memory
from t2r.console import Progress
from t2r.errors import InputError
from t2r.files import check_output_file, writing
from t2r.layout import shardings
from t2r.model.config import ModelConfig
from t2r.training.shapes import abstract_run
from t2r.training.sharding import make_mesh, place


class TrainSpeed(NamedTuple):
    """The training speed of one config on one mesh."""

    tokens_per_second: float
    step_seconds: float  # median
    spread: float  # (slowest - fastest) / median
    first_seconds: float  # the first step, with compilation
    forward_seconds: float  # median time of the forward pass
    utilisation: float | None  # model FLOP utilisation: required operations per second / peak; None: peak unknown
    peak_bytes: int | None  # of one device
    loss: float


def benchmark_train(
    config: ConfigDict, *, steps: int = 10, profile: str | None = None, output: Path | None = None
) -> dict[str, Any]:
    """Measures a config's training step. Appends the result to `output`, as a line of JSON."""
    if output is not None:
        check_output_file(output)
    try:
        speed = measure(config, steps=steps, profile=profile)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fix = "Use smaller batches (config.data), more parts (config.accumulate) or config.model.remat=True"
        raise InputError(f"a training step does not fit in memory: {str(error).splitlines()[0]} {fix}") from error
    result = {**speed._asdict(), "environment": environment.describe()}
    if output is not None:
        with writing(output), output.open("a") as file:
            file.write(json.dumps({**result, "config": config.to_dict()}) + "\n")
    return result


def measure(config: ConfigDict, *, steps: int = 10, rounds: int = 5, profile: str | None = None) -> TrainSpeed:
    """Times `rounds` rounds of `steps` steps, after a first step with compilation.

    As in training, the host waits for the device at the end of a round only.
    """
    mesh = make_mesh(config.mesh)
    run = abstract_run(config, mesh)
    step = run.step(mesh)
    state = place(_random_like(run.state), shardings(run.state, mesh))
    parts = [_random_batch(run.batch, run.model.config, seed) for seed in range(config.accumulate)]

    def train() -> Any:
        nonlocal state
        state, result = step(state, parts)
        return result

    with Progress("rounds", 2 * (rounds + 1)) as progress:
        times, result = _time(train, steps, rounds, progress)
        (_, *forward), _ = _time(lambda: step.forward_pass(state, parts), steps, rounds, progress)
    if profile:
        with jax.profiler.trace(profile):
            jax.block_until_ready(train())
    first_seconds, *counted = times
    seconds = statistics.median(counted)
    limit = peak_flops(mesh.devices.flat[0])
    work = training_flops(run.model.config, run.batch) * config.accumulate
    return TrainSpeed(
        tokens_per_second=run.tokens * config.accumulate / seconds,
        step_seconds=seconds,
        spread=(max(counted) - min(counted)) / seconds,
        first_seconds=first_seconds,
        forward_seconds=statistics.median(forward),
        utilisation=work / seconds / (limit * mesh.size) if limit else None,
        peak_bytes=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        loss=float(result["loss"]),
    )


def _time(call: Callable[[], Any], steps: int, rounds: int, progress: Progress) -> tuple[list[float], Any]:
    """(seconds per call for each round, the last result). The first round is a single call, later ones have `steps`."""
    times = []
    for count in (1, *[steps] * rounds):
        began = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / count)
        progress.advance(seconds=times[-1])
    return times, result


def _random_batch(like: Batch, config: ModelConfig, seed: int) -> Batch:
    vocab_sizes = Batch(config.vocab_size, config.source_vocab_size)
    return Batch(*(like and zipf_tokens(like.shape, size, seed) for like, size in zip(like, vocab_sizes)))


def zipf_tokens(shape: tuple[int, ...], vocab_size: int, seed: int) -> np.ndarray:
    """Random token ids with P(id) ∝ 1/id (Zipf's law): the speed of an adaptive softmax depends on frequencies."""
    rng = np.random.default_rng(seed)
    return np.minimum(np.exp(rng.random(shape) * np.log(vocab_size)), vocab_size - 1).astype(np.int32)


def _random_like(tree: Any) -> Any:
    """Random arrays for an abstract tree: parameters are small, norm scales 1, biases and all other arrays 0."""
    rng = np.random.default_rng(0)

    def array(path: tuple, like: jax.ShapeDtypeStruct) -> np.ndarray:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if not names or "optimizer" in str(path[0]) or names[-1].endswith("bias"):
            return np.zeros(like.shape, like.dtype)
        if names[-1].endswith("scale"):
            return np.ones(like.shape, like.dtype)
        return (0.02 * rng.standard_normal(like.shape, np.float32)).astype(like.dtype)

    return jax.tree_util.tree_map_with_path(array, tree)
