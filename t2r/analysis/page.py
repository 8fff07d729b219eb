"""An analysis on disk: analysis.json, a PNG and an SVG of each figure, and a page with the numbers behind them."""

import html
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from t2r.analysis.figures import KINDS, WORDS, draw_all
from t2r.console import finite
from t2r.errors import InputError
from t2r.files import make_folder, read_json, write_json, writing
from t2r.page import describe, figure_svg, table, write_page
from t2r.plots import ENDINGS, save

CAPTIONS = {
    "perplexity": "Perplexity against the feature size, as in the paper's Figure 4.",
    "distance": "Distance of attention distributions to the transformer's, as in the paper's Figure 5: Euclidean, "
    "averaged over sequences, layers and heads.",
    "entropy": "Entropy of attention distributions, as in the paper's Figure 6: the lower, the peakier.",
    "layers": "Means over the heads of each layer, for the largest feature size of each kind of model.",
}
NOTES = (
    "Distance: Euclidean, of the weights as they are. For entropy, KL divergence and look-back they are scaled to sum "
    "to 1. KL: from the transformer's distribution to the model's, whose weights count as at least 1e-6. Look-back: "
    "the mean distance of a token attended to, weighted by attention. Span: the last tokens that hold 90% of the "
    "weight. Dead: features that are zero for all queries or for all keys. Clamped: normalisers below their least "
    "value. No weight: queries that give no token any weight. Models from random initialisation have heads of their "
    "own, so they have no distance; RFA may have negative weights, so it has no entropy."
)
COLUMNS = {
    "distance": "distance",
    "kl": "KL",
    "entropy": "entropy",
    "look_back": "look-back",
    "span": "span",
    "dead": "dead",
    "clamped": "clamped",
    "no_weight": "no weight",
}
SHARES = ("dead", "clamped", "no_weight")


def check_output(folder: Path) -> None:
    """Refuses a folder with files of other commands, which would be replaced."""
    page, numbers = folder / "report.html", folder / "analysis.json"
    try:
        is_ours = not numbers.exists() or "models" in read_json(numbers, "choose another output")
    except InputError:
        is_ours = False
    if not is_ours or (page.exists() and not numbers.exists()):
        found = page if is_ours else numbers
        raise InputError(f"{found} was not written by t2r analyze, and would be replaced: choose another output")


def write(folder: Path, analysis: dict[str, Any], command: str = "") -> list[str]:
    """Writes everything; returns the paths of the figures."""
    make_folder(folder)
    figures = draw_all(analysis)
    replaces = (folder / "analysis.json").exists()
    paths = [path for name, figure in figures.items() for path in save(figure, folder / name)]
    write_json(folder / "analysis.json", finite({"command": command, **analysis}))
    parts = [f"<p>{html.escape(_introduction(analysis))}</p>"]
    for kind, cells in rows(analysis).items():
        parts += [f"<h2>{kind.capitalize()} attention</h2>", table(headers(kind), cells)]
    parts.append(f"<p><small>{html.escape(NOTES)}</small></p>")
    for name, figure in figures.items():
        parts += [f"<figure>{figure_svg(figure)}</figure>", f"<p>{html.escape(CAPTIONS[name.partition('_')[0]])}</p>"]
    parts += ["<h2>Each head</h2>", *(_heads(one) for one in analysis["models"])]
    machine = html.escape(describe(analysis["environment"]))
    parts.append(f"<h2>How it was made</h2>{f'<pre>{html.escape(command)}</pre>' if command else ''}")
    parts.append(f"<p><small>{machine}. Everything is in analysis.json.</small></p>")
    write_page(folder / "report.html", "Attention of converted models", parts)
    if replaces:
        _remove_figures_but(figures.keys(), folder)
    return paths


def _remove_figures_but(names: Collection[str], folder: Path) -> None:
    """Removes what an earlier analysis drew and this one, whose figures have these names, did not."""
    possible = {f"{caption}{suffix}" for caption in CAPTIONS for suffix in ("", *(f"_{kind}" for kind in KINDS))}
    for path in (folder / f"{name}.{ending}" for name in possible.difference(names) for ending in ENDINGS):
        with writing(path):
            path.unlink(missing_ok=True)


def _introduction(analysis: dict[str, Any]) -> str:
    sequences = f"{analysis['sequences']:,} sequences of {analysis['data']} ({analysis['split']})"
    if analysis["queries"] is None:
        return f"All target tokens of {sequences}, of at most {analysis['length']} tokens."
    last = "last token" if analysis["queries"] == 1 else f"last {analysis['queries']} tokens"
    return f"The attention of the {last} of {sequences}, of {analysis['length']} tokens each."


def headers(kind: str) -> list[str]:
    """The columns of `rows`."""
    return ["model", "training", "k", "perplexity", *COLUMNS.values()]


def rows(analysis: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """Kind of attention → a row for each model."""
    result, names = {}, _short_names([one["model"] for one in analysis["models"]])
    for kind, size in (("causal", "features"), ("cross", "cross_features")):
        chosen = [one for one in analysis["models"] if one[kind] is not None]
        if chosen:
            result[kind] = [
                [names[one["model"]], one["series"], one[size], one["perplexity"], *_values(one[kind])]
                for one in chosen
            ]
    return result


def _short_names(models: list[str]) -> dict[str, str]:
    """The last part of each model's path, without the /model of a run; whole paths if two are then the same."""
    short = {model: Path(model.removesuffix("/model")).name for model in models}
    return short if len(set(short.values())) == len(models) else {model: model for model in models}


def _values(means: dict[str, Any]) -> list[Any]:
    return [_share(means[name]) if name in SHARES else means[name] for name in COLUMNS]


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"


def _heads(one: dict[str, Any]) -> str:
    """The measures of every head of a model, in a part of the page that opens on a click."""
    measures = [name for name in WORDS if any(attention[name] for attention in one["attentions"])]
    cells = [
        [f"{attention['name']}, head {head}", attention["kind"], *(_head(attention[name], head) for name in measures)]
        for attention in one["attentions"]
        for head in range(len(attention["entropy"] or attention["distance"] or ()))
    ]
    inner = table(["attention", "kind", *measures], cells)
    return f"<details><summary>{html.escape(one['model'])}: {html.escape(one['series'])}</summary>{inner}</details>"


def _head(values: list[float | None] | None, head: int) -> float | None:
    return None if values is None else values[head]


def summary(analysis: dict[str, Any]) -> dict[str, Any]:
    """The analysis without heads and layers, for the last line of the command."""
    short = {name: value for name, value in analysis.items() if name not in ("models", "environment")}
    models = [{name: value for name, value in one.items() if name != "attentions"} for one in analysis["models"]]
    return json.loads(json.dumps({**short, "models": models}))
