"""Decoding speed of several models at several lengths: measured on this machine, or estimated by the TPU compiler."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from t2r.benchmark import peers
from t2r.benchmark.compile import compile_step, describe_topology, topology_devices, topology_of
from t2r.benchmark.floor import (
    STATED_BANDWIDTH,
    Machine,
    StepCost,
    measure_machine,
    measured_crossover,
    peak_flops,
    predicted_crossover,
    step_cost,
)
from t2r.benchmark.models import INT8, Request, label
from t2r.benchmark.plots import Curve, length_plot
from t2r.benchmark.shared import MIB, DoesNotFit, Output, Results, by_model, describe_device, finish, open_results
from t2r.benchmark.steps import Decoder, DecodeSpeed, abstract_generation, attention_bytes
from t2r.console import say, table
from t2r.errors import InputError, raise_all
from t2r.layout import AXES
from t2r.model.state_size import state_bytes
from t2r.model.transformer import LanguageModel
from t2r.plots import save
from t2r.training.sharding import make_mesh


class DecodeOptions(NamedTuple):
    """How decoding is measured."""

    steps: int = 256  # timed steps per repetition
    whole: bool = False  # time all steps of a generation
    seconds: float = 2.0  # minimum total time of the repetitions
    prompt: int = 0  # language models: also time a prefill of this many tokens; 0: none
    largest_batch_at: tuple[int, ...] = ()  # lengths at which the largest batch is searched
    beam: int = 0  # translation: also time steps of beam search with so many beams; 0: none

    @property
    def method(self) -> str:
        """A description for the report."""
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
    peer_names: Sequence[str] = tuple(peers.GENERATION),
    peer_model: str | None = None,
) -> dict[str, Any]:
    """Measures all models at all lengths, other libraries at `peer_lengths`; with a TPU `topology`, compiles instead.

    Weights are random. With `peer_model`, from which the request's model was imported, all models have its weights.

    Prints tables, writes JSON and a plot, and returns a summary.
    """
    if topology and peer_lengths:
        raise InputError("--peers measures, and --topology only compiles: leave one of them out")
    peers.check(request, peer_names, peer_lengths, peer_model)
    request = request._replace(own_weights=peer_model is not None)
    check_beam(request, options.beam, topology)
    if options.prompt and any(config.encoder_layers for config in request.models.values()):
        raise InputError(f"--prompt={options.prompt} is for language models: a translation begins with its source")
    if peer_model is not None:
        peers.check_original(request.source, peer_model)  # last, as it reads both models
    topology, axes = topology and topology_of(topology), dict.fromkeys(AXES, 1) | (mesh or {})
    devices = math.prod(axes.values())
    results = open_results("decode", output, describe_topology(topology) if topology else None)
    machine = describe_machine(results, topology, devices)
    if topology:
        compile_models(results, request, machine, topology, axes)
    else:
        for name in request.models:
            measure_model(results, request, name, machine, options)
        if peer_lengths:
            peers.measure_generation(results, request, sorted(peer_lengths), peer_names, peer_model)
    summary = summary_of(results, request, machine)
    for lines in tables(results, summary):
        print(lines + "\n")
    method = "one compiled step" if topology else options.method
    print(f"timed: {method}")
    plots = plot_speed(results, request, describe_device(results, devices))
    finish(results, output, {"identity": request.identity, "method": method, "bandwidth": machine.bandwidth, **summary})
    return {**summary, "bandwidth": machine.bandwidth, "left_out": len(results.left_out), "plots": plots}


def check_beam(request: Request, beam: int, topology: str | None) -> None:
    """Refuses a beam search that cannot be timed."""
    problems = []
    if beam and topology:
        problems.append("steps of beam search are measured, not estimated: leave out --topology")
    if beam and not all(config.encoder_layers for config in request.models.values()):
        problems.append("beam search is for translation, and this is a language model: try --preset=paper_mt")
    if beam > request.batch:
        problems.append(f"a batch of {request.batch} sequences has no place for {beam} beams: --batch={beam} or more")
    raise_all(f"--beam={beam}:", problems)


def describe_machine(results: Results, topology: str | None, devices: int = 1) -> Machine:
    """The machine that floors are computed for: measured bandwidth, or the vendor's figures for a TPU topology."""
    if topology:
        bandwidth, flops = STATED_BANDWIDTH[topology.partition(":")[0]], peak_flops(topology_devices(topology)[0])
        return Machine(devices * bandwidth, flops and devices * flops)

    def measure() -> dict[str, Any]:
        machine, speeds = measure_machine()
        return {"bandwidth": machine.bandwidth, **speeds}

    line = results.get_or_measure({"what": "bandwidth"}, measure, ignore_budget=True)
    return Machine(line["bandwidth"], peak_flops(jax.devices()[0]))


def measure_model(results: Results, request: Request, name: str, machine: Machine, options: DecodeOptions) -> None:
    """Measures one model at all lengths. Its weights exist only within this call, and only if a result is missing."""
    model = request.abstract(name)
    translates = bool(model.config.encoder_layers)

    @functools.cache
    def decoder() -> Decoder:
        say(f"{name}: {model.config.layers} layers")
        return Decoder(request.model(name), repeat_for=options.seconds, plain=request.is_plain(name))

    def find(what: str, length: int, measure: Callable[[], dict[str, Any]], **key: Any) -> None:
        row = {"what": what, **request.row(name), "length": length}
        results.get_or_measure({**row, **request.common, **key}, measure)

    def decode(length: int) -> dict[str, Any]:
        speed = decoder().steps(request.batch, length, options.steps, whole=options.whole)
        say(f"{name}, {length} tokens: {speed.step_seconds * 1e6:,.0f} µs per step")
        return figures(speed, step_at(model, request.batch, length, whole=options.whole), machine)

    def prefill(length: int) -> dict[str, Any]:
        times = (decoder().encoding if translates else decoder().prompts)(request.batch, length)
        return {"prefill": times._asdict(), "tokens_per_second": request.batch * length / times.seconds}

    def search(length: int) -> dict[str, Any]:
        # As many sequences in both, so that a step does the same work but for the choice and order of the beams.
        sequences = request.batch // options.beam * options.beam
        greedy = decoder().steps(sequences, length, options.steps)
        speed = decoder().beam_steps(sequences, length, options.steps, options.beam)
        ratio = speed.step_seconds / greedy.step_seconds
        say(f"{name}, {length} tokens, beam {options.beam}: {speed.step_seconds * 1e6:,.0f} µs, {ratio:.2f} × greedy")
        times = {"greedy_step_seconds": greedy.step_seconds, "over_greedy": ratio}
        return {**figures(speed, step_at(model, sequences, length), machine), **times}

    def largest(length: int) -> dict[str, Any]:
        speed, predicted = decoder().largest_batch(length, min(options.steps, 16))
        say(f"{name}, {length} tokens: {speed.batch} sequences at once, {speed.tokens_per_second:,.0f} tokens/s")
        return {**figures(speed, step_at(model, speed.batch, length), machine), "predicted_batch": predicted}

    for length in request.lengths:
        find("decode", length, functools.partial(decode, length), steps=length if options.whole else options.steps)
    for length in request.lengths if translates else [options.prompt] if options.prompt else []:
        find("prefill", length, functools.partial(prefill, length))
    for length in request.lengths if translates and options.beam else []:
        find("beam", length, functools.partial(search, length), steps=options.steps, beam=options.beam)
    for length in options.largest_batch_at:
        find("largest batch", length, functools.partial(largest, length), batch=None)


def step_at(model: LanguageModel, batch: int, length: int, *, whole: bool = False) -> StepCost:
    """The cost of a step at this length; with `whole`, the mean cost of a step from the first token to this length."""
    source = length if model.config.encoder_layers else 0
    return step_cost(model, batch, (length + 1) / 2 if whole else length, source)


def figures(speed: DecodeSpeed, step: StepCost, machine: Machine) -> dict[str, Any]:
    """The entries of a measurement and of its floor in the results."""
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
    """Bytes and operations of a step, its floor, and the fraction of the floor's speed that was reached."""
    floor = step.floor(machine)
    bytes_and_flops = {name: getattr(step, name) for name in step._fields}
    return {**bytes_and_flops, "floor_seconds": floor, "fraction_of_floor": floor / seconds if seconds else None}


def compile_models(results: Results, request: Request, machine: Machine, topology: str, axes: dict[str, int]) -> None:
    """Compiles every model at every length for a TPU; a program that serves several lengths is compiled once."""
    mesh = make_mesh(ConfigDict(axes), topology_devices(topology))
    for name in request.models:
        model = request.abstract(name)
        programs: dict[Any, dict[str, Any]] = {}  # by the model of their state

        def compiled(length: int, key: Any, name=name, model=model, programs=programs) -> dict[str, Any]:
            if key not in programs:
                say(f"{name}, {length} tokens: compiling {model.config.layers} layers for {topology}")
                programs[key] = compile_step(model, topology, mesh, batch=request.batch, length=length)
            return programs[key]

        for length in request.lengths:
            key = {"what": "decode", **request.row(name), "length": length, **request.common, "mesh": axes}
            results.get_or_measure(key, functools.partial(estimate_at, model, request.batch, length, machine, compiled))


def estimate_at(
    model: LanguageModel, batch: int, length: int, machine: Machine, compiled: Callable[[int, Any], dict[str, Any]]
) -> dict[str, Any]:
    """The compiler's report of a step; only the size of the state if the step does not fit."""
    generation = abstract_generation(model, batch, length)
    formula = state_bytes(model.config, batch, length, length if model.config.encoder_layers else 0)
    counted = {"estimate": True, "state_bytes": attention_bytes(generation.state), "formula_bytes": formula}
    try:
        report = compiled(length, tuple(leaf.shape for leaf in jax.tree.leaves(generation)))
    except DoesNotFit as error:
        return {**counted, "does_not_fit": str(error).partition(". Divide")[0].removeprefix("it does not fit: ")}
    if not report["fits"]:
        needed, available = (report[name] / 2**30 for name in ("peak_bytes", "memory_bytes"))
        return {**counted, "does_not_fit": f"it needs {needed:.1f} of {available:.0f} GiB"}
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
        **floor_figures(step_at(model, batch, length), machine, seconds),
    }


def summary_of(results: Results, request: Request, machine: Machine) -> dict[str, Any]:
    """The main figures by model and length, and the length at which each model overtakes the transformer."""
    summary = {
        "tokens_per_second": by_model(results, "decode", "tokens_per_second"),
        "fraction_of_floor": by_model(results, "decode", "fraction_of_floor"),
        "prefill_tokens_per_second": by_model(results, "prefill", "tokens_per_second"),
        "beam_over_greedy": by_model(results, "beam", "over_greedy"),
        "largest_batch": by_model(results, "largest batch", "batch"),
        "largest_batch_tokens_per_second": by_model(results, "largest batch", "tokens_per_second"),
        "peers_tokens_per_second": by_model(results, "peer", "tokens_per_second"),
        "peers_same_tokens": by_model(results, "peer", "same_tokens"),
    }
    return {name: value for name, value in summary.items() if value} | {
        "crossover": _crossovers(results, request, machine)
    }


def _crossovers(results: Results, request: Request, machine: Machine) -> dict[str, Any]:
    seconds = by_model(results, "decode", "step_seconds")
    if "transformer" not in request.models:
        return {}
    transformer = request.abstract("transformer")
    models = {name: request.abstract(name) for name in request.models if not name.startswith("transformer")}
    return {
        name: {
            "predicted": predicted_crossover(transformer, model, request.batch, machine),
            "found": measured_crossover(seconds.get("transformer", {}), seconds.get(name, {})),
        }
        for name, model in models.items()
    }


def tables(results: Results, summary: dict[str, Any]) -> Iterator[str]:
    """The results as tables."""
    estimate = any(line.get("estimate") for line in results.lines)
    figures = ["µs/step", "tokens/s", "spread", "floor, µs", "of floor", "state, MiB"]
    headers = ["model", "weights", "tokens", "batch", *figures]
    rows = [_table_row(line) for what in ("decode", "largest batch") for line in results.fitting_lines(what)]
    if rows:
        note = "\n(the compiler's estimate; the floor uses the vendor's bandwidth)" if estimate else ""
        yield table(headers, rows) + note
    prefills = results.fitting_lines("prefill")
    if prefills:
        rows = [(line["asked"]["row"], line["asked"]["length"], line["prefill"]["seconds"] * 1e3) for line in prefills]
        yield table(["prefill", "tokens", "ms"], rows)
    searches = results.fitting_lines("beam")
    if searches:
        rows = [_search_row(line) for line in searches]
        yield table(["beam search", "beams", "tokens", "sequences", "µs/step", "greedy, µs/step", "ratio"], rows)
    peer_lines = results.fitting_lines("peer")
    if peer_lines:
        headers = ["other libraries", "tokens", "tokens/s", "first tokens equal to ours"]
        yield table(headers, map(_peer_row, peer_lines))
    crossovers = summary["crossover"]
    if crossovers:
        rows = [
            (name, "never" if pair["predicted"] is None else pair["predicted"], pair["found"] or "")
            for name, pair in crossovers.items()
        ]
        yield table(["overtakes the transformer at", "predicted", "estimated" if estimate else "measured"], rows)


def _table_row(line: dict[str, Any]) -> tuple:
    seconds, floor, spread = line["step_seconds"], line.get("floor_seconds"), line.get("spread")
    return (
        line["asked"]["row"].removesuffix(INT8),
        line["asked"]["weights"],
        line["asked"]["length"],
        line.get("batch") or line["asked"]["batch"],
        seconds * 1e6 if seconds else "none given",
        line["tokens_per_second"] or "",
        "" if spread is None else f"{spread:.1%}",
        floor * 1e6 if floor else "",
        f"{floor / seconds:.0%}" if floor and seconds else "",
        line["state_bytes"] / MIB,
    )


def _peer_row(line: dict[str, Any]) -> tuple:
    same = f"{line['same_tokens']} of {line['compared_tokens']}" if "same_tokens" in line else ""
    return (line["asked"]["row"], line["asked"]["length"], line["tokens_per_second"], same)


def _search_row(line: dict[str, Any]) -> tuple:
    asked, times = line["asked"], (line["step_seconds"] * 1e6, line["greedy_step_seconds"] * 1e6)
    return (asked["row"], asked["beam"], asked["length"], line["batch"], *times, line["over_greedy"])


def plot_speed(results: Results, request: Request, device: str) -> list[str]:
    """Speed against length, as in the paper's Figure 2; returns the paths of the plot."""
    speeds, spreads = by_model(results, "decode", "tokens_per_second"), by_model(results, "decode", "spread")
    floors, curves = by_model(results, "decode", "floor_seconds"), []
    for name, points in speeds.items():
        limit = {length: request.batch / seconds for length, seconds in floors.get(name, {}).items()}
        curves.append(Curve(name, label(name, request.models[name]), points, spreads.get(name), limit=limit))
    for name, points in by_model(results, "peer", "tokens_per_second").items():
        curves.append(Curve(name, name.replace("llama_cpp", "llama.cpp").replace("_", " "), points))
    if not curves or results.figure() is None:
        return []
    unit = "tokens/s" + (", the compiler's estimate" if any(line.get("estimate") for line in results.lines) else "")
    return save(length_plot(curves, title=f"Decoding speed, {request.title}\n{device}", unit=unit), results.figure())
