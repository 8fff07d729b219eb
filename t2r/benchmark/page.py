"""Decoding speed and state of a transformer and its RNN, for pages; `t2r.page` has what every page needs."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from t2r.benchmark.steps import DecodeSpeed
from t2r.page import figure_svg, table
from t2r.plots import RNN, SOFTMAX, log_axes


def speed_table(transformer: Sequence[DecodeSpeed], rnn: Sequence[DecodeSpeed]) -> str:
    """Decoding speed and state of both models, by length."""
    rows = [
        (a.length, a.tokens_per_second, b.tokens_per_second, f"{a.step_seconds / b.step_seconds:.2f}×", *_sizes(a, b))
        for a, b in zip(transformer, rnn)
    ]
    headers = ["generated tokens", "transformer tokens/s", "RNN tokens/s", "speedup", "transformer state", "RNN state"]
    return table(headers, rows)


def _sizes(*runs: DecodeSpeed) -> list[str]:
    return [f"{run.state_bytes / 2**20:,.2f} MiB" for run in runs]


def decode_plot(transformer: Sequence[DecodeSpeed], rnn: Sequence[DecodeSpeed]) -> str:
    """SVG: decoding speed and state size against length, as in the paper's Figures 2 and 3."""
    figure = Figure(figsize=(10, 3.8))
    speed, state = figure.subplots(1, 2)
    for name, color, runs in [("transformer", SOFTMAX, transformer), ("RNN (T2R)", RNN, rnn)]:
        lengths = [run.length for run in runs]
        speed.plot(lengths, [run.tokens_per_second for run in runs], "o-", color=color, label=name)
        state.plot(lengths, [run.state_bytes / 2**20 for run in runs], "o-", color=color, label=name)
    for axes, title, unit in [(speed, "Decoding speed", "tokens/s"), (state, "Attention state", "MiB")]:
        axes.set(xlabel="generated tokens", ylabel=unit, title=title)
        log_axes(axes, [run.length for run in rnn])
        axes.legend()
    return figure_svg(figure)
