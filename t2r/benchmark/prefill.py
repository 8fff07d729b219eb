"""Reading prompts of several lengths: time to the first token, tokens per second, and memory.

Prompts are read as `t2r generate` reads them, a chunk of tokens at a time, after each of which only the state is kept:
the memory of a recurrent model does not depend on the prompt's length.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from t2r.benchmark.models import INT8, Request, label
from t2r.benchmark.plots import Curve, length_plot
from t2r.benchmark.shared import (
    MIB,
    DoesNotFit,
    Output,
    Results,
    by_model,
    check_fits,
    describe_device,
    finish,
    open_results,
    peak_bytes,
    time_calls,
)
from t2r.benchmark.steps import DecodingProgram, abstract_generation, attention_bytes
from t2r.console import raise_if_interrupted, say, table
from t2r.decode.generate import Generation, default_chunk, packed_weights, read_chunk
from t2r.environment import total_bytes
from t2r.errors import InputError
from t2r.model.state_size import state_bytes
from t2r.model.transformer import DecodeState, LanguageModel
from t2r.plots import save


class PrefillOptions(NamedTuple):
    """How reading is measured."""

    chunk: int | None = None  # tokens that are read at once; None: as many as `t2r generate` reads
    seconds: float = 2.0  # minimum total time of the repetitions
    most_seconds: float = 120.0  # a prompt that takes longer is given up


def benchmark_prefill(
    request: Request, options: PrefillOptions = PrefillOptions(), output: Output = Output()
) -> dict[str, Any]:
    """Measures all models at all lengths of prompts. Prints a table, writes JSON and plots, and returns a summary."""
    if any(config.encoder_layers for config in request.models.values()):
        raise InputError("benchmark prefill is for language models; benchmark decode times the encoding of sources")
    options = options._replace(chunk=options.chunk or default_chunk(request.batch))
    results = open_results("prefill", output)
    # The smallest first: a device reports only its highest peak so far.
    for name in sorted(request.models, key=lambda name: state_bytes(request.models[name], 1, request.lengths[-1])):
        measure_model(results, request, name, options)
    print(prefill_table(results))
    plots = list(plot_prefill(results, request))
    summary = summary_of(results)
    finish(results, output, {"identity": request.identity, "chunk": options.chunk, **summary})
    return {**summary, "left_out": len(results.left_out), "plots": plots}


def measure_model(results: Results, request: Request, name: str, options: PrefillOptions) -> None:
    """Measures one model at all lengths. Its weights exist only within this call, and only if a result is missing."""

    @functools.cache
    def reader() -> "PromptReader":
        say(f"{name}: {request.models[name].layers} layers")
        return PromptReader(request.model(name), request.batch, options.chunk, plain=request.is_plain(name))

    def measure(length: int) -> dict[str, Any]:
        figures = reader().measure(length, options)
        say(f"{name}, {length} tokens: {figures['first_token_seconds']:.3f} s to the first token")
        return figures

    row = {"what": "prefill", **request.row(name), "chunk": options.chunk}
    for length in request.lengths:
        key = {**row, "length": length, "most_seconds": options.most_seconds, **request.common}
        results.get_or_measure(key, functools.partial(measure, length))


class PromptReader:
    """Reads prompts by one model. A program that serves several lengths is compiled once."""

    def __init__(self, model: LanguageModel, batch: int, chunk: int, *, plain: bool = False):
        self._model, self._batch, self._chunk = model, batch, chunk
        self._packed = None if plain else packed_weights(model, batch)
        self._graph, self._arrays = nnx.split(model)
        self._programs: dict[Any, Any] = {}

    def measure(self, length: int, options: PrefillOptions) -> dict[str, Any]:
        """Figures of prompts of `length` tokens and one more, which the first decoding step reads."""
        abstract = abstract_generation(self._model, self._batch, length + 1)
        whole, rest = divmod(length, self._chunk)
        sizes = [self._chunk] * whole + [rest] * bool(rest)
        readers = {size: self._reader(abstract.state, size) for size in set(sizes)}
        first_step = self._first_step(abstract)
        for compiled in (*readers.values(), first_step.compiled):
            check_fits(compiled, already=total_bytes((self._arrays, self._packed)))
        chunks = {size: (np.zeros((self._batch, size), np.int32), np.ones((self._batch, size), bool)) for size in sizes}

        def start() -> Generation:
            key = jax.random.key_data(jax.random.key(0))
            state = self._model.init_state(self._batch, length + 1)
            return Generation(state, jnp.zeros(self._batch, jnp.int32), jnp.zeros(self._batch, bool), key)

        def read(generation: Generation, after_chunk: Callable[[Any], None] = lambda _: None) -> jax.Array:
            for size in sizes:
                state = readers[size](self._arrays, generation.state, *chunks[size])
                generation = generation._replace(state=state)
                after_chunk(state)
            return first_step(generation)[1]

        def give_up_late(state: DecodeState) -> None:
            jax.block_until_ready(state)
            raise_if_interrupted()
            if time.perf_counter() - began > options.most_seconds:
                raise DoesNotFit(f"it takes more than {options.most_seconds:g} seconds (--most_seconds)")

        began = time.perf_counter()
        jax.block_until_ready(read(start(), give_up_late))
        least = 3 if 10 * (time.perf_counter() - began) < options.most_seconds else 1
        times = time_calls(read, prepare=start, repeat_for=options.seconds, least=least, warm_up=0)
        stats = jax.local_devices()[0].memory_stats() or {}
        return {
            "first_token_seconds": times.seconds,
            "tokens_per_second": self._batch * length / times.seconds,
            "spread": times.spread if times.repetitions > 1 else None,
            "state_bytes": attention_bytes(abstract.state),
            "program_bytes": max(map(peak_bytes, readers.values())) + total_bytes(self._packed),
            "device_peak_bytes": stats.get("peak_bytes_in_use"),
        }

    def _reader(self, state: DecodeState, size: int) -> jax.stages.Compiled:
        """The program that reads `size` tokens."""
        tokens, mask = (jax.ShapeDtypeStruct((self._batch, size), dtype) for dtype in (jnp.int32, bool))
        lowered = functools.partial(read_chunk.lower, self._graph, self._arrays, state, tokens, mask)
        return self._compiled(size, state, lambda: lowered().compile())

    def _first_step(self, generation: Generation) -> DecodingProgram:
        build = functools.partial(DecodingProgram.compile, self._model, generation, 1, self._packed)
        return self._compiled("step", generation, build)

    def _compiled(self, what: int | str, like: Any, build: Callable[[], Any]) -> Any:
        key = what, *(leaf.shape for leaf in jax.tree.leaves(like))
        if key not in self._programs:
            self._programs[key] = build()
        return self._programs[key]


def summary_of(results: Results) -> dict[str, Any]:
    """Times, speeds and memory by model and length; why some are missing."""
    names = ("first_token_seconds", "tokens_per_second", "state_bytes", "program_bytes", "device_peak_bytes")
    return {name: by_model(results, "prefill", name) for name in names} | {
        "does_not_fit": by_model(results, "prefill", "does_not_fit")
    }


def prefill_table(results: Results) -> str:
    """One line per model and length; a prompt that could not be read has the reason."""
    memory = ["state, MiB", "program, MiB", "peak, MiB"]
    headers = ["model", "weights", "tokens", "first token, s", "tokens/s", "spread", *memory]
    rows = []
    for line in results.lines_of("prefill"):
        asked = line["asked"]
        row = (asked["row"].removesuffix(INT8), asked["weights"], asked["length"])
        if "does_not_fit" in line:
            rows.append((*row, line["does_not_fit"], *[""] * 5))
            continue
        peak, spread = line["device_peak_bytes"], line["spread"]
        sizes = (line["state_bytes"] / MIB, line["program_bytes"] / MIB, peak / MIB if peak else "")
        speed = (line["first_token_seconds"], line["tokens_per_second"], "" if spread is None else f"{spread:.1%}")
        rows.append((*row, *speed, *sizes))
    return table(headers, rows)


def plot_prefill(results: Results, request: Request) -> Iterator[str]:
    """Time to the first token, and memory, against the prompt's length; the paths of the plots."""
    plots = {
        "": ("Time to the first token", "first_token_seconds", 1, "seconds"),
        "_memory": ("Memory while a prompt is read, by the compiler", "program_bytes", MIB, "MiB"),
    }
    for ending, (title, figure, unit, unit_name) in plots.items():
        curves = [
            Curve(name, label(name, request.models[name]), {length: value / unit for length, value in points.items()})
            for name, points in by_model(results, "prefill", figure).items()
        ]
        if curves and results.figure():
            title = f"{title}, {request.title}\n{describe_device(results)}"
            plot = length_plot(curves, title=title, unit=unit_name, tokens="tokens of the prompt")
            yield from save(plot, results.figure().with_name(results.figure().name + ending))
