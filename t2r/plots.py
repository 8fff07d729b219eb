"""What all plots share: colours by model, axes with plain numbers, a light style, and how they are written."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator

from t2r.files import make_folder, writing

SOFTMAX, RNN, OTHER = "#0072b2", "#d55e00", "#777777"
COLORS = {
    "transformer": SOFTMAX, "t2r": RNN, "t2r_75": "#cc79a7", "t2r_unmerged": "#56b4e9", "elu": "#009e73",
    "t2r_window": "#7b3294", "t2r_hybrid": "#b8860b", "t2r_hybrid_4th": "#6b4e00", "rfa": "#e69f00", "softmax": SOFTMAX,
    "chunked": "#009e73",
}  # fmt: skip
LOG_FROM = 3  # the largest value over the least from which an axis of values is logarithmic


def log_axes(axes, lengths: Sequence[int]) -> None:
    """Logarithmic axes with plain numbers as labels; ticks at the given lengths."""
    axes.set(xscale="log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    log_values(axes)


def value_axis(axes, values: Sequence[float]) -> None:
    """A y-axis for these values: logarithmic if they span more than a factor of three, which has enough ticks then."""
    if min(values) > 0 and max(values) > LOG_FROM * min(values):
        log_values(axes)


def log_values(axes) -> None:
    """A logarithmic y-axis with plain numbers as labels."""
    axes.set(yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.minorticks_off()


def styled(figure) -> None:
    """Adds a light grid and removes the frame."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()


ENDINGS = ("png", "svg")


def save(figure, path: Path) -> list[str]:
    """Writes PATH.png and PATH.svg; returns both paths."""
    make_folder(path.parent)
    names = [f"{path}.{ending}" for ending in ENDINGS]
    for name in names:
        with writing(Path(name)):
            figure.savefig(name, dpi=150)
    return names
