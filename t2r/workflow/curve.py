"""Quality against the size of the state: a plot with a point for each model, such as one for each number of softmax
layers kept."""

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from t2r.errors import raise_all
from t2r.files import read_json
from t2r.importers import by_name
from t2r.model.config import ModelConfig
from t2r.model.state_size import sequence_bytes
from t2r.plots import RNN, SOFTMAX, styled, value_axis

NOT_CONVERTED = ("transformer", "control")  # names of models that are drawn in the other colour, without a line
BETTER = {"perplexity": "lower", "recall": "lower", "bleu": "higher"}  # by the first word of a measure
DESCRIBES = ("name", "state_bytes", "model")  # fields of a point that are no scores
HIDDEN = ("chrf", "sentences")  # scores of a conversion that have no plot of their own


def point(name: str, config: ModelConfig, length: int, scores: dict[str, float]) -> dict[str, Any]:
    """A model as a point of the plot: its name, the size of its state, and its scores by measure."""
    return {"name": name, "state_bytes": sequence_bytes(config, length), **scores}


def measures_of(points: list[dict[str, Any]]) -> list[str]:
    """What the points are scored by, in the order in which it is first met."""
    names = dict.fromkeys(name for one in points for name, value in one.items() if value is not None)
    return [name for name in names if name not in (*DESCRIBES, *HIDDEN)]


def draw(points: list[dict[str, Any]], length: int | None) -> Figure:
    """One plot for each measure: its value against the bytes of state of one sequence of `length` tokens."""
    measures = measures_of(points)
    figure = Figure(figsize=(5.2 * len(measures), 4.2))
    for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures):
        of_length = f" of one sequence of {length:,} tokens" if length else ""
        axes.set(xlabel=f"state{of_length}, MiB", title=title(measure))
        _draw_measure(axes, measure, [one for one in points if one.get(measure) is not None])
    styled(figure)
    return figure


def words(measure: str) -> str:
    """A measure in words: `recall_512` is recall at 512 tokens."""
    name, _, length = measure.partition("_")
    if length.isdecimal():
        return f"{name} at {length} tokens"
    return "BLEU" if measure == "bleu" else measure.replace("_", " ")


def title(measure: str) -> str:
    """A measure in words, with the direction in which it improves if that is known."""
    better = BETTER.get(measure.partition("_")[0])
    return f"{words(measure)} ({better} is better)" if better else words(measure)


def _draw_measure(axes: Axes, measure: str, points: list[dict[str, Any]]) -> None:
    places = [(one["name"], one["state_bytes"] / 2**20, one[measure]) for one in points]
    converted = sorted(place[1:] for place in places if place[0] not in NOT_CONVERTED)
    if converted:
        axes.plot(*zip(*converted), "o-", color=RNN)
    for name, size, value in places:
        if name in NOT_CONVERTED:
            axes.plot(size, value, "s", color=SOFTMAX)
        axes.annotate(name, (size, value), (4, 5), textcoords="offset points", fontsize=8, rotation=25)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.3g}"))
    value_axis(axes, [value for *_, value in places])
    axes.minorticks_off()
    axes.margins(0.2)  # for the names


def read_points(path: Path, *, dtype: str = "float32") -> tuple[list[dict[str, Any]], int | None]:
    """(the points of a JSON file {"length": tokens, "points": [...]}, its length).

    A point has a `name`, the `state_bytes` of one sequence or the `model` directory from which they are computed, and
    scores, such as `perplexity` and `recall`; null is one that was not measured.
    """
    content = read_json(path, 'give {"length": 2048, "points": [{"name": "t2r", "state_bytes": 1, "perplexity": 2}]}')
    points, length = content.get("points"), content.get("length")
    problems = [] if length is None or _is_count(length) else [f"length={length!r} must be a whole number above 0"]
    if not isinstance(points, list) or not points or not all(isinstance(one, dict) for one in points):
        raise_all(f"{path}:", [*problems, "points must be a list of objects"])
    for number, one in enumerate(points):
        problems += [f"point {number}: {problem}" for problem in _problems(one, length)]
    if not measures_of(points):
        problems.append("no point has a score, such as perplexity")
    raise_all(f"{path}:", problems)
    return [_complete(one, length, dtype) for one in points], length


def _problems(one: dict[str, Any], length: Any) -> list[str]:
    scores = {name: value for name, value in one.items() if name not in DESCRIBES}
    problems = [f"{name}={value!r} must be a number, or null" for name, value in scores.items() if not _is_score(value)]
    if not isinstance(one.get("name"), str):
        problems.append("it needs a name")
    if "state_bytes" in one and not _is_count(one["state_bytes"]):
        problems.append(f"state_bytes={one['state_bytes']!r} must be a whole number above 0")
    if "state_bytes" not in one and not (isinstance(one.get("model"), str) and length):
        problems.append("it needs state_bytes; or a model, and the file a length")
    return problems


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _complete(one: dict[str, Any], length: int | None, dtype: str) -> dict[str, Any]:
    scores = {name: value for name, value in one.items() if name != "model"}
    if "state_bytes" in one:
        return scores
    config = by_name.load_config(one["model"], dtype=dtype)
    return {**scores, "state_bytes": sequence_bytes(config, length)}
