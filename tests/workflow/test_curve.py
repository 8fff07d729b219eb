"""The plot of quality against the size of the state, and its input."""

import json

import pytest

from t2r.benchmark.steps import attention_bytes
from t2r.store import model_dir
from t2r.workflow.curve import draw, measures_of

POINTS = [
    {"name": "transformer", "state_bytes": 2**24, "perplexity": 2.5, "recall": 1.25},
    {"name": "4 softmax", "state_bytes": 2**22, "perplexity": 2.75, "recall": None},
    {"name": "none", "state_bytes": 2**20, "perplexity": 3.0, "recall": 20.0},
]


def test_each_measure_has_a_plot_with_a_point_for_each_model_that_has_it():
    assert measures_of(POINTS) == ["perplexity", "recall"]
    perplexity, recall = draw(POINTS, 2048).axes
    line, square = perplexity.lines
    assert line.get_xydata().tolist() == [[1, 3.0], [4, 2.75]] and square.get_xydata().tolist() == [[16, 2.5]]
    assert [text.get_text() for text in perplexity.texts] == ["transformer", "4 softmax", "none"]
    assert [text.get_text() for text in recall.texts] == ["transformer", "none"]
    assert "2,048 tokens, MiB" in recall.get_xlabel() and "lower is better" in recall.get_title()
    assert (perplexity.get_yscale(), recall.get_yscale()) == ("linear", "log")
    (bleu,) = draw([{"name": "a", "state_bytes": 1, "bleu": 0.0, "chrf": 3.0, "sentences": 7}], None).axes
    assert bleu.get_title() == "BLEU (higher is better)" and bleu.get_xlabel() == "state, MiB"


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_command_draws_a_file_of_points(ending, saved_lm, tmp_path, call):
    path, output = tmp_path / "points.json", tmp_path / f"curve.{ending}"
    path.write_text(json.dumps({"length": 40, "points": [*POINTS, {"name": "m", "model": str(saved_lm), "recall": 2}]}))
    status, result = call("curve", f"--points={path}", f"--output={output}")
    assert status == 0 and output.stat().st_size > 1000, result
    counted = attention_bytes(model_dir.load(saved_lm).model.init_state(1, 40))
    assert result["points"] == [*POINTS, {"name": "m", "state_bytes": counted, "recall": 2}]


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("[]", ["a JSON object is needed"]),
        ("{}", ["points must be a list"]),
        ('{"points": []}', ["points must be a list"]),
        ('{"points": [{"name": "a", "state_bytes": 3, "recall": null}]}', ["no point has a score"]),
        (
            '{"length": -1, "points": [{"state_bytes": 0, "perplexity": "2"}, {"name": "b", "model": 3, "recall": 1}]}',
            [
                "length=-1",
                "point 0: perplexity='2'",
                "point 0: it needs a name",
                "state_bytes=0",
                "point 1: it needs s",
            ],
        ),
        ('{"points": [{"name": "a", "state_bytes": 3, "perplexity": NaN}]}', ["perplexity=nan must be a number"]),
        ('{"length": 9, "points": [{"name": "a", "model": "missing", "recall": 1}]}', ["missing"]),
    ],
    ids=range(7),
)
def test_bad_points_get_one_clear_error(content, messages, tmp_path, call):
    path = tmp_path / "points.json"
    path.write_text(content)
    status, printed = call("curve", f"--points={path}", f"--output={tmp_path}/curve.svg")
    assert status == 2 and not (tmp_path / "curve.svg").exists()
    for message in messages:
        assert message in printed
