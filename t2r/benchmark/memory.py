"""The attention state in bytes: by the formula, of the state itself, in the compiled program, and on the device."""

import functools
import math
from typing import Any

import jax
from flax import nnx

from t2r.benchmark.compile import describe_topology
from t2r.benchmark.decode import compile_rows, machine_of
from t2r.benchmark.floor import state_bytes
from t2r.benchmark.models import Request, label, model_of_shapes, random_model
from t2r.benchmark.plots import Curve, length_plot, save
from t2r.benchmark.shared import (
    MIB,
    Output,
    Results,
    by_row,
    check_fits,
    finish,
    is_out_of_memory,
    open_results,
    peak_bytes,
    where,
)
from t2r.benchmark.steps import Decoder, attention_bytes, filled, generation_of_shapes, rewound
from t2r.console import say, table
from t2r.environment import total_bytes
from t2r.layout import AXES
from t2r.model.parameters import arrays_of

STEPS = 2  # a loop, as in decoding


def benchmark_memory(
    request: Request, output: Output = Output(), *, topology: str | None = None, mesh: dict[str, int] | None = None
) -> dict[str, Any]:
    """The state of all rows at all lengths, counted, compiled and measured; or as a TPU's compiler lays it out."""
    axes = dict.fromkeys(AXES, 1) | (mesh or {})
    devices = math.prod(axes.values())
    results = open_results("memory", output, describe_topology(topology) if topology else None)
    if topology:
        compile_rows(results, request, machine_of(results, topology, devices), topology, axes)
    else:
        measure_rows(results, request)
    print(memory_table(results))
    plots = plot_memory(results, request, where(results, devices))
    summary = summary_of(results)
    finish(results, output, {"identity": request.identity, **summary})
    return {**summary, "left_out": len(results.left_out), "plots": plots}


def measure_rows(results: Results, request: Request) -> None:
    """All models at all lengths, those that need least first: a device reports the highest peak so far."""
    decoders = {
        name: Decoder(model_of_shapes(config, request.dtype), plain=True) for name, config in request.rows.items()
    }

    def needs(pair: tuple[str, int]) -> int:
        model = decoders[pair[0]].model
        return total_bytes(arrays_of(model)) + state_bytes(model.config, request.batch, pair[1], pair[1])

    for name, length in sorted(((name, length) for name in decoders for length in request.lengths), key=needs):
        line = {"what": "decode", "row": name, "length": length, **request.common}
        say(f"{name}, {length} tokens")
        results.find(line, functools.partial(measure_state, decoders[name], request.batch, length))


def measure_state(decoder: Decoder, batch: int, length: int) -> dict[str, Any]:
    """One model of shapes at one length: counted, compiled, and run where the device reports its memory."""
    config = decoder.model.config
    compiled, _, _, compile_seconds = decoder.program(batch, length, min(STEPS, length))
    generation = generation_of_shapes(decoder.model, batch, length)
    memory = compiled.memory_analysis()
    found = {
        "state_bytes": attention_bytes(generation.state),
        "formula_bytes": state_bytes(config, batch, length, length if config.encoder_layers else 0),
        "program_state_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": peak_bytes(compiled),
        "compile_seconds": compile_seconds,
    }
    if jax.devices()[0].memory_stats() is None:
        return found
    try:
        check_fits(compiled, already=0)
        _, arrays = nnx.split(random_model(config, config.dtype))
        return found | _on_device(compiled, arrays, generation, length)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {**found, "does_not_fit": next(iter(str(error).splitlines()), "")[:300]}


def _on_device(compiled: jax.stages.Compiled, arrays: Any, shapes: Any, length: int) -> dict[str, int]:
    """What the state takes of the device's memory, and the device's peak since the process began."""
    before = jax.devices()[0].memory_stats()["bytes_in_use"]
    generation = jax.block_until_ready(rewound(filled(shapes), length - min(STEPS, length)))
    taken = jax.devices()[0].memory_stats()["bytes_in_use"] - before
    jax.block_until_ready(compiled(arrays, generation, None))
    return {"device_bytes": taken, "device_peak_bytes": jax.devices()[0].memory_stats().get("peak_bytes_in_use")}


def summary_of(results: Results) -> dict[str, Any]:
    """Bytes by row and length."""
    names = ("state_bytes", "formula_bytes", "program_state_bytes", "device_peak_bytes")
    return {name: found for name in names if (found := by_row(results, "decode", name))}


def memory_table(results: Results) -> str:
    """In MiB, for people."""
    columns = ("state_bytes", "formula_bytes", "program_state_bytes", "temporary_bytes", "program_bytes",
               "device_bytes", "device_peak_bytes")  # fmt: skip
    lines = sorted(results.all_of("decode"), key=lambda line: (line["asked"]["row"], line["asked"]["length"]))
    known = [name for name in columns if any(line.get(name) is not None for line in lines)]
    rows = [
        (line["asked"]["row"], line["asked"]["length"], *(line[name] / MIB if name in line else "" for name in known))
        for line in lines
    ]
    headers = [name.removesuffix("_bytes").replace("_", " ") for name in known]
    return table(["MiB", "tokens", *headers], rows)


def plot_memory(results: Results, request: Request, where: str) -> list[str]:
    """The paper's Figure 3."""
    counted, laid_out = (
        {
            row: {length: value / MIB for length, value in found.items()}
            for row, found in by_row(results, "decode", name).items()
        }
        for name in ("state_bytes", "program_state_bytes")
    )
    if not counted or results.figure() is None:
        return []
    curves = [
        Curve(name, label(name, request.rows[name]), points, bound=laid_out.get(name))
        for name, points in counted.items()
    ]
    title = f"Attention state, {request.title}\n{where}"
    figure = length_plot(curves, title=title, unit="MiB", bound="as the compiled program lays it out")
    return save(figure, results.figure())
