"""The report of a conversion: one HTML file that loads nothing from elsewhere, made from the content of report.json."""

import html
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from t2r.benchmark.page import decode_plot, speed_table
from t2r.benchmark.steps import DecodeSpeed
from t2r.evaluation.damage import Damage, bars
from t2r.page import describe, figure_svg, table, write_page
from t2r.plots import RNN, SOFTMAX, log_values, value_axis
from t2r.workflow.curve import draw, measures_of, words

LABELS = {"perplexity": "perplexity", "bleu": "BLEU", "chrf": "chrF"}  # scores that the table shows, besides recall

COLUMN_NOTES = {
    "features": "Features are those of all heads together.",
    "damage": "Perplexity when reduced: of the transformer, before training, with this one attention reduced: causal "
    "attention to its window and first tokens, cross attention to the mean of the source.",
    "distance": "The distance is Σ‖y − y′‖² / Σ‖y′‖², where y is the output of "
    "this attention and y′ that of the transformer's: 0 is equal, 1 as bad as an output of zero.",
    "dead": "A feature of φ is dead if it is zero for all queries, or for all keys, of a held-out batch.",
    "clamped": "A normaliser is clamped if φ(q)·z is below its least value.",
}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes the page."""
    name = Path(report["source"]).name
    parts = [
        *_introduction(report),
        *_scores(report),
        *_attentions(report),
        *_decoding(report["decoding"]),
        *_state_curve(report["state_curve"]),
        *_samples(report["samples"]),
        *_texts(report),
        *_how(report),
    ]
    write_page(path, f"{name}, converted into an RNN", parts)


def _introduction(report: dict[str, Any]) -> list[str]:
    attentions = report["attentions"]
    converted = sum(attention["attention"] != "softmax" for attention in attentions)
    training = f"{report['steps'] - report['transfer_steps']:,} steps of training"
    if report["transfer_steps"]:
        training = f"{report['transfer_steps']:,} steps of attention transfer and {training}"
    reason = report["not_merged"]
    merged = "<p>The feature map φ is merged into the query and key projections.</p>"
    if reason is not None:
        words = "The feature map φ stays a matrix of its own; why this is expected:"
        merged = f"<details><summary>{words}</summary><pre>{html.escape(reason)}</pre></details>"
    return [
        f"<p>{converted} of the decoder's {len(attentions)} attention modules were replaced by attention with a state "
        f"of constant size; then {training}, on {html.escape(report['data'])}.{gain(report)}</p>",
        f"<p>The model is <code>{html.escape(report['model'])}</code>, with {report['parameters']:,} parameters.</p>",
        merged,
    ]


def gain(report: dict[str, Any]) -> str:
    """A sentence about what training gained."""
    share = report["recovered"]
    if share is None:
        return ""
    if share < 0:
        return " <b>Training made it worse</b> than it was after the swap: train longer, or on other data."
    if share <= 1:
        return f" Training recovered <b>{share:.1%}</b> of the perplexity that the swap cost."
    # Not all of it is recovered: training on the data would have improved the transformer, too.
    return " Its perplexity is now below the transformer's, which was not trained on this data (--control trains it)."


def _scores(report: dict[str, Any]) -> list[str]:
    rows = report["scores"]
    measures = [m for m in rows["transformer"] if m in LABELS or m.startswith("recall_")]
    headers = [LABELS.get(m) or f"recall at {m.removeprefix('recall_')} tokens" for m in measures]
    notes = [f"On {html.escape(report['held_out'])}, which was not trained on."]
    if any(m.startswith("recall_") for m in measures):
        notes.append(
            "Recall is the perplexity of the second half of sequences that repeat their first half; 1 is perfect."
        )
    if "bleu" in measures:
        count = rows["transformer"]["sentences"]
        notes.append(f"BLEU and chrF (sacrebleu's, greedy search) are of the first {count:,} sentences.")
    if "after transfer" in rows:
        notes.append("After the transfer only perplexity is measured.")
    if "control" in rows:
        notes.append("Control: the transformer after the same training, without a conversion.")
    return [
        "<h2>Scores</h2>",
        table(["model", *headers], [(name, *map(scores.get, measures)) for name, scores in rows.items()]),
        f"<p>{' '.join(notes)}</p>",
        f"<figure>{_curve(report)}</figure>",
    ]


def _curve(report: dict[str, Any]) -> str:
    """SVG: perplexity of the held-out data during training."""
    figure = Figure(figsize=(10, 3.2))
    axes, curve = figure.subplots(), {int(step): value for step, value in report["curve"].items()}
    before = report["scores"]["transformer"]["perplexity"]
    axes.plot(curve.keys(), curve.values(), "o-", color=RNN, label="RNN")
    axes.axhline(before, color=SOFTMAX, linestyle="--", label="transformer")
    axes.set(xlabel="step", ylabel="perplexity")
    value_axis(axes, [before, *curve.values()])
    axes.legend()
    return figure_svg(figure)


def _attentions(report: dict[str, Any]) -> list[str]:
    columns = {
        "attention": "kind",
        "exact_for": "exact for tokens",
        "damage": "perplexity when reduced",
        "distance": "distance after transfer",
        "features": "features",
        "dead": "dead features",
        "dead_by_head": "of each head",
        "clamped": "clamped normalisers",
    }
    used = [key for key in columns if any(attention[key] is not None for attention in report["attentions"])]
    shown = {"clamped": _share, "dead_by_head": lambda counts: counts and " ".join(map(str, counts))}
    rows = [
        (attention["name"], *(shown.get(key, lambda value: value)(attention[key]) for key in used))
        for attention in report["attentions"]
    ]
    notes = [note for key, note in COLUMN_NOTES.items() if key in used]
    parts = ["<h2>Each attention</h2>", table(["layer", *(columns[key] for key in used)], rows)]
    if report["damage"]:
        damage, kept = Damage(**report["damage"]), report["plan"]["keep"]
        notes.insert(0, f"Layers that keep softmax, by damage: {html.escape(str(kept))}.")
        figure = bars(damage)
        log_values(figure.axes[0])
        parts.append(f"<figure>{figure_svg(figure)}</figure>")
    return [*parts, f"<p>{' '.join(notes)}</p>"]


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"


def _decoding(measured: dict[str, Any]) -> list[str]:
    transformer, rnn = ([DecodeSpeed(**run) for run in measured[name]] for name in ("transformer", "rnn"))
    left_out = "".join(f" {length} tokens are left out: {reason}." for length, reason in measured["left_out"].items())
    if not rnn:
        return ["<h2>Decoding</h2>", f"<p>Not measured.{html.escape(left_out)}</p>"]
    predicted, found = measured["predicted_crossover"], measured["measured_crossover"]
    predicted = "never" if predicted is None else f"{predicted:,} tokens"
    found = f"{found if isinstance(found, str) else f'{found:,.0f}'} tokens"
    return [
        "<h2>Decoding</h2>",
        f"<p>Greedy decoding of {rnn[0].batch} sequences, in {measured['dtype']}: the last {rnn[0].steps} steps "
        f"of a sequence of each length, median of repeated runs, without compilation.{html.escape(left_out)}</p>",
        speed_table(transformer, rnn),
        f"<p>Length from which the RNN is faster: {predicted} (predicted from the bytes that a step moves and this "
        f"machine's memory bandwidth), {found} (measured).</p>",
        f"<figure>{decode_plot(transformer, rnn)}</figure>",
    ]


def _state_curve(curve: dict[str, Any] | None) -> list[str]:
    if curve is None:
        return []
    points, length = curve["points"], curve["length"]
    measures = measures_of(points)
    rows = [(one["name"], f"{one['state_bytes'] / 2**20:,.2f} MiB", *map(one.get, measures)) for one in points]
    return [
        "<h2>Quality against state</h2>",
        "<p>The same training, with so many layers that keep softmax attention, those that do most damage; the state "
        f"is that of one sequence of {length:,} tokens.</p>",
        table(["model", "state", *map(words, measures)], rows),
        f"<figure>{figure_svg(draw(points, length))}</figure>",
    ]


def _samples(samples: dict[str, dict[str, Any]] | None) -> list[str]:
    if samples is None:
        return []
    columns = {
        "sample_perplexity": "perplexity under the transformer",
        "sample_repetition": "repeated 4-grams",
        "sample_loops": "end in a loop",
        "greedy_repetition": "greedy: repeated 4-grams",
        "greedy_loops": "greedy: end in a loop",
    }
    rows = [
        (name, *(scores[key] if "perplexity" in key else _share(scores[key]) for key in columns))
        for name, scores in samples.items()
    ]
    return [
        "<h2>What the models write</h2>",
        table(["model", *columns.values()], rows),
        "<p>Texts that each model writes after pieces of held-out text, sampled at temperature 1, and greedily. "
        "The closer their perplexity under the transformer is to that of its own texts, the more alike both write. A "
        "4-gram is repeated if it occurred before in the same text; a text ends in a loop if its end is one piece "
        "three times in a row.</p>",
    ]


def _texts(report: dict[str, Any]) -> list[str]:
    how = "Sampled at temperature 0.8 and top-p 0.95, with one seed"
    how = "Translated with a beam of 5" if "bleu" in report["scores"]["transformer"] else how
    parts = ["<h2>Texts</h2>", f"<p>{how}:</p>"]
    for number, first in enumerate(report["texts"]["transformer"]):
        cells = [
            f"<div><h4>{html.escape(name)}</h4><pre>{html.escape(texts[number]['text'])}</pre></div>"
            for name, texts in report["texts"].items()
        ]
        parts.append(f"<pre>{html.escape(first['prompt'])}</pre><div class=beside>{''.join(cells)}</div>")
    return parts


def _how(report: dict[str, Any]) -> list[str]:
    command = report["command"]
    config = html.escape(json.dumps(report["config"], indent=1))
    return [
        "<h2>How it was made</h2>",
        *([f"<pre>{html.escape(command)}</pre>"] if command else []),
        table(["step", "seconds"], report["step_seconds"].items()),
        f"<p>{report['seconds']:,} seconds in all. Of a step that was interrupted, only the time since it was last "
        "started is counted.</p>",
        f"<details><summary>The config of the training run</summary><pre>{config}</pre></details>",
        f"<p><small>{html.escape(describe(report['environment']))}. "
        "Method: Kasai et al. (2021), “Finetuning Pretrained Transformers into RNNs”.</small></p>",
    ]
