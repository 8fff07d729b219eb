"""The paper's Figures 4 (perplexity), 5 (distance) and 6 (entropy) against the feature size, and attention by layer."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure

from t2r.analysis.models import SCRATCH, SWAPPED
from t2r.analysis.statistics import mean_of_heads
from t2r.plots import OTHER, RNN, SOFTMAX, styled, value_axis

COLORS = {"finetuned": RNN, "finetuned, φ frozen": "#cc79a7", "only φ trained": "#e69f00", SWAPPED: OTHER}
COLORS |= {SCRATCH: "#009e73"}
MORE_COLORS = ("#56b4e9", "#8c564b", "#17becf", "#bcbd22", "#7f7f7f")
MARKERS = "osD^vP*X"
KINDS = {"causal": "features", "cross": "cross_features"}  # kind of attention → the field that has its feature size
WORDS = {
    "distance": "Euclidean distance to the transformer's attention",
    "entropy": "entropy of attention, nats",
    "kl": "KL divergence from the transformer's attention, nats",
    "look_back": "mean distance of the tokens attended to",
    "span": "last tokens that hold 90% of the weight",
}


def draw_all(analysis: dict[str, Any]) -> dict[str, Figure]:
    """The figures that the analysed models allow, by the name of their file."""
    models, crosses = analysis["models"], analysis["models"][0]["cross"] is not None
    figures = {"perplexity": by_size(models, "features", lambda one: one["perplexity"], "perplexity", SWAPPED)}
    for kind in ("causal", "cross") if crosses else ("causal",):
        suffix, of_kind = ("", "") if not crosses else (f"_{kind}", f", {kind}")
        for measure in ("distance", "entropy"):
            label = WORDS[measure] + of_kind
            figures[measure + suffix] = by_size(models, KINDS[kind], _reader(kind, measure), label)
        figures[f"layers{suffix}"] = by_layer(_largest(models), "attention" if kind == "causal" else "cross")
    return {name: figure for name, figure in figures.items() if figure is not None}


def _reader(kind: str, measure: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda one: one[kind][measure]


def by_size(
    models: list[dict[str, Any]],
    size: str,
    value: Callable[[dict[str, Any]], float | None],
    label: str,
    without: str = "",
) -> Figure | None:
    """A curve for each series of models against their feature size, a line for the transformer; None: nothing known."""
    curves = {
        series: sorted((one[size], value(one)) for one in members if one[size] and value(one) is not None)
        for series, members in _series(models)
        if series != without
    }
    curves = {series: points for series, points in curves.items() if points}
    if not curves:
        return None
    figure = Figure(figsize=(5.6, 4.2))
    axes = figure.subplots()
    for number, (series, points) in enumerate(curves.items()):
        style = dict(color=_color(series, number), markersize=6, label=series)
        axes.plot(*zip(*points), MARKERS[number % len(MARKERS)] + "-", **style)
    # No line for 0, which a distance of the transformer to itself is.
    softmax = [value(one) for one in models if one["series"] == "transformer" and value(one)]
    if softmax:
        axes.axhline(softmax[0], color=SOFTMAX, linestyle="--", label="transformer")
    sizes = sorted({k for points in curves.values() for k, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(k) for k in sizes])
    axes.minorticks_off()
    axes.set(xlabel="feature size k", ylabel=label)
    value_axis(axes, [*softmax, *(y for points in curves.values() for _, y in points)])
    axes.legend(fontsize=8, edgecolor="none")
    styled(figure)
    return figure


def by_layer(models: list[dict[str, Any]], name: str) -> Figure | None:
    """Means over the heads of each layer: distance, entropy, and how far causal attention looks back."""
    known = [one for one in ("distance", "entropy", "span") if any(_layers(model, name, one) for model in models)]
    if not known:
        return None
    figure = Figure(figsize=(4.2 * len(known), 3.8))
    for axes, measure in zip(figure.subplots(1, len(known), squeeze=False)[0], known):
        for number, one in enumerate(models):
            values = _layers(one, name, measure)
            if values and not (measure == "distance" and one["series"] == "transformer"):
                color = SOFTMAX if one["series"] == "transformer" else _color(one["series"], number)
                line = "--" if one["series"] == "transformer" else "-"
                axes.plot(range(len(values)), values, "o" + line, color=color, label=title(one))
        axes.set(xlabel="layer")
        axes.set_title(WORDS[measure], fontsize=9)
        axes.set_xticks(range(max(len(_layers(one, name, measure)) for one in models)))
        axes.set_ylim(0, None)
    figure.axes[-1].legend(fontsize=7, edgecolor="none")
    styled(figure)
    return figure


def title(one: dict[str, Any]) -> str:
    """A model's series, with its feature sizes."""
    sizes = [str(one[field]) for field in ("features", "cross_features") if one[field]]
    return one["series"] + (f", k = {' and '.join(sizes)}" if sizes else "")


def _layers(one: dict[str, Any], name: str, measure: str) -> list[float]:
    chosen = [attention[measure] for attention in one["attentions"] if attention["name"].endswith(f".{name}")]
    means = [mean_of_heads(heads) for heads in chosen]
    return [] if None in means else means


def _largest(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each series the model with the largest feature size."""
    return [max(members, key=lambda one: one["features"] or 0) for _, members in _series(models)]


def _series(models: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for series in dict.fromkeys(one["series"] for one in models):
        yield series, [one for one in models if one["series"] == series]


def _color(series: str, number: int) -> str:
    return COLORS.get(series, MORE_COLORS[number % len(MORE_COLORS)])
