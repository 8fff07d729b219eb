"""Plots like the paper's Figures 2 and 3: lines over lengths, both axes logarithmic."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

SOFTMAX, RNN, OTHER = "#0072b2", "#d55e00", "#777777"
COLORS = {
    "transformer": SOFTMAX, "t2r": RNN, "t2r_75": "#cc79a7", "t2r_unmerged": "#56b4e9", "elu": "#009e73",
    "rfa": "#e69f00", "softmax": SOFTMAX, "chunked": "#009e73",
}  # fmt: skip
MARKERS = "osD^vP*X"
VARIANTS = ("_dropout", "_plain")  # of a row: the same colour, dashed


class Curve(NamedTuple):
    """A row over lengths."""

    row: str
    label: str
    points: dict[int, float]  # length → value
    spread: dict[int, float] | None = None  # slowest less fastest, over the value
    bound: dict[int, float] | None = None  # what it is to be seen beside, dotted


def length_plot(
    curves: Sequence[Curve], *, title: str, unit: str, tokens: str = "generated tokens", bound: str = "the floor"
) -> Figure:
    """One figure. Of curves that coincide all can be seen: the first lies on top, with the smallest marks."""
    figure = Figure(figsize=(7.2, 4.6))
    axes = figure.subplots()
    for place, curve in enumerate(curves):
        variant = next((ending for ending in VARIANTS if curve.row.endswith(ending)), "")
        color = COLORS.get(curve.row.removesuffix(variant), OTHER)
        lengths, values = zip(*sorted(curve.points.items()))
        line = "--" if variant else "-"
        look = dict(color=color, markersize=4.5 + 1.2 * place, zorder=20 - place, label=curve.label)
        axes.plot(lengths, values, MARKERS[place % len(MARKERS)] + line, **look)
        if curve.spread:
            errors = [curve.spread.get(length, 0) * value / 2 for length, value in zip(lengths, values)]
            axes.errorbar(lengths, values, errors, fmt="none", ecolor=color, capsize=2)
        if curve.bound:
            axes.plot(*zip(*sorted(curve.bound.items())), ":", color=color, linewidth=1.3)
    if any(curve.bound for curve in curves):
        axes.plot([], [], ":", color=OTHER, label=bound)
    axes.set(xlabel=tokens, ylabel=unit)
    axes.set_title(title, fontsize=10)
    log_axes(axes, sorted({length for curve in curves for length in curve.points}))
    axes.legend(fontsize=8, framealpha=0.9, edgecolor="none").set_zorder(30)  # to be read where curves leave no room
    styled(figure)
    return figure


def log_axes(axes, lengths: Sequence[int]) -> None:
    """Lengths and values as numbers that people write."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.minorticks_off()


def styled(figure) -> None:
    """A light grid and no frame."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()


def save(figure, path: Path) -> list[str]:
    """PNG and SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{path}.{ending}" for ending in ("png", "svg")]
    for name in names:
        figure.savefig(name, dpi=150)
    return names
