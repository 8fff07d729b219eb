"""Draw the quality of several models against the size of their state.

t2r curve --points=FILE.json --output=FILE.svg

FILE.json: {"length": 2048, "points": [{"name": "t2r", "state_bytes": 2315520, "perplexity": 33.3, "recall": 34.4}]}
There is one plot for each score. In place of "state_bytes" a point may have a "model", a model directory, from which
the bytes of one sequence of "length" tokens are computed. Points named transformer and control are not converted: they
have a colour of their own. `t2r convert --finetune --curve=0,2,4` trains such models, and draws the same in its report.
"""

from typing import Any

from absl import flags

_POINTS = flags.DEFINE_string("points", None, "JSON file with the points.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The plot: FILE.png or FILE.svg.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations of a point's model.")


def main() -> dict[str, Any]:
    from pathlib import Path

    from t2r.console import table
    from t2r.evaluation.damage import check_plot
    from t2r.workflow.curve import draw, measures_of, read_points

    check_plot(_OUTPUT.value)
    points, length = read_points(Path(_POINTS.value), dtype=_DTYPE.value)
    columns = ["state_bytes", *measures_of(points)]
    cells = [[one["name"], *(one.get(name) for name in columns)] for one in points]
    print(table(["model", *columns], [["" if cell is None else cell for cell in row] for row in cells]))
    draw(points, length).savefig(_OUTPUT.value, dpi=150)
    return {"plot": _OUTPUT.value, "length": length, "points": points}
