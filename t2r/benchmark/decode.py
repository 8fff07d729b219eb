"""Decoding of several models at several lengths: measured here, or compiled for a TPU that is not here."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from t2r.benchmark import peers
from t2r.benchmark.compile import compile_step, describe_topology, devices_of
from t2r.benchmark.floor import (
    STATED_BANDWIDTH,
    Machine,
    StepCost,
    measure_machine,
    measured_crossover,
    peak,
    predicted_crossover,
    state_bytes,
    step_of,
)
from t2r.benchmark.models import ROWS, Request, label, model_of_shapes, random_model
from t2r.benchmark.plots import Curve, length_plot, save
from t2r.benchmark.shared import MIB, DoesNotFit, Output, Results, by_row, finish, open_results, where
from t2r.benchmark.steps import Decoder, DecodeSpeed, attention_bytes, generation_of_shapes
from t2r.console import say, table
from t2r.layout import AXES
from t2r.model.transformer import LanguageModel
from t2r.training.sharding import make_mesh


class DecodeOptions(NamedTuple):
    """How decoding is measured."""

    steps: int = 256
    whole: bool = False
    seconds: float = 2.0  # of repetitions
    prompt: int = 0
    largest_batch_at: tuple[int, ...] = ()  # lengths

    @property
    def method(self) -> str:
        """For the report."""
        if self.whole:
            return "whole generations, from the first token"
        return f"the last {self.steps} steps of each length, in one compiled loop; caches have their whole capacity"


def benchmark_decode(
    request: Request,
    options: DecodeOptions = DecodeOptions(),
    output: Output = Output(),
    *,
    topology: str | None = None,
    mesh: dict[str, int] | None = None,
    peer_lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """Measures, or for a TPU `topology` compiles, all rows at all lengths; other libraries at `peer_lengths`."""
    axes = dict.fromkeys(AXES, 1) | (mesh or {})
    devices = math.prod(axes.values())
    results = open_results("decode", output, describe_topology(topology) if topology else None)
    machine = machine_of(results, topology, devices)
    if topology:
        compile_rows(results, request, machine, topology, axes)
    else:
        for name in request.rows:
            measure_row(results, request, name, machine, options)
        if peer_lengths:
            peers.measure_generation(results, request, sorted(peer_lengths))
    summary = summary_of(results, request, machine)
    for lines in tables(results, summary):
        print(lines + "\n")
    method = "one compiled step" if topology else options.method
    print(f"timed: {method}")
    plots = plot_speed(results, request, where(results, devices))
    finish(results, output, {"identity": request.identity, "method": method, "bandwidth": machine.bandwidth, **summary})
    return {**summary, "bandwidth": machine.bandwidth, "left_out": len(results.left_out), "plots": plots}


def machine_of(results: Results, topology: str | None, devices: int = 1) -> Machine:
    """What floors are computed with: bandwidth as measured, or for TPUs that are not there as their maker states it."""
    if topology:
        bandwidth, flops = STATED_BANDWIDTH[topology.partition(":")[0]], peak(devices_of(topology)[0])
        return Machine(devices * bandwidth, flops and devices * flops)

    def measure() -> dict[str, Any]:
        machine, speeds = measure_machine()
        return {"bandwidth": machine.bandwidth, **speeds}

    line = results.find({"what": "bandwidth"}, measure, always=True)
    return Machine(line["bandwidth"], peak(jax.devices()[0]))


def measure_row(results: Results, request: Request, name: str, machine: Machine, options: DecodeOptions) -> None:
    """One model at all lengths; its weights are made when the first figure is missing, and gone at the end."""
    shapes = model_of_shapes(request.rows[name], request.dtype)
    translates = bool(shapes.config.encoder_layers)

    @functools.cache
    def decoder() -> Decoder:
        say(f"{name}: {shapes.config.layers} layers")
        plain = name in ROWS and ROWS[name].plain
        return Decoder(random_model(request.rows[name], request.dtype), repeat_for=options.seconds, plain=plain)

    def find(what: str, length: int, measure: Callable[[], dict[str, Any]], **more: Any) -> None:
        results.find({"what": what, "row": name, "length": length, **request.common, **more}, measure)

    def decode(length: int) -> dict[str, Any]:
        speed = decoder().steps(request.batch, length, options.steps, whole=options.whole)
        say(f"{name}, {length} tokens: {speed.step_seconds * 1e6:,.0f} µs a step")
        return figures(speed, step_at(shapes, request.batch, length, whole=options.whole), machine)

    def prefill(length: int) -> dict[str, Any]:
        times = (decoder().encoding if translates else decoder().prompts)(request.batch, length)
        return {"prefill": times._asdict(), "tokens_per_second": request.batch * length / times.seconds}

    def largest(length: int) -> dict[str, Any]:
        speed, predicted = decoder().largest_batch(length, min(options.steps, 16))
        say(f"{name}, {length} tokens: {speed.batch} texts at once, {speed.tokens_per_second:,.0f} tokens/s")
        return {**figures(speed, step_at(shapes, speed.batch, length), machine), "predicted_batch": predicted}

    for length in request.lengths:
        find("decode", length, functools.partial(decode, length), steps=length if options.whole else options.steps)
    for length in request.lengths if translates else [options.prompt] if options.prompt else []:
        find("prefill", length, functools.partial(prefill, length))
    for length in options.largest_batch_at:
        find("largest batch", length, functools.partial(largest, length), batch=None)


def step_at(shapes: LanguageModel, batch: int, length: int, *, whole: bool = False) -> StepCost:
    """What a step must do at the end of a text of this length; over a `whole` one, half of it is there on average."""
    source = length if shapes.config.encoder_layers else 0
    return step_of(shapes, batch, (length + 1) / 2 if whole else length, source)


def figures(speed: DecodeSpeed, step: StepCost, machine: Machine) -> dict[str, Any]:
    """A measurement beside its floor."""
    return {
        "step_seconds": speed.step_seconds,
        "tokens_per_second": speed.tokens_per_second,
        "spread": speed.spread,
        "compile_seconds": speed.compile_seconds,
        "batch": speed.batch,
        "steps": speed.steps,
        "state_bytes": speed.state_bytes,
        **floor_figures(step, machine, speed.step_seconds),
    }


def floor_figures(step: StepCost, machine: Machine, seconds: float | None) -> dict[str, Any]:
    """Bytes and operations, the floor, and how much of its speed is reached."""
    floor = step.floor(machine)
    bytes_and_flops = {name: getattr(step, name) for name in step._fields}
    return {**bytes_and_flops, "floor_seconds": floor, "fraction_of_floor": floor / seconds if seconds else None}


def compile_rows(results: Results, request: Request, machine: Machine, topology: str, axes: dict[str, int]) -> None:
    """Every model at every length, by the TPU compiler; a program that serves several lengths is compiled once."""
    mesh = make_mesh(ConfigDict(axes), devices_of(topology))
    for name, config in request.rows.items():
        shapes = model_of_shapes(config, request.dtype)
        programs: dict[Any, dict[str, Any]] = {}  # by the shapes of their state

        def compiled(length: int, key: Any, name=name, shapes=shapes, programs=programs) -> dict[str, Any]:
            if key not in programs:
                say(f"{name}, {length} tokens: compiling {shapes.config.layers} layers for {topology}")
                programs[key] = compile_step(shapes, topology, mesh, batch=request.batch, length=length)
            return programs[key]

        for length in request.lengths:
            line = {"what": "decode", "row": name, "length": length, **request.common, "mesh": axes}
            results.find(line, functools.partial(estimate_at, shapes, request.batch, length, machine, compiled))


def estimate_at(
    shapes: LanguageModel, batch: int, length: int, machine: Machine, compiled: Callable[[int, Any], dict[str, Any]]
) -> dict[str, Any]:
    """What the compiler says of a step; where it does not fit, the size of the state alone."""
    generation = generation_of_shapes(shapes, batch, length)
    formula = state_bytes(shapes.config, batch, length, length if shapes.config.encoder_layers else 0)
    counted = {"estimate": True, "state_bytes": attention_bytes(generation.state), "formula_bytes": formula}
    try:
        report = compiled(length, tuple(leaf.shape for leaf in jax.tree.leaves(generation)))
    except DoesNotFit as error:
        return {**counted, "does_not_fit": str(error).partition(". Divide")[0].removeprefix("it does not fit: ")}
    if not report["fits"]:
        needed, there = (report[name] / 2**30 for name in ("peak_bytes", "memory_bytes"))
        return {**counted, "does_not_fit": f"it needs {needed:.1f} of {there:.0f} GiB"}
    program, seconds = report["programs"]["decode"], report["step_seconds"]
    return {
        **counted,
        "step_seconds": seconds,
        "tokens_per_second": report["tokens_per_second"],
        "compile_seconds": program["compile_seconds"],
        "program_state_bytes": program["shared_bytes"],
        "argument_bytes": program["argument_bytes"],
        "temporary_bytes": program["temporary_bytes"],
        "program_bytes": program["peak_bytes"],
        **floor_figures(step_at(shapes, batch, length), machine, seconds),
    }


def summary_of(results: Results, request: Request, machine: Machine) -> dict[str, Any]:
    """The figures that matter, by row and length, and where each row overtakes the transformer."""
    summary = {
        "tokens_per_second": by_row(results, "decode", "tokens_per_second"),
        "fraction_of_floor": by_row(results, "decode", "fraction_of_floor"),
        "prefill_tokens_per_second": by_row(results, "prefill", "tokens_per_second"),
        "largest_batch": by_row(results, "largest batch", "batch"),
        "largest_batch_tokens_per_second": by_row(results, "largest batch", "tokens_per_second"),
        "peers_tokens_per_second": by_row(results, "peer", "tokens_per_second"),
    }
    return {name: value for name, value in summary.items() if value} | {
        "crossover": _crossovers(results, request, machine)
    }


def _crossovers(results: Results, request: Request, machine: Machine) -> dict[str, Any]:
    seconds = by_row(results, "decode", "step_seconds")
    if "transformer" not in request.rows:
        return {}
    shapes = {name: model_of_shapes(config, request.dtype) for name, config in request.rows.items()}
    slow = shapes.pop("transformer")
    return {
        name: {
            "predicted": predicted_crossover(slow, model, request.batch, machine),
            "found": measured_crossover(seconds.get("transformer", {}), seconds.get(name, {})),
        }
        for name, model in shapes.items()
    }


def tables(results: Results, summary: dict[str, Any]) -> Iterator[str]:
    """What was found, for people."""
    estimate = any(line.get("estimate") for line in results.lines)
    headers = ["row", "tokens", "texts", "µs a step", "tokens/s", "spread", "floor, µs", "of floor", "state, MiB"]
    rows = [_table_row(line) for what in ("decode", "largest batch") for line in results.of(what)]
    if rows:
        note = "\n(the compiler's estimate; the floor by the maker's bandwidth)" if estimate else ""
        yield table(headers, rows) + note
    prefills = results.of("prefill")
    if prefills:
        rows = [(line["asked"]["row"], line["asked"]["length"], line["prefill"]["seconds"] * 1e3) for line in prefills]
        yield table(["reading, apart", "tokens", "ms"], rows)
    peers = results.of("peer")
    if peers:
        rows = [(line["asked"]["row"], line["asked"]["length"], line["tokens_per_second"]) for line in peers]
        yield table(["other libraries", "tokens", "tokens/s"], rows)
    found = summary["crossover"]
    if found:
        rows = [
            (name, "never" if pair["predicted"] is None else pair["predicted"], pair["found"] or "")
            for name, pair in found.items()
        ]
        yield table(["overtakes the transformer at", "predicted", "estimated" if estimate else "measured"], rows)


def _table_row(line: dict[str, Any]) -> tuple:
    seconds, floor, spread = line["step_seconds"], line.get("floor_seconds"), line.get("spread")
    return (
        line["asked"]["row"],
        line["asked"]["length"],
        line.get("batch") or line["asked"]["batch"],
        seconds * 1e6 if seconds else "none given",
        line["tokens_per_second"] or "",
        "" if spread is None else f"{spread:.1%}",
        floor * 1e6 if floor else "",
        f"{floor / seconds:.0%}" if floor and seconds else "",
        line["state_bytes"] / MIB,
    )


def plot_speed(results: Results, request: Request, where: str) -> list[str]:
    """The paper's Figure 2."""
    speeds, spreads = by_row(results, "decode", "tokens_per_second"), by_row(results, "decode", "spread")
    floors, curves = by_row(results, "decode", "floor_seconds"), []
    for name, points in speeds.items():
        bound = {length: request.batch / seconds for length, seconds in floors.get(name, {}).items()}
        curves.append(Curve(name, label(name, request.rows[name]), points, spreads.get(name), bound))
    for name, points in by_row(results, "peer", "tokens_per_second").items():
        curves.append(Curve(name, name.replace("_", " "), points))
    if not curves or results.figure() is None:
        return []
    unit = "tokens/s" + (", the compiler's estimate" if any(line.get("estimate") for line in results.lines) else "")
    return save(length_plot(curves, title=f"Decoding speed, {request.title}\n{where}", unit=unit), results.figure())
