"""The quickstart's report: one self-contained HTML file with tables, generated texts and plots."""

import html
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from t2r.benchmark.page import decode_plot, describe, figure_svg, speed_table, table, write_page
from t2r.benchmark.plots import OTHER, RNN, SOFTMAX
from t2r.benchmark.steps import DecodeSpeed


class Report(NamedTuple):
    """The results of the quickstart."""

    perplexity: dict[str, float]  # transformer, swapped, T2R → test perplexity
    recovered: float  # (swapped - T2R) / (swapped - transformer) in test perplexity
    validation: dict[int, float]  # finetuning step → validation perplexity; step 0: before finetuning
    transformer_validation: float
    transformer: list[DecodeSpeed]
    rnn: list[DecodeSpeed]
    formula_bytes: int  # size of the RNN's state by formula
    prompt: str
    texts: dict[str, str]  # model → generated continuation of the prompt
    environment: dict[str, Any]
    seconds: float


def write_report(path: Path, report: Report) -> None:
    """Writes the page, which loads nothing from elsewhere."""
    title = "A transformer converted into an RNN"
    parts = [
        f"<p>The softmax attention of a pretrained transformer was replaced by linear attention with a learned feature "
        f"map. The model was finetuned for {max(report.validation)} steps, and the feature map merged for inference. "
        f"Finetuning recovered <b>{report.recovered:.1%}</b> of the perplexity that the swap cost.</p>",
        table(["model", "test perplexity"], report.perplexity.items()),
        f"<figure>{perplexity_plot(report)}</figure>",
        "<h2>Decoding</h2>",
        f"<p>Greedy decoding of {report.rnn[0].batch} sequences; median of repeated runs, without compilation. The "
        f"transformer's cache has capacity for the whole length. The RNN's state has {report.rnn[0].state_bytes:,} "
        f"bytes at every length; layers · batch · heads · k · (d + 1) · 4 = {report.formula_bytes:,} by formula.</p>",
        speed_table(report.transformer, report.rnn),
        f"<figure>{decode_plot(report.transformer, report.rnn)}</figure>",
        f"<h2>Generated text</h2><p>Sampled, with the prompt “{html.escape(report.prompt)}”:</p>",
        *(f"<h3>{name}</h3><pre>{html.escape(report.prompt + text)}</pre>" for name, text in report.texts.items()),
        f"<p><small>Made in {report.seconds:.0f} s on {html.escape(describe(report.environment))}. "
        "Method: Kasai et al. (2021), “Finetuning Pretrained Transformers into RNNs”.</small></p>",
    ]
    write_page(path, title, parts)


def perplexity_plot(report: Report) -> str:
    """SVG: test perplexity of the three models, and validation perplexity during finetuning."""
    figure = Figure(figsize=(10, 3.6))
    bars, curve = figure.subplots(1, 2)
    names, values = zip(*report.perplexity.items())
    drawn = bars.barh(names, values, color=(SOFTMAX, OTHER, RNN))
    bars.bar_label(drawn, [f"{value:.1f}" for value in values], padding=4)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set(xlabel="perplexity", title="Test")
    curve.plot(report.validation.keys(), report.validation.values(), "o-", color=RNN, label="T2R")
    curve.axhline(report.transformer_validation, color=SOFTMAX, linestyle="--", label="transformer")
    curve.set(xlabel="finetuning step", ylabel="perplexity", title="Validation", ylim=(0, None))
    curve.legend()
    return figure_svg(figure)
