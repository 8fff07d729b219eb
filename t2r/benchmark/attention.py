"""Speed of the attention operation on whole sequences, forward and backward, with a constant number of tokens."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from t2r.attention import linear, softmax
from t2r.attention.feature_map import T2R, Features
from t2r.benchmark import peers
from t2r.benchmark.plots import Curve, length_plot
from t2r.benchmark.shared import (
    Output,
    Results,
    by_model,
    check_fits,
    describe_device,
    finish,
    open_results,
    time_short_calls,
)
from t2r.console import say, table
from t2r.environment import total_bytes
from t2r.errors import raise_all, unknown
from t2r.kernels.support import has_flash_attention
from t2r.plots import save

FORWARD, BOTH = "forward", "forward and backward"


class AttentionSizes(NamedTuple):
    """The sizes of one benchmark; all implementations share them. Softmax attention has no `features`."""

    tokens: int = 65_536  # in all sequences of a batch
    heads: int = 8
    head_dim: int = 128
    features: int = 32
    dtype: str = "bfloat16"
    dropout: float = 0.1

    def batch(self, length: int) -> int:
        """Sequences of this length in a batch."""
        return max(self.tokens // length, 1)


class Form(NamedTuple):
    """An implementation of attention."""

    label: str
    function: Callable[..., jax.Array]  # (queries, keys, values) → outputs
    uses_features: bool  # queries and keys are φ(q) and φ(k)
    drops: bool = False  # with dropout


def _linear(form: Callable, q: jax.Array, k: jax.Array, v: jax.Array, **dropout_options: Any) -> jax.Array:
    return form(Features(q[:, :, :, None]), Features(k), v, T2R.normalizer, **dropout_options)[0]


def _flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """jax.nn.dot_product_attention; on GPU with cuDNN's kernel."""
    kernel = "cudnn" if has_flash_attention(q) else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)


def _softmax(q: jax.Array, k: jax.Array, v: jax.Array, **dropout_options: Any) -> jax.Array:
    return softmax.causal_attend(q[:, :, :, None], k, v, q.shape[-1] ** -0.5, **dropout_options)


FORMS = {
    "t2r": Form("T2R", functools.partial(_linear, linear.causal_attention), True),
    "chunked": Form("T2R, chunked by XLA", functools.partial(_linear, linear.chunked), True),
    "softmax": Form("softmax, jax.nn.dot_product_attention", _flash, False),
    "t2r_dropout": Form("T2R with dropout", functools.partial(_linear, linear.causal_attention), True, drops=True),
    "softmax_dropout": Form("softmax with dropout", _softmax, False, drops=True),
}


def random_inputs(form: Form, shape: AttentionSizes, length: int) -> tuple[jax.Array, ...]:
    """Random queries, keys, values, and a gradient with respect to the output: each (batch, length, heads, size)."""
    size = shape.features if form.uses_features else shape.head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    lead = shape.batch(length), length, shape.heads
    dtype = jnp.dtype(shape.dtype)
    last_sizes = size, size, shape.head_dim, shape.head_dim
    q, k, v, gradient = (jax.random.normal(key, (*lead, last), dtype) for key, last in zip(keys, last_sizes))
    if form.uses_features:
        q, k = jax.nn.relu(q), jax.nn.relu(k)  # features of T2R are not negative
    return q, k, v, gradient


def make_program(form: Form, shape: AttentionSizes, which: str) -> Callable[..., Any]:
    """The function that is timed: it returns the outputs, or the gradients of queries, keys and values."""
    dropout_options = dict(dropout=shape.dropout, key=jax.random.key(0)) if form.drops else {}
    function = functools.partial(form.function, **dropout_options)
    if which == FORWARD:
        return jax.jit(lambda q, k, v, gradient: function(q, k, v))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(function, q, k, v)
        return vjp(gradient.reshape(out.shape))

    return jax.jit(both)


def measure(form: Form, shape: AttentionSizes, length: int, which: str, repeat_for: float) -> dict[str, Any]:
    """Times one implementation at one length, compilation excluded."""
    inputs = random_inputs(form, shape, length)
    began = time.perf_counter()
    compiled = make_program(form, shape, which).lower(*inputs).compile()
    compile_seconds = time.perf_counter() - began
    check_fits(compiled, already=total_bytes(inputs))
    times = time_short_calls(lambda _: compiled(*inputs), repeat_for)
    tokens = shape.batch(length) * length
    return {**times._asdict(), "tokens_per_second": tokens / times.seconds, "compile_seconds": compile_seconds}


def measure_all(
    results: Results, shape: AttentionSizes, lengths: list[int], forms: list[str], repeat_for: float
) -> None:
    """Times every implementation at every length: the forward pass, and forward and backward together."""
    for length in lengths:
        for name in forms:
            for which in (FORWARD, BOTH):
                key = {"what": which, "row": name, "length": length, **shape._asdict()}
                run = functools.partial(measure, FORMS[name], shape, length, which, repeat_for)
                line = results.get_or_measure(key, run)
                if line and "seconds" in line:
                    say(f"{name}, {length} tokens, {which}: {line['seconds'] * 1e3:.3g} ms")


def benchmark_attention(
    shape: AttentionSizes = AttentionSizes(),
    lengths: Sequence[int] = (512, 2048, 8192),
    forms: Sequence[str] = (),
    output: Output = Output(),
    *,
    repeat_for: float = 1.0,
    with_peers: bool = False,
) -> dict[str, Any]:
    """Times implementations of attention (FORMS) at several lengths; prints a table, writes JSON and plots."""
    forms = list(forms) or list(FORMS)
    raise_all("--forms:", [unknown("form", name, FORMS) for name in forms if name not in FORMS])
    results = open_results("attention", output)
    measure_all(results, shape, sorted(lengths), forms, repeat_for)
    if with_peers:
        backward = {FORWARD: False, BOTH: True}
        peers.measure_attention(results, shape, sorted(lengths), backward, repeat_for)
    print(attention_table(results))
    plots, summary = plot(results, shape, describe_device(results)), summary_of(results)
    finish(results, output, {"shape": shape._asdict(), **summary})
    return {**summary, "left_out": len(results.left_out), "plots": plots}


def summary_of(results: Results) -> dict[str, Any]:
    """Milliseconds by pass, implementation and length; and the speedup of T2R over softmax."""
    milliseconds = {
        which: {
            name: {length: 1e3 * seconds for length, seconds in times.items()}
            for name, times in by_model(results, which, "seconds").items()
        }
        for which in (FORWARD, BOTH)
    }
    speedup = {}
    for which, times in milliseconds.items():
        t2r, softmax_times = times.get("t2r", {}), times.get("softmax", {})
        speedup[which] = {n: softmax_times[n] / t2r[n] for n in t2r if n in softmax_times}
    return {"milliseconds": milliseconds, "speedup_over_softmax": speedup}


def attention_table(results: Results) -> str:
    """A table of all measurements."""
    lines = [line for which in (FORWARD, BOTH) for line in results.fitting_lines(which)]
    rows = [
        (line["asked"]["row"], line["asked"]["what"], line["asked"]["length"], line["seconds"] * 1e3,
         f"{line['spread']:.1%}", line["tokens_per_second"])
        for line in lines
    ]  # fmt: skip
    return table(["attention", "pass", "tokens", "ms", "spread", "tokens/s"], rows)


def plot(results: Results, shape: AttentionSizes, device: str) -> list[str]:
    """Writes one figure for each pass; returns the paths."""
    paths = []
    for which, ending in ((FORWARD, "_forward"), (BOTH, "")):
        spreads = by_model(results, which, "spread")
        curves = [
            Curve(
                name,
                FORMS[name].label if name in FORMS else name,
                {n: 1e3 * x for n, x in times.items()},
                spreads[name],
            )
            for name, times in by_model(results, which, "seconds").items()
        ]
        if curves and results.figure():
            sizes = f"{shape.tokens:,} tokens, {shape.heads} heads, d = {shape.head_dim}, k = {shape.features}"
            title = f"Attention alone, {which}: {sizes}\n{device}"
            figure = length_plot(curves, title=title, unit="ms", tokens="tokens a sequence")
            paths += save(figure, results.figure().with_name(results.figure().name + ending))
    return paths
