"""Bytes of the attention state: by formula, summed over its arrays, in the compiled program, and on the device."""

import functools
import math
from typing import Any

import jax
from flax import nnx

from t2r.benchmark.compile import describe_topology, topology_of
from t2r.benchmark.decode import compile_models, describe_machine
from t2r.benchmark.models import Request, label, random_model
from t2r.benchmark.plots import Curve, length_plot
from t2r.benchmark.shared import (
    MIB,
    Output,
    Results,
    by_model,
    check_fits,
    describe_device,
    finish,
    is_out_of_memory,
    open_results,
    peak_bytes,
)
from t2r.benchmark.steps import Decoder, abstract_generation, attention_bytes, random_generation, rewind
from t2r.console import say, table
from t2r.environment import total_bytes
from t2r.layout import AXES
from t2r.model.parameters import arrays_of
from t2r.model.state_size import state_bytes
from t2r.plots import save

STEPS = 2  # decoding steps in the compiled program: more than one, so that it has the loop of real decoding


def benchmark_memory(
    request: Request, output: Output = Output(), *, topology: str | None = None, mesh: dict[str, int] | None = None
) -> dict[str, Any]:
    """Measures the state of all models at all lengths; with a TPU `topology`, takes it from the compiler instead.

    Prints a table, writes JSON and a plot, and returns a summary.
    """
    topology, axes = topology and topology_of(topology), dict.fromkeys(AXES, 1) | (mesh or {})
    devices = math.prod(axes.values())
    results = open_results("memory", output, describe_topology(topology) if topology else None)
    if topology:
        compile_models(results, request, describe_machine(results, topology, devices), topology, axes)
    else:
        measure_models(results, request)
    print(memory_table(results))
    plots = plot_memory(results, request, describe_device(results, devices))
    summary = summary_of(results)
    finish(results, output, {"identity": request.identity, **summary})
    return {**summary, "left_out": len(results.left_out), "plots": plots}


def measure_models(results: Results, request: Request) -> None:
    """Measures all models at all lengths, the smallest first: a device reports only its highest peak so far."""
    decoders = {name: Decoder(request.abstract(name), plain=True) for name in request.models}

    def required_bytes(name_and_length: tuple[str, int]) -> int:
        name, length = name_and_length
        model = decoders[name].model
        return total_bytes(arrays_of(model)) + state_bytes(model.config, request.batch, length, length)

    cases = [(name, length) for name in decoders for length in request.lengths]
    for name, length in sorted(cases, key=required_bytes):
        key = {"what": "decode", "row": name, "length": length, **request.common}
        say(f"{name}, {length} tokens")
        results.get_or_measure(key, functools.partial(measure_state, decoders[name], request.batch, length))


def measure_state(decoder: Decoder, batch: int, length: int) -> dict[str, Any]:
    """Counts and compiles an abstract model at one length; also runs it if the device reports its memory use."""
    config = decoder.model.config
    compiled, _, _, compile_seconds = decoder.program(batch, length, min(STEPS, length))
    generation = abstract_generation(decoder.model, batch, length)
    memory = compiled.memory_analysis()
    sizes = {
        "state_bytes": attention_bytes(generation.state),
        "formula_bytes": state_bytes(config, batch, length, length if config.encoder_layers else 0),
        "program_state_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": peak_bytes(compiled),
        "compile_seconds": compile_seconds,
    }
    if jax.devices()[0].memory_stats() is None:
        return sizes
    try:
        check_fits(compiled, already=0)
        _, arrays = nnx.split(random_model(config, config.dtype))
        return sizes | _on_device(compiled, arrays, generation, length)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {**sizes, "does_not_fit": next(iter(str(error).splitlines()), "")[:300]}


def _on_device(compiled: jax.stages.Compiled, arrays: Any, abstract: Any, length: int) -> dict[str, int]:
    """Device memory that the state occupies, and the peak of the device since the process started."""
    before = jax.devices()[0].memory_stats()["bytes_in_use"]
    generation = jax.block_until_ready(rewind(random_generation(abstract), length - min(STEPS, length)))
    occupied = jax.devices()[0].memory_stats()["bytes_in_use"] - before
    jax.block_until_ready(compiled(arrays, generation, None))
    return {"device_bytes": occupied, "device_peak_bytes": jax.devices()[0].memory_stats().get("peak_bytes_in_use")}


def summary_of(results: Results) -> dict[str, Any]:
    """Bytes by kind, model and length."""
    names = ("state_bytes", "formula_bytes", "program_state_bytes", "device_peak_bytes")
    return {name: sizes for name in names if (sizes := by_model(results, "decode", name))}


def memory_table(results: Results) -> str:
    """A table of all sizes in MiB."""
    columns = ("state_bytes", "formula_bytes", "program_state_bytes", "temporary_bytes", "program_bytes",
               "device_bytes", "device_peak_bytes")  # fmt: skip
    lines = sorted(results.lines_of("decode"), key=lambda line: (line["asked"]["row"], line["asked"]["length"]))
    present = [name for name in columns if any(line.get(name) is not None for line in lines)]
    rows = [
        (line["asked"]["row"], line["asked"]["length"], *(line[name] / MIB if name in line else "" for name in present))
        for line in lines
    ]
    headers = [name.removesuffix("_bytes").replace("_", " ") + ", MiB" for name in present]
    return table(["model", "tokens", *headers], rows)


def plot_memory(results: Results, request: Request, device: str) -> list[str]:
    """State size against length, as in the paper's Figure 3; returns the paths of the plot."""
    counted, in_program = (
        {
            name: {length: size / MIB for length, size in sizes.items()}
            for name, sizes in by_model(results, "decode", figure).items()
        }
        for figure in ("state_bytes", "program_state_bytes")
    )
    if not counted or results.figure() is None:
        return []
    curves = [
        Curve(name, label(name, request.models[name]), points, beside=in_program.get(name))
        for name, points in counted.items()
    ]
    title = f"Attention state, {request.title}\n{device}"
    figure = length_plot(curves, title=title, unit="MiB", beside="in the compiled program")
    return save(figure, results.figure())
