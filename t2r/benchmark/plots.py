"""Plots in the style of the paper's Figures 2 and 3: a curve per model against length, both axes logarithmic."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from t2r.plots import COLORS, OTHER, log_axes, styled

MARKERS = "osD^vP*X"
# A name with one of these suffixes has the colour of the name without it, dashed.
DASHED = ("_dropout", "_plain", "_int8")


class Curve(NamedTuple):
    """The values of one model by length."""

    name: str  # key of COLORS
    label: str
    points: dict[int, float]  # length → value
    spread: dict[int, float] | None = None  # (slowest - fastest) / value: error bars
    beside: dict[int, float] | None = None  # a second curve, dotted
    limit: dict[int, float] | None = None  # what no value can exceed: a pale line with a hatched edge


def length_plot(
    curves: Sequence[Curve],
    *,
    title: str,
    unit: str,
    tokens: str = "generated tokens",
    beside: str = "",
    limit: str = "limit of the memory bandwidth",
) -> Figure:
    """One figure. The first curve is on top and has the smallest markers, so that coinciding curves stay visible."""
    many = len(curves) > 6  # then the legend is beside the axes: it would hide them
    figure = Figure(figsize=(10.4, 4.6) if many else (7.2, 4.6))
    axes = figure.subplots()
    colors = [COLORS.get(curve.name.removesuffix(_dashed_suffix(curve)), OTHER) for curve in curves]
    for i, (curve, color) in enumerate(zip(curves, colors)):
        lengths, values = zip(*sorted(curve.points.items()))
        line = "--" if _dashed_suffix(curve) else "-"
        style = dict(color=color, markersize=4.5 + min(1.2, 7 / len(curves)) * i, zorder=20 - i, label=curve.label)
        axes.plot(lengths, values, MARKERS[i % len(MARKERS)] + line, **style)
        if curve.spread:
            errors = [curve.spread.get(length, 0) * value / 2 for length, value in zip(lengths, values)]
            axes.errorbar(lengths, values, errors, fmt="none", ecolor=color, capsize=2)
        if curve.beside:
            axes.plot(*zip(*sorted(curve.beside.items())), ":", color=color, linewidth=1.3)
        if curve.limit:
            _draw_limit(axes, curve, color, line, named=colors.count(color) > 1)
    if any(curve.beside for curve in curves):
        axes.plot([], [], ":", color=OTHER, label=beside)
    if any(curve.limit for curve in curves):
        axes.fill_between([], [], [], label=f"{limit} for each model", **_LIMIT, edgecolor=OTHER)
    axes.set(xlabel=tokens, ylabel=unit)
    axes.set_title(title, fontsize=10)
    log_axes(axes, sorted({length for curve in curves for length in curve.points}))
    place = dict(loc="center left", bbox_to_anchor=(1.01, 0.5)) if many else {}
    axes.legend(fontsize=8, framealpha=0.9, edgecolor="none", **place).set_zorder(30)  # above all curves
    styled(figure)
    return figure


_LIMIT = dict(facecolor="none", hatch="/////", linewidth=0)


def _dashed_suffix(curve: Curve) -> str:
    return next((suffix for suffix in DASHED if curve.name.endswith(suffix)), "")


def _draw_limit(axes, curve: Curve, color: str, line: str, *, named: bool) -> None:
    """A line with a hatched edge above it, like a wall in a drawing; it is named if others have its colour."""
    lengths, values = zip(*sorted(curve.limit.items()))
    axes.plot(lengths, values, line, color=color, linewidth=3, alpha=0.45, zorder=2)
    edge = [value * 1.18 for value in values]  # of equal height anywhere on a logarithmic axis
    axes.fill_between(lengths, values, edge, **_LIMIT, edgecolor=color, alpha=0.45, zorder=1)
    if not named:
        return
    box = dict(facecolor="white", edgecolor="none", alpha=0.85, pad=1)
    place = lengths[0], values[0] * 1.18**0.5
    axes.annotate(
        curve.label, place, (4, 0), textcoords="offset points", color=color, fontsize=7, va="center", bbox=box
    )
