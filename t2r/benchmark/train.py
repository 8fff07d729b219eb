"""Training speed: whole steps of a config's run, with random parameters and random words."""

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
from t2r.benchmark.floor import peak, training_flops
from t2r.benchmark.shared import is_out_of_memory
from t2r.console import Progress
from t2r.errors import InputError
from t2r.layout import shardings
from t2r.model.config import ModelConfig
from t2r.training.shapes import run_of_shapes
from t2r.training.sharding import make_mesh, place


class TrainSpeed(NamedTuple):
    """One config on one mesh."""

    tokens_per_second: float
    step_seconds: float  # the median
    spread: float  # slowest less fastest, over the median
    first_seconds: float  # of the first step, compilation included
    forward_seconds: float  # the median of the forward pass alone
    utilisation: float | None  # operations of the model's definition over what the devices can do
    peak_bytes: int | None  # of one device
    loss: float


def benchmark_train(
    config: ConfigDict, *, steps: int = 10, profile: str | None = None, output: Path | None = None
) -> dict[str, Any]:
    """Measures a config's training step; the result may be added to a file, as a line of JSON."""
    try:
        speed = measure(config, steps=steps, profile=profile)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fix = "Take fewer tokens at once (config.data, config.accumulate), or config.model.remat=True"
        raise InputError(f"a step does not fit: {str(error).splitlines()[0]} {fix}") from error
    result = {**speed._asdict(), "environment": environment.describe()}
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps({**result, "config": config.to_dict()}) + "\n")
    return result


def measure(config: ConfigDict, *, steps: int = 10, rounds: int = 5, profile: str | None = None) -> TrainSpeed:
    """Times rounds of steps, each round waited for at its end, as in training; the first round is not counted."""
    mesh = make_mesh(config.mesh)
    run = run_of_shapes(config, mesh)
    step = run.step(mesh, config.label_smoothing)
    state = place(_random_like(run.state), shardings(run.state, mesh))
    parts = [_random_words(run.batch, run.model.config, seed) for seed in range(config.accumulate)]

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
    limit = peak(mesh.devices.flat[0])
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
    """Seconds of a call, by rounds, the first of which is one call alone; and what the last one found."""
    times = []
    for count in (1, *[steps] * rounds):
        began = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / count)
        progress.advance(seconds=times[-1])
    return times, result


def _random_words(like: Batch, config: ModelConfig, seed: int) -> Batch:
    vocabularies = Batch(config.vocab_size, config.source_vocab_size)
    return Batch(*(like and words(like.shape, size, seed) for like, size in zip(like, vocabularies)))


def words(shape: tuple[int, ...], vocabulary: int, seed: int) -> np.ndarray:
    """Random words by Zipf's law, the n-th most frequent 1/n times as frequent: adaptive softmax depends on that."""
    chance = np.random.default_rng(seed)
    return np.minimum(np.exp(chance.random(shape) * np.log(vocabulary)), vocabulary - 1).astype(np.int32)


def _random_like(tree: Any) -> Any:
    """Small random numbers; norms are ones, and what is not a parameter is zero."""
    chance = np.random.default_rng(0)

    def array(path: tuple, like: jax.ShapeDtypeStruct) -> np.ndarray:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if not names or "optimizer" in str(path[0]) or names[-1].endswith("bias"):
            return np.zeros(like.shape, like.dtype)
        if names[-1].endswith("scale"):
            return np.ones(like.shape, like.dtype)
        return (0.02 * chance.standard_normal(like.shape, np.float32)).astype(like.dtype)

    return jax.tree_util.tree_map_with_path(array, tree)
