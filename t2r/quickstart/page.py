"""The quickstart's report: one self-contained HTML file with stories, tables and plots, for readers new to all this."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from t2r.benchmark.steps import DecodeSpeed
from t2r.page import describe, figure_svg, table, write_page
from t2r.plots import COLORS, RNN, SOFTMAX, log_axes

LABELS = {
    "transformer": "transformer",
    "swapped": "swapped, not finetuned",
    "t2r": "T2R",
    "window": "T2R with a window",
}
DRAWN = {"transformer": SOFTMAX, "t2r": RNN, "window": COLORS["t2r_75"]}
NEXT = """t2r generate --model={model} --prompt="Lily found a key" \\
    --length=200 --temperature=0.7

# a model of your own, on a GPU
t2r convert --model=path/to/your/model --output=runs/mine --finetune

# the same on a CPU, as a trial
t2r convert --model=path/to/your/model --output=runs/mine --finetune \\
    --steps=100 --set=data.batch=4 --set=teacher.texts=200"""


class Report(NamedTuple):
    """The results of the quickstart. The models are transformer, swapped, t2r and window."""

    parameters: int
    layers: int
    data: str
    steps: dict[str, int]  # t2r, window → finetuning steps
    stories_per_step: int
    scores: dict[str, dict[str, float]]  # model → perplexity, recall
    recovered: float  # (swapped - T2R) / (swapped - transformer) in perplexity
    speeds: dict[str, list[DecodeSpeed]]  # transformer, t2r, window → speed by length
    prompt: str
    stories: dict[str, str]  # model → continuation of the prompt
    models: dict[str, str]  # t2r, window → folder
    environment: dict[str, Any]
    seconds: float


def write_report(path: Path, report: Report) -> None:
    """Writes the page, which loads nothing from elsewhere."""
    parts = [*_introduction(report), *_stories(report), *_quality(report), *_decoding(report), *_next(report)]
    write_page(path, "A transformer becomes a recurrent network", parts)


def _introduction(report: Report) -> list[str]:
    cost = {name: scores["perplexity"] for name, scores in report.scores.items()}
    written = "stories that the transformer had written itself"
    if not report.data.startswith("builtin:"):
        written = f"texts of {html.escape(report.data)}"
    cards = {
        "What was converted": f"A transformer of {report.parameters / 1e6:.1f} million parameters that writes stories, "
        f"in two ways. T2R (transformer to RNN) makes the softmax attention of all {report.layers} layers linear. T2R "
        "with a window keeps it exact for the nearest tokens.",
        "What it cost": f"T2R: {report.steps['t2r']} steps of finetuning, each on {report.stories_per_step} {written}, "
        f"and a perplexity of {cost['t2r']:.2f} where the transformer has {cost['transformer']:.2f}. With a window: "
        f"{report.steps['window']} steps and {cost['window']:.2f}. All of this page took "
        f"{report.seconds:.0f} seconds.",
        "What it brought": f"A state of constant size. {_gains(report)}",
    }
    return [
        "<p>A transformer remembers every token that it has read: the longer the text, the slower it writes and the "
        "more memory it needs. A recurrent network keeps a state of constant size instead. This page shows one turned "
        "into the other: its attention was replaced, which broke it, and finetuning repaired much of it.</p>",
        "<p>A token is a word or a piece of one. Attention is what looks back at earlier tokens: softmax attention "
        "compares each new token with every earlier one, linear attention adds what it reads to a sum of one size.</p>",
        f"<div class=beside>{''.join(f'<section><h3>{k}</h3><p>{v}</p></section>' for k, v in cards.items())}</div>",
        "<p><b>Which one?</b> With a window the model stays nearer to the transformer; its memory is constant, too. "
        "Without one it is smaller and faster, and needs much more finetuning than a page like this can show.</p>",
    ]


def _gains(report: Report) -> str:
    """Speed and memory beside the transformer's, at the longest and at the shortest of the measured lengths."""
    shortest, longest = (report.speeds["t2r"][index].length for index in (0, -1))
    speeds, sizes = _gain(report, -1)
    text = (
        f"After {longest:,} tokens T2R writes {speeds[0]} times as fast as the transformer, and its attention needs "
        f"{sizes[0]} of the memory; with a window {speeds[1]} times as fast, and {sizes[1]} of the memory."
    )
    if shortest == longest:
        return text
    speeds, sizes = _gain(report, 0)
    return (
        f"{text} After only {shortest:,} tokens T2R writes {speeds[0]} times as fast, with {sizes[0]} of the memory, "
        f"and with a window {speeds[1]} times as fast, with {sizes[1]}."
    )


def _gain(report: Report, index: int) -> tuple[list[str], list[str]]:
    """(speeds, sizes of the attention state) of T2R without and with a window, in units of the transformer's."""
    old, *new = (report.speeds[name][index] for name in ("transformer", "t2r", "window"))
    parts = [run.state_bytes / old.state_bytes for run in new]
    return (
        [f"{old.step_seconds / run.step_seconds:.1f}" for run in new],
        [f"1/{1 / part:.0f}" if part < 0.1 else f"{part:.0%}" for part in parts],
    )


def _stories(report: Report) -> list[str]:
    titles = {"transformer": "Before", "swapped": "Between", "t2r": "After", "window": "After, with a window"}
    cells = "".join(
        f"<div><h3>{titles[name]}<br><small>{_subject(report, name)}</small></h3>"
        f"<blockquote><b>{html.escape(report.prompt)}</b>{_lines(story)}</blockquote></div>"
        for name, story in report.stories.items()
    )
    return [
        "<h2>The same beginning, told by each model</h2>",
        "<p>The beginning, in bold, was given; temperature 0.7, top-p 0.9, the same random seed; long stories are cut. "
        "The transformer is small: its sentences read well, and its stories do not always make sense.</p>",
        f"<div class=beside>{cells}</div>",
    ]


def _subject(report: Report, name: str) -> str:
    return f"{LABELS[name]}, {report.steps[name]} steps" if name in report.steps else LABELS[name]


def _lines(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def _quality(report: Report) -> list[str]:
    rows = [(_subject(report, name), *(f"{value:.2f}" for value in s.values())) for name, s in report.scores.items()]
    return [
        "<h2>What was lost</h2>",
        table(["model", "perplexity", "recall"], rows),
        "<p><b>Perplexity:</b> how surprised the model is by stories that it was not trained on; lower is better. 4 "
        "means: as unsure of the next token as if it chose among 4. Finetuning T2R recovered "
        f"{report.recovered:.1%} of what the swap cost.</p>",
        "<p><b>Recall:</b> the perplexity of a text that the model has just read once, when it comes again; lower is "
        "better, and 1 is a perfect memory. This transformer was not trained on texts that repeat, so its own "
        "recall is poor: compare the others with it, not with 1.</p>",
        "<p><b>T2R</b> is the method of the paper named below: attention is linear for all tokens. A small function "
        "with random weights, the feature map, replaces the exponential of softmax; it is trained with the rest, and "
        "folded into the weights before it in the end, so that it costs no time. Unlike in the paper, the model "
        "learns to give the transformer's probabilities. With more steps than these few it loses less: "
        "<code>t2r quickstart --steps=600 --workdir=runs/longer</code>.</p>",
        "<p><b>With a window</b>, attention stays exact for the last 64 tokens and the first 4, and is linear for all "
        "others; before finetuning, each attention is fitted to the one that it replaces. <code>t2r convert "
        "--finetune</code> converts like this unless told otherwise.</p>",
    ]


def _decoding(report: Report) -> list[str]:
    speeds, batch = report.speeds, report.speeds["t2r"][0].batch
    names = [LABELS[name] for name in speeds]
    rates = [(f"{runs[0].length:,}", *(f"{r.tokens_per_second:,.0f}" for r in runs)) for runs in zip(*speeds.values())]
    sizes = [
        (f"{runs[0].length:,}", *(f"{run.state_bytes / 2**20:,.1f}" for run in runs)) for runs in zip(*speeds.values())
    ]
    plots = [
        _plot(speeds, "Speed, in tokens per second", lambda run: run.tokens_per_second),
        _plot(speeds, "Memory of attention, in MiB", lambda run: run.state_bytes / 2**20),
    ]
    return [
        "<h2>What was gained</h2>",
        f"<p>{batch} texts are generated at a time, of the lengths below; speed and memory are those of all {batch} "
        f"together. The speed at a length is that of its last {speeds['t2r'][0].steps} tokens, without compilation. "
        "Memory is what attention keeps of the text; the weights come on top. All axes are logarithmic.</p>",
        f"<div class=beside>{''.join(f'<figure>{plot}</figure>' for plot in plots)}</div>",
        "<div class=beside>",
        f"<div><h3>Tokens per second</h3>{table(['tokens', *names], rates)}</div>",
        f"<div><h3>Memory of attention, in MiB</h3>{table(['tokens', *names], sizes)}</div>",
        "</div>",
    ]


def _plot(speeds: dict[str, list[DecodeSpeed]], title: str, value: Callable[[DecodeSpeed], float]) -> str:
    """SVG: a value of each model against length. Small, so that its labels stay legible on a narrow screen."""
    figure = Figure(figsize=(5, 3.8))
    axes = figure.subplots()
    for name, runs in speeds.items():
        axes.plot([run.length for run in runs], list(map(value, runs)), "o-", color=DRAWN[name], label=LABELS[name])
    axes.set(xlabel="length of the text so far, in tokens", title=title)
    log_axes(axes, [run.length for run in speeds["t2r"]])
    axes.legend()
    return figure_svg(figure)


def _next(report: Report) -> list[str]:
    return [
        "<h2>What to do next</h2>",
        "<p>Have the converted model tell another story, then convert a model of your own: a Hugging Face directory "
        "(GPT-2, Llama, ...), a fairseq checkpoint or a GGUF file. Without <code>--data</code>, your model writes "
        "its own training text, as this one did; <code>--data=text:FILE</code> is yours. Where <code>t2r</code> is not "
        "installed, write <code>.venv/bin/python -m t2r</code>.</p>",
        f"<pre>{html.escape(NEXT.format(model=report.models['window']))}</pre>",
        f"<p><small>Made in {report.seconds:.0f} s on {html.escape(describe(report.environment))}. "
        "Method: Kasai et al. (2021), “Finetuning Pretrained Transformers into RNNs”.</small></p>",
    ]
