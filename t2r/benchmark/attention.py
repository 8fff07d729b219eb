"""Attention alone, over whole sequences: forwards, and forwards and backwards, at a constant number of tokens."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from t2r.attention import linear, softmax
from t2r.attention.feature_map import T2R, Features
from t2r.benchmark import peers
from t2r.benchmark.plots import Curve, length_plot, save
from t2r.benchmark.shared import Output, Results, by_row, check_fits, finish, open_results, timed_in_a_row, where
from t2r.console import say, table
from t2r.environment import total_bytes
from t2r.errors import raise_all

FORWARD, BOTH = "forward", "forward and backward"


class AttentionSizes(NamedTuple):
    """Sizes, the same for all forms but for the features, which softmax has none of."""

    tokens: int = 65_536  # of all sequences together
    heads: int = 8
    head_dim: int = 128
    features: int = 32
    dtype: str = "bfloat16"
    dropout: float = 0.1

    def batch(self, length: int) -> int:
        return max(self.tokens // length, 1)


class Form(NamedTuple):
    """A way to attend: a function of queries, keys and values; `uses_features` if queries and keys are φ's."""

    label: str
    function: Callable[..., jax.Array]
    uses_features: bool
    drops: bool = False


def _features(form: Callable, q: jax.Array, k: jax.Array, v: jax.Array, **more: Any) -> jax.Array:
    return form(Features(q[:, :, :, None]), Features(k), v, T2R.normalizer, **more)[0]


def _flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """JAX's own; on GPU, cuDNN's kernel."""
    kernel = "cudnn" if softmax.has_flash_attention(q) else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)


def _dropping(q: jax.Array, k: jax.Array, v: jax.Array, **chance: Any) -> jax.Array:
    return softmax.causal_attend(q[:, :, :, None], k, v, q.shape[-1] ** -0.5, **chance)


FORMS = {
    "t2r": Form("T2R", functools.partial(_features, linear.causal_attention), True),
    "chunked": Form("T2R, chunked by XLA", functools.partial(_features, linear.chunked), True),
    "softmax": Form("softmax, jax.nn.dot_product_attention", _flash, False),
    "t2r_dropout": Form("T2R with dropout", functools.partial(_features, linear.causal_attention), True, drops=True),
    "softmax_dropout": Form("softmax with dropout", _dropping, False, drops=True),
}


def inputs_of(form: Form, shape: AttentionSizes, length: int) -> tuple[jax.Array, ...]:
    """Random queries, keys, values, and a gradient of the output."""
    size = shape.features if form.uses_features else shape.head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    lead = shape.batch(length), length, shape.heads
    dtype = jnp.dtype(shape.dtype)
    arrays = [
        jax.random.normal(key, (*lead, last), dtype) for key, last in zip(keys, (size, size, *2 * (shape.head_dim,)))
    ]
    return (*(map(jax.nn.relu, arrays[:2]) if form.uses_features else arrays[:2]), *arrays[2:])


def program_of(form: Form, shape: AttentionSizes, which: str) -> Callable[..., Any]:
    """The function that is timed: outputs, or the gradients of queries, keys and values."""
    chance = dict(dropout=shape.dropout, key=jax.random.key(0)) if form.drops else {}
    function = functools.partial(form.function, **chance)
    if which == FORWARD:
        return jax.jit(lambda q, k, v, gradient: function(q, k, v))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(function, q, k, v)
        return back(gradient.reshape(out.shape))

    return jax.jit(both)


def measure(form: Form, shape: AttentionSizes, length: int, which: str, repeat_for: float) -> dict[str, Any]:
    """One form at one length."""
    inputs = inputs_of(form, shape, length)
    began = time.perf_counter()
    compiled = program_of(form, shape, which).lower(*inputs).compile()
    compile_seconds = time.perf_counter() - began
    check_fits(compiled, already=total_bytes(inputs))
    times = timed_in_a_row(lambda _: compiled(*inputs), repeat_for)
    tokens = shape.batch(length) * length
    return {**times._asdict(), "tokens_per_second": tokens / times.seconds, "compile_seconds": compile_seconds}


def measure_all(
    results: Results, shape: AttentionSizes, lengths: list[int], forms: list[str], repeat_for: float
) -> None:
    """Every form at every length, forwards and both ways."""
    for length in lengths:
        for name in forms:
            for which in (FORWARD, BOTH):
                line = {"what": which, "row": name, "length": length, **shape._asdict()}
                run = functools.partial(measure, FORMS[name], shape, length, which, repeat_for)
                found = results.find(line, run)
                if found and "seconds" in found:
                    say(f"{name}, {length} tokens, {which}: {found['seconds'] * 1e3:.3g} ms")


def benchmark_attention(
    shape: AttentionSizes = AttentionSizes(),
    lengths: Sequence[int] = (512, 2048, 8192),
    forms: Sequence[str] = (),
    output: Output = Output(),
    *,
    repeat_for: float = 1.0,
    with_peers: bool = False,
) -> dict[str, Any]:
    """Measures all forms of attention at all lengths, forwards and backwards."""
    forms = list(forms) or list(FORMS)
    known, unknown = ", ".join(FORMS), [name for name in forms if name not in FORMS]
    raise_all("--forms:", [f"unknown form {name!r}: choose among {known}" for name in unknown])
    results = open_results("attention", output)
    measure_all(results, shape, sorted(lengths), forms, repeat_for)
    if with_peers:
        ways = {FORWARD: False, BOTH: True}
        peers.measure_attention(results, shape, sorted(lengths), ways, repeat_for)
    print(attention_table(results))
    plots, summary = plot(results, shape, where(results)), summary_of(results)
    finish(results, output, {"shape": shape._asdict(), **summary})
    return {**summary, "left_out": len(results.left_out), "plots": plots}


def summary_of(results: Results) -> dict[str, Any]:
    """Milliseconds by way, form and length, and how much faster than softmax T2R is."""
    milliseconds = {
        which: {row: {n: 1e3 * x for n, x in found.items()} for row, found in by_row(results, which, "seconds").items()}
        for which in (FORWARD, BOTH)
    }
    speedup = {}
    for which, found in milliseconds.items():
        ours, theirs = found.get("t2r", {}), found.get("softmax", {})
        speedup[which] = {n: theirs[n] / ours[n] for n in ours if n in theirs}
    return {"milliseconds": milliseconds, "speedup_over_softmax": speedup}


def attention_table(results: Results) -> str:
    """For people."""
    lines = [line for which in (FORWARD, BOTH) for line in results.of(which)]
    rows = [
        (line["asked"]["row"], line["asked"]["what"], line["asked"]["length"], line["seconds"] * 1e3,
         f"{line['spread']:.1%}", line["tokens_per_second"])
        for line in lines
    ]  # fmt: skip
    return table(["attention", "", "tokens", "ms", "spread", "tokens/s"], rows)


def plot(results: Results, shape: AttentionSizes, where: str) -> list[str]:
    """A figure for each way."""
    paths = []
    for which, ending in ((FORWARD, "_forward"), (BOTH, "")):
        spreads = by_row(results, which, "spread")
        curves = [
            Curve(row, FORMS[row].label if row in FORMS else row, {n: 1e3 * x for n, x in found.items()}, spreads[row])
            for row, found in by_row(results, which, "seconds").items()
        ]
        if curves and results.figure():
            sizes = f"{shape.tokens:,} tokens, {shape.heads} heads, d = {shape.head_dim}, k = {shape.features}"
            title = f"Attention alone, {which}: {sizes}\n{where}"
            figure = length_plot(curves, title=title, unit="ms", tokens="tokens a sequence")
            paths += save(figure, results.figure().with_name(results.figure().name + ending))
    return paths
