"""Compiling for a TPU that nobody has booked: the real compiler, its memory, and its own estimate of the time."""

import importlib.metadata
import json
import math
import os
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
from t2r.attention.softmax import KVCache
from t2r.benchmark.floor import peak as peak_flops
from t2r.benchmark.floor import training_flops
from t2r.benchmark.shared import DoesNotFit, is_out_of_memory, peak_bytes
from t2r.benchmark.steps import NO_END, generation_of_shapes
from t2r.decode.generate import scan_steps
from t2r.decode.sampling import Sampling
from t2r.errors import InputError
from t2r.layout import KV_CACHE, LINEAR_STATE, partition_spec, shardings
from t2r.model.parameters import arrays_of, with_arrays
from t2r.model.transformer import LanguageModel
from t2r.training.config import check
from t2r.training.shapes import model_of_shapes, run_of_shapes
from t2r.training.sharding import make_mesh

# Memory of one device, which on v2 and v3 is one of a chip's two cores.
MEMORY = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}  # GiB


class CompiledProgram(NamedTuple):
    """One compiled program; bytes are of one device."""

    compile_seconds: float
    argument_bytes: int
    temporary_bytes: int
    shared_bytes: int  # of outputs that are arguments, changed in place: in decoding, the state
    peak_bytes: int  # arguments, outputs that share no memory with them, and temporaries
    seconds: float | None  # the compiler's own estimate; None if it gives none
    flops: float | None  # of one device, as the compiler counts them: a loop's body once


def without_devices() -> None:
    """Keeps the compiler from looking for a TPU, and from asking a cloud about one."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v2-8")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")


def compiler() -> str:
    """Its name and version."""
    return f"libtpu {importlib.metadata.version('libtpu')}"


def describe_topology(topology: str) -> dict[str, str]:
    """What results say of figures that were compiled, not measured. Refuses a topology that does not exist."""
    without_devices()
    devices_of(topology)
    return {"topology": topology, "compiler": compiler()}


def devices_of(topology: str) -> list[jax.Device]:
    """The devices of a topology such as v3:4x4, from the compiler's own description."""
    kind = topology.partition(":")[0]
    if kind not in MEMORY:
        raise InputError(
            f"--topology={topology}: name a TPU and its chips, as in v3:4x4; there are {', '.join(MEMORY)}"
        )
    try:
        return list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)
    except Exception as error:  # the plugin is missing, or has another opinion of the shape
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        raise InputError(
            f"--topology={topology}: the TPU compiler does not give it ({reason}). It comes with pip install "
            "'jax[tpu]', on Linux for x86_64; shapes are those of slices that exist, such as v2:2x2, v3:4x4, v5e:4x4"
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
    """Compiles a config's training step, or with `decode` a decoding step, for a TPU; the report may go to a file."""
    without_devices()
    check(config)
    if decode:
        report = compile_decoding(config, topology, batch=batch, length=length)
    else:
        report = compile_training(config, topology)
    result = {**report, "estimate": True, "compiler": compiler(), "environment": environment.describe()}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({**result, "config": config.to_dict()}, indent=1) + "\n")
    return result


def compile_training(config: ConfigDict, topology: str) -> dict[str, Any]:
    """The programs of a training step of this config, on all devices of the topology."""
    mesh = make_mesh(config.mesh, devices_of(topology))
    run = run_of_shapes(config, mesh)
    lowered = run.step(mesh, config.label_smoothing).lower(run.state, run.batch)
    programs = {name: compile_program(program) for name, program in lowered.items()}
    part, finish = programs["add_part"], programs["finish"]
    peak = max(part.peak_bytes, finish.peak_bytes)
    seconds = part.seconds and finish.seconds and config.accumulate * part.seconds + finish.seconds
    if run.model.config.scan_layers:
        seconds = None  # the estimate has the loop's body, a layer, once
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
    """One step of greedy decoding of what a config trains, on all devices of the topology."""
    mesh = make_mesh(config.mesh, devices_of(topology))
    return compile_step(model_of_shapes(config), topology, mesh, batch=batch, length=length)


def compile_step(model: LanguageModel, topology: str, mesh: Mesh, *, batch: int, length: int) -> dict[str, Any]:
    """One step of greedy decoding with `length` tokens in the state, and in translation as many in the source."""
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
    """The decoding step of a model of shapes, its parameters and state laid out on the mesh."""
    arrays = arrays_of(model)
    placed = jax.tree.map(_shape_at, arrays, shardings(arrays, mesh))
    placed = {name: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding) for name, a in placed.items()}
    generation, sizes = generation_of_shapes(model, batch, length), dict(mesh.shape)

    def at(leaf: Any, dimensions: tuple = ()) -> jax.ShapeDtypeStruct:
        return _shape_at(leaf, NamedSharding(mesh, partition_spec(dimensions, leaf.shape, sizes)))

    def laid_out(layers: tuple | None) -> tuple | None:  # by texts and by heads, as the model itself lays it out
        if layers is None:
            return None
        names = [KV_CACHE if isinstance(layer, KVCache) else LINEAR_STATE for layer in layers]
        fields = [layer._asdict().items() for layer in layers]
        return tuple(
            type(layer)(*(leaf if leaf is None else at(leaf, known.get(name, ())) for name, leaf in found))
            for layer, known, found in zip(layers, names, fields)
        )

    by_rows, state = ("batch",), generation.state
    state = type(state)(laid_out(state.layers), at(state.position, by_rows), laid_out(state.source))
    last, done, key = at(generation.last, by_rows), at(generation.done, by_rows), at(generation.key)
    graph, parameters = nnx.split(with_arrays(model, placed))
    return scan_steps.lower(graph, parameters, type(generation)(state, last, done, key), 1, Sampling(), NO_END)


def compile_program(lowered: jax.stages.Lowered) -> CompiledProgram:
    """Compiles, and reads off what the compiler says of the result."""
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        needed = next((line for line in str(error).splitlines() if "Used" in line), str(error).splitlines()[0])
        raise DoesNotFit(
            f"it does not fit: {needed.strip()[:300]}. Divide it more (config.mesh.fsdp, config.mesh.tensor), compute "
            "again what can be (config.model.remat=True), or take smaller parts (config.accumulate)"
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
