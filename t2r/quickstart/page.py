"""The quickstart's report: one self-contained HTML file with tables, generated texts and plots."""

import html
import io
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from t2r.benchmark.plots import OTHER, RNN, SOFTMAX, log_axes, styled
from t2r.benchmark.steps import DecodeSpeed
from t2r.console import short
from t2r.files import atomic_file

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem; border-bottom: 1px solid #8884; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; background: white; border-radius: 6px; padding: .5rem; }
figure svg { width: 100%; height: auto; }
pre { white-space: pre-wrap; background: #8881; padding: .8rem; border-radius: 6px; max-height: 14rem; overflow: auto; }
small { opacity: .75; }
"""


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
        f"<h1>{title}</h1>",
        f"<p>The softmax attention of a pretrained transformer was replaced by linear attention with a learned feature "
        f"map. The model was finetuned for {max(report.validation)} steps, and the feature map merged for inference. "
        f"Finetuning recovered <b>{report.recovered:.1%}</b> of the perplexity that the swap cost.</p>",
        _table(["model", "test perplexity"], report.perplexity.items()),
        f"<figure>{perplexity_plot(report)}</figure>",
        "<h2>Decoding</h2>",
        f"<p>Greedy decoding of {report.rnn[0].batch} sequences; median of repeated runs, without compilation. The "
        f"transformer's cache has capacity for the whole length. The RNN's state has {report.rnn[0].state_bytes:,} "
        f"bytes at every length; layers · batch · heads · k · (d + 1) · 4 = {report.formula_bytes:,} by formula.</p>",
        _table(
            ["generated tokens", "transformer tokens/s", "RNN tokens/s", "speedup", "transformer state", "RNN state"],
            [
                (a.length, a.tokens_per_second, b.tokens_per_second, f"{a.seconds / b.seconds:.2f}×", *_sizes(a, b))
                for a, b in zip(report.transformer, report.rnn)
            ],
        ),
        f"<figure>{decode_plot(report)}</figure>",
        f"<h2>Generated text</h2><p>Sampled, with the prompt “{html.escape(report.prompt)}”:</p>",
        *(f"<h3>{name}</h3><pre>{html.escape(report.prompt + text)}</pre>" for name, text in report.texts.items()),
        f"<p><small>Made in {report.seconds:.0f} s on {html.escape(describe(report.environment))}. "
        "Method: Kasai et al. (2021), “Finetuning Pretrained Transformers into RNNs”.</small></p>",
    ]
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    with atomic_file(path) as unfinished:
        unfinished.write_text(page + "\n".join(parts) + "</html>\n", "utf-8")


def describe(environment: dict[str, Any]) -> str:
    """The machine and the versions as a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    device, processor, python = (environment[name] for name in ("device", "processor", "python"))
    return f"{device} ({processor}), with Python {python}, {versions}"


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
    return _svg(figure)


def decode_plot(report: Report) -> str:
    """SVG: decoding speed and state size against length, as in the paper's Figures 2 and 3."""
    figure = Figure(figsize=(10, 3.8))
    speed, state = figure.subplots(1, 2)
    for name, color, runs in [("transformer", SOFTMAX, report.transformer), ("RNN (T2R)", RNN, report.rnn)]:
        lengths = [run.length for run in runs]
        speed.plot(lengths, [run.tokens_per_second for run in runs], "o-", color=color, label=name)
        state.plot(lengths, [run.state_bytes / 2**20 for run in runs], "o-", color=color, label=name)
    for axes, title, unit in [(speed, "Decoding speed", "tokens/s"), (state, "Attention state", "MiB")]:
        axes.set(xlabel="generated tokens", ylabel=unit, title=title)
        log_axes(axes, [run.length for run in report.rnn])
        axes.legend()
    return _svg(figure)


def _svg(figure) -> str:
    styled(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(headers: list[str], rows) -> str:
    head = "".join(f"<th>{header}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(short(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _sizes(*runs: DecodeSpeed) -> list[str]:
    return [f"{run.state_bytes / 2**20:,.2f} MiB" for run in runs]
