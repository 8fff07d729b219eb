"""Ahead-of-time compilation for TPUs, without one: the compiler's memory plan and its estimate of the run time."""

import importlib.metadata
import math
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from t2r import environment
from t2r.benchmark.floor import peak_flops, training_flops
from t2r.benchmark.shared import DoesNotFit, is_out_of_memory, peak_bytes
from t2r.benchmark.steps import NO_STOP_TOKEN, abstract_generation
from t2r.decode.generate import scan_steps
from t2r.decode.sampling import Sampling
from t2r.errors import InputError
from t2r.files import make_folder, write_json
from t2r.layout import STATE, partition_spec, shardings
from t2r.model.parameters import arrays_of, with_arrays
from t2r.model.transformer import LanguageModel
from t2r.training.config import check
from t2r.training.shapes import abstract_converted_model, abstract_run
from t2r.training.sharding import make_mesh

# GiB of memory of one device; on v2 and v3 a device is one of the two cores of a chip.
MEMORY = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}


# Google Cloud's names of slices, such as v5litepod-8: the TPU, and how many of what the name counts are one chip.
CLOUD_NAMES = {"v2": ("v2", 2), "v3": ("v3", 2), "v4": ("v4", 2), "v5p": ("v5p", 2), "v5litepod": ("v5e", 1),
               "v5e": ("v5e", 1), "v6e": ("v6e", 1)}  # fmt: skip


class CompiledProgram(NamedTuple):
    """What the compiler reports of one program; bytes and operations are for one device."""

    compile_seconds: float
    argument_bytes: int
    temporary_bytes: int
    shared_bytes: int  # arguments that are updated in place (donated); in decoding: the state
    peak_bytes: int  # arguments, outputs that are not donated arguments, and temporaries
    seconds: float | None  # estimated run time; None if the compiler gives none
    flops: float | None  # the body of a loop is counted once


def without_devices() -> None:
    """Keeps libtpu from searching for a TPU and from querying the cloud metadata server."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v2-8")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")


def compiler() -> str:
    """Name and version of the TPU compiler."""
    return f"libtpu {importlib.metadata.version('libtpu')}"


def describe_topology(topology: str) -> dict[str, str]:
    """The environment entries of compiled results. Raises an InputError if the topology does not exist."""
    without_devices()
    topology_devices(topology)
    return {"topology": topology, "compiler": compiler()}


def topology_of(name: str) -> str:
    """The topology, such as v5e:2x4, of a slice given as one or by its name in Google Cloud, such as v5litepod-8."""
    if name.partition(":")[0] in MEMORY and ":" in name:
        return name
    cloud = re.fullmatch(rf"({'|'.join(CLOUD_NAMES)})-(\d+)", name)
    tpu, per_chip = CLOUD_NAMES[cloud[1]] if cloud else ("", 1)
    chips = int(cloud[2]) // per_chip if cloud else 0
    doublings = chips.bit_length() - 1
    if chips < 4 or chips * per_chip != int(cloud[2]) or chips != 1 << doublings:
        sizes = ", ".join(f"{name}-{4 * count}" for name, (_, count) in CLOUD_NAMES.items())
        raise InputError(
            f"--topology={name}: name a TPU and its chips, such as v3:4x4 (known TPUs: {', '.join(MEMORY)}), or a "
            f"slice of Google Cloud of at least 4 chips ({sizes}, or a power of two times as many)"
        )
    if tpu in ("v4", "v5p"):  # three dimensions; four chips are 2x2x1
        sides = (2, 2, 1) if chips == 4 else (1 << (doublings + i) // 3 for i in range(3))
    else:
        sides = (1 << doublings // 2, 1 << (doublings + 1) // 2)
    return f"{tpu}:{'x'.join(map(str, sides))}"


def topology_devices(topology: str) -> list[Any]:
    """The abstract devices of a topology such as v3:4x4."""
    try:
        return list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)
    except Exception as error:  # libtpu is not installed, or there is no such slice
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        raise InputError(
            f"--topology={topology}: the TPU compiler refuses it ({reason}). Install the compiler with pip install "
            "'jax[tpu]' (Linux, x86_64), and name a slice that exists, such as v2:2x2, v3:4x4 or v5e:4x4"
        ) from None


def benchmark_compile(
    config: ConfigDict,
    topology: str,
    *,
    decode: bool = False,
    batch: int = 16,
    length: int = 512,
    output: Path | None = None,
) -> dict[str, Any]:
    """Compiles a config's training step, or with `decode` a decoding step, for a TPU.

    Returns a report; `output` is a JSON file for it.
    """
    if output is not None:
        make_folder(output.parent)
    topology = topology_of(topology)
    without_devices()
    check(config)
    if decode:
        report = compile_decoding(config, topology, batch=batch, length=length)
    else:
        report = compile_training(config, topology)
    result = {**report, "estimate": True, "compiler": compiler(), "environment": environment.describe()}
    if output is not None:
        write_json(output, {**result, "config": config.to_dict()})
    return result


def compile_training(config: ConfigDict, topology: str) -> dict[str, Any]:
    """Compiles the training step of a config for all devices of the topology."""
    mesh = make_mesh(config.mesh, topology_devices(topology))
    run = abstract_run(config, mesh)
    lowered = run.step(mesh).lower(run.state, run.batch)
    programs = {name: compile_program(program) for name, program in lowered.items()}
    part, finish = programs["add_part"], programs["finish"]
    peak = max(part.peak_bytes, finish.peak_bytes)
    seconds = part.seconds and finish.seconds and config.accumulate * part.seconds + finish.seconds
    if run.model.config.scan_layers:
        seconds = None  # the compiler counts the body of the loop over layers only once
    tokens = run.tokens * config.accumulate
    work = training_flops(run.model.config, run.batch) * config.accumulate
    return _report(topology, mesh, peak, programs) | {
        "least_seconds": work / mesh.size / peak_flops(mesh.devices.flat[0]),
        "step_seconds": seconds,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "state_bytes": _bytes_on_one_device(run.state, mesh),
    }


def compile_decoding(config: ConfigDict, topology: str, *, batch: int, length: int) -> dict[str, Any]:
    """Compiles one greedy decoding step of the model that a config trains, for all devices of the topology."""
    mesh = make_mesh(config.mesh, topology_devices(topology))
    return compile_step(abstract_converted_model(config), topology, mesh, batch=batch, length=length)


def compile_step(model: LanguageModel, topology: str, mesh: Mesh, *, batch: int, length: int) -> dict[str, Any]:
    """Compiles one greedy decoding step with `length` tokens in the state and, in translation, in the source."""
    with jax.set_mesh(mesh):
        lowered = lower_decoding(model, mesh, batch, length)
    program = compile_program(lowered)
    return _report(topology, mesh, program.peak_bytes, {"decode": program}) | {
        "step_seconds": program.seconds,
        "tokens_per_second": batch / program.seconds if program.seconds else None,
        "batch": batch,
        "length": length,
    }


def lower_decoding(model: LanguageModel, mesh: Mesh, batch: int, length: int) -> jax.stages.Lowered:
    """Lowers the decoding step of an abstract model, its parameters and state sharded over the mesh."""
    arrays = arrays_of(model)
    placed = jax.tree.map(_shape_at, arrays, shardings(arrays, mesh))
    placed = {name: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding) for name, a in placed.items()}
    generation, sizes = abstract_generation(model, batch, length), dict(mesh.shape)

    def at(leaf: Any, dimensions: tuple = ()) -> jax.ShapeDtypeStruct:
        return _shape_at(leaf, NamedSharding(mesh, partition_spec(dimensions, leaf.shape, sizes)))

    def shard_layer(layer: Any) -> Any:  # by sequences and heads, the sharding that the model itself uses
        fields = layer._asdict().items()
        return type(layer)(*(leaf if leaf is None else at(leaf, STATE[name]) for name, leaf in fields))

    def shard_layers(layers: tuple | None) -> tuple | None:
        return None if layers is None else tuple(map(shard_layer, layers))

    batch_axis, state = ("batch",), generation.state
    state = type(state)(shard_layers(state.layers), at(state.position, batch_axis), shard_layers(state.source))
    last, done, key = at(generation.last, batch_axis), at(generation.done, batch_axis), at(generation.key)
    graph, parameters = nnx.split(with_arrays(model, placed))
    return scan_steps.lower(graph, parameters, type(generation)(state, last, done, key), 1, Sampling(), NO_STOP_TOKEN)


def compile_program(lowered: jax.stages.Lowered) -> CompiledProgram:
    """Compiles a lowered program and returns the compiler's report; raises DoesNotFit if it needs too much memory."""
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        needed = next((line for line in str(error).splitlines() if "Used" in line), str(error).splitlines()[0])
        raise DoesNotFit(
            f"it does not fit: {needed.strip()[:300]}. Divide it among more devices (config.mesh.fsdp or "
            "config.mesh.tensor), recompute activations (config.model.remat=True), or raise config.accumulate"
        ) from None
    seconds = time.perf_counter() - began
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    estimate = cost.get("optimal_seconds")
    return CompiledProgram(
        round(seconds, 1), memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.alias_size_in_bytes,
        peak_bytes(compiled), estimate if estimate and estimate > 0 else None, cost.get("flops"),
    )  # fmt: skip


def _report(topology: str, mesh: Mesh, peak: int, programs: dict[str, CompiledProgram]) -> dict[str, Any]:
    limit = MEMORY[topology.partition(":")[0]] * 2**30
    return {
        "topology": topology,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "peak_bytes": peak,
        "memory_bytes": limit,
        "fits": peak <= limit,
        "programs": {name: program._asdict() for name, program in programs.items()},
    }


def _shape_at(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes_on_one_device(tree: Any, mesh: Mesh) -> int:
    def size(leaf: Any, sharding: NamedSharding) -> int:
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings(tree, mesh))))
