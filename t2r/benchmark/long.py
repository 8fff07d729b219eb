"""One long generation in one go: speed and memory of each piece of it, from the first token to the last."""

import functools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from t2r.benchmark.models import INT8, UNCHANGED, Request, label, parse_fields
from t2r.benchmark.shared import MIB, Output, Results, check_fits, describe_device, finish, open_results
from t2r.benchmark.steps import DecodingProgram, attention_bytes
from t2r.console import Progress, table
from t2r.data.tokenizer import Tokenizer, prompt_ids
from t2r.decode.generate import packed_weights, prefill
from t2r.decode.sampling import Sampling
from t2r.environment import process_bytes, total_bytes
from t2r.errors import InputError
from t2r.importers import by_name
from t2r.model.parameters import arrays_of, with_arrays
from t2r.model.rows import for_decoding
from t2r.model.transformer import LanguageModel
from t2r.plots import COLORS, RNN, save, styled

PIECES = 100  # that a generation is divided into, each of which is timed
SHOWN = 40  # tokens of the beginning and of the end, as text


class LongOptions(NamedTuple):
    """Which weights a model has, and how tokens are chosen."""

    model: str | None = None  # the directory of a model that is measured as it is; None: weights are random
    sampling: Sampling = Sampling()
    seed: int = 0


def benchmark_long(request: Request, options: LongOptions = LongOptions(), output: Output = Output()) -> dict[str, Any]:
    """Generates as many tokens as the request's only length says, by its only model.

    Prints a table, writes JSON and a plot, and returns a summary.
    """
    (name,), (tokens,) = request.models, request.lengths
    if request.models[name].encoder_layers:
        raise InputError("benchmark long is for language models, and this is a translation model")
    results = open_results("long", output)
    key = {"what": "long", **request.row(name), "length": tokens, **request.common}
    key |= {"temperature": options.sampling.temperature, "top_k": options.sampling.top_k, "seed": options.seed}
    line = results.get_or_measure(key, functools.partial(measure, request, options))
    plots = []
    if line and "does_not_fit" not in line:
        print(long_table(line))
        plots = plot_long(results, request, name, line)
    summary = {figure: value for figure, value in (line or {}).items() if figure not in ("asked", "environment")}
    summary.pop("pieces", None)
    finish(results, output, {"identity": request.identity, **summary})
    return {**summary, "left_out": len(results.left_out), "plots": plots}


def measure(request: Request, options: LongOptions) -> dict[str, Any]:
    """Generates in pieces of one size, so that one program serves all of them; texts do not end at an end token."""
    (name,), (tokens,) = request.models, request.lengths
    model, tokenizer = load_model(request, options.model)
    count = min(PIECES, tokens)
    piece = -(-tokens // count)
    start = [0] if tokenizer is None else prompt_ids(tokenizer, [])
    generation = prefill(model, [start] * request.batch, piece * count, seed=options.seed)
    packed = None if request.is_plain(name) else packed_weights(model, request.batch)
    program = DecodingProgram.compile(model, generation, piece, packed, options.sampling)
    check_fits(program.compiled, already=total_bytes((program.arrays, packed, generation)))
    size, pieces, shown = attention_bytes(generation.state), [], []
    with Progress(name, piece * count) as progress:
        for done in range(piece, piece * count + 1, piece):
            began = time.perf_counter()
            generation, generated = jax.block_until_ready(program(generation))
            seconds = time.perf_counter() - began
            ids = np.asarray(generated)[:, 0].tolist()
            pieces.append({"tokens": done, "seconds": seconds, **memory_in_use()})
            shown = [*shown[:1], ids[-SHOWN:]] if shown else [ids[:SHOWN]] * 2
            progress.advance(piece, tokens_per_second=request.batch * piece / seconds)
    texts = {} if tokenizer is None else dict(zip(("beginning", "end"), map(tokenizer.decode, shown)))
    return {
        "tokens": piece * count,
        "batch": request.batch,
        **flatness(pieces, request.batch * piece),
        "state_bytes": size,
        "compile_seconds": program.compile_seconds,
        "random_weights": tokenizer is None,
        **texts,
        "pieces": pieces,
    }


def load_model(request: Request, directory: str | None) -> tuple[LanguageModel, Tokenizer | None]:
    """The model and tokenizer of a directory; without one, random weights, and None."""
    (name,) = request.models
    if directory is None:
        return request.model(name), None
    model, tokenizer, _ = by_name.load(directory, dtype=request.dtype, **parse_fields(request.identity["fields"]))
    arrays = arrays_of(model)
    model = with_arrays(model, {path: jnp.asarray(array, request.dtype) for path, array in arrays.items()})
    return for_decoding(model, "int8") if request.weights(name) == "int8" else model, tokenizer


def memory_in_use() -> dict[str, int | None]:
    """Bytes that the device has allocated, now and at most so far; on CPUs, those of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        return {"memory_bytes": process_bytes()}
    return {"memory_bytes": stats["bytes_in_use"], "peak_bytes": stats.get("peak_bytes_in_use")}


def flatness(pieces: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Speed and memory in all, and of the first and the last tenth of the pieces of so many tokens each."""
    tenth = max(len(pieces) // 10, 1)
    ends = {"first": pieces[:tenth], "last": pieces[-tenth:]}
    speeds = {name: tokens / statistics.median(piece["seconds"] for piece in part) for name, part in ends.items()}
    memory = {name: [piece["memory_bytes"] for piece in part] for name, part in ends.items()}
    known = None not in memory["first"] + memory["last"]
    return {
        "seconds": sum(piece["seconds"] for piece in pieces),
        "tokens_per_second": tokens * len(pieces) / sum(piece["seconds"] for piece in pieces),
        **{f"{name}_tokens_per_second": speed for name, speed in speeds.items()},
        "last_over_first": speeds["last"] / speeds["first"],
        **{f"{name}_memory_bytes": max(sizes) if known else None for name, sizes in memory.items()},
    }


def long_table(line: dict[str, Any]) -> str:
    """Speed and memory of every tenth of the generation."""
    pieces = line["pieces"]
    tokens = line["batch"] * line["tokens"] / len(pieces)
    shown = pieces[:: -(-len(pieces) // 10)] + pieces[-1:]
    rows = [
        (piece["tokens"], tokens / piece["seconds"], piece["memory_bytes"] / MIB if piece["memory_bytes"] else "")
        for piece in {piece["tokens"]: piece for piece in shown}.values()
    ]
    weights = line["asked"]["weights"] + (", random" if line["random_weights"] else "")
    title = (
        f"{line['asked']['row'].removesuffix(INT8)} ({weights}): last over first tenth {line['last_over_first']:.1%}"
    )
    return table(["tokens", "tokens/s", "memory, MiB"], rows) + f"\n{title}"


def plot_long(results: Results, request: Request, name: str, line: dict[str, Any]) -> list[str]:
    """Speed and memory against the number of tokens generated, from zero; returns the paths of the plot."""
    if results.figure() is None:
        return []
    pieces, tokens = line["pieces"], line["batch"] * line["tokens"] / len(line["pieces"])
    done = [piece["tokens"] for piece in pieces]
    speeds = {"tokens/s": [tokens / piece["seconds"] for piece in pieces]}
    memory = {"memory, MiB": [piece["memory_bytes"] / MIB for piece in pieces if piece["memory_bytes"]]}
    figure = Figure(figsize=(7.2, 5.2))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (unit, values) in zip(panels, (speeds | memory).items()):
        axes.plot(done[: len(values)], values, color=COLORS.get(name.removesuffix(INT8), RNN))
        axes.set(ylabel=unit, ylim=(0, 1.25 * max(values, default=1)))
    panels[-1].set(xlabel="generated tokens", xlim=(0, done[-1]))
    panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    title = f"One generation, {request.title}"
    title += "" if name == UNCHANGED else f": {label(name, request.models[name])}"
    panels[0].set_title(f"{title}\n{describe_device(results)}", fontsize=10)
    styled(figure)
    return save(figure, results.figure())
