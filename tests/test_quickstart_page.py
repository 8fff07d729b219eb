"""The quickstart's page: it says what was converted, what that cost and what it brought, and fits any screen."""

import html
import re

import pytest

from t2r.benchmark.steps import DecodeSpeed
from t2r.errors import InputError
from t2r.files import write_json
from t2r.quickstart import run
from t2r.quickstart.page import Report, write_report
from tests.workflow.test_workflow import look_at


def speeds(rates: list[int], sizes: list[int]) -> list[DecodeSpeed]:
    measured = zip((128, 2048), rates, sizes)
    return [DecodeSpeed(length, 16, 16 * 32 / rate, 0.1, 1.0, size << 20, 32) for length, rate, size in measured]


STORIES = {name: f" This was told by {name}.\n<The end>" for name in ("transformer", "swapped", "t2r", "window")}
REPORT = Report(
    parameters=3_100_000,
    layers=6,
    data="builtin:stories",
    steps={"t2r": 120, "window": 24},
    stories_per_step=8,
    scores={
        "transformer": {"perplexity": 4.111, "recall": 2.222},
        "swapped": {"perplexity": 44.444, "recall": 41.0},
        "t2r": {"perplexity": 5.011, "recall": 5.555},
        "window": {"perplexity": 4.222, "recall": 3.333},
    },
    recovered=0.9777,
    speeds={
        "transformer": speeds([4000, 1000], [18, 288]),
        "t2r": speeds([8000, 8000], [2, 2]),
        "window": speeds([4000, 4000], [12, 12]),
    },
    prompt="Once upon a time",
    stories=STORIES,
    models={"t2r": "runs/quickstart/t2r", "window": "runs/quickstart/window"},
    environment={
        "device": "1 x cpu",
        "processor": "x86_64, 2 cores",
        "python": "3.12.3",
        "versions": {"jax": "0.11.2"},
    },
    seconds=222.2,
)


def words(page: str) -> str:
    """The text of a page, without its tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_the_page_says_what_was_converted_what_it_cost_and_what_it_brought(tmp_path):
    write_report(tmp_path / "report.html", REPORT)
    page = (tmp_path / "report.html").read_text("utf-8")
    text = words(page)
    assert "A transformer of 3.1 million parameters that writes stories, in two ways." in text
    assert "makes the softmax attention of all 6 layers linear" in text
    assert "T2R: 120 steps of finetuning, each on 8 stories that the transformer had written itself" in text
    assert "perplexity of 5.01 where the transformer has 4.11. With a window: 24 steps and 4.22." in text
    assert "After 2,048 tokens T2R writes 8.0 times as fast as the transformer, and its attention needs 1/144" in text
    assert "with a window 4.0 times as fast, and 1/24 of the memory. After only 128 tokens T2R writes 2.0 times" in text
    assert "as fast, with 11% of the memory, and with a window 1.0 times as fast, with 67%." in text
    assert "how surprised the model is by stories that" in text and "recovered 97.8%" in text
    assert "T2R with a window, 24 steps 4.22 3.33" in text and "swapped, not finetuned 44.44 41.00" in text
    assert [text.count(f"Once upon a time This was told by {name}. <The end>") for name in STORIES] == [1] * 4
    assert "t2r convert --model=path/to/your/model" in text and "--model=runs/quickstart/window" in text


def test_a_folder_with_other_options_is_refused(tmp_path):
    configs, others = ({name: run.load(path, None, steps) for name, path in run.CONFIGS.items()} for steps in (4, 5))
    for name in configs:
        (tmp_path / name).mkdir()
    write_json(tmp_path / "converted.json", {"request": run.request_of(configs), "scores": {}, "stories": {}})
    assert run.read_converted(tmp_path, configs) == ({}, {})
    with pytest.raises(InputError, match=r"other options \(--steps=4, now 5\): add --workdir=FOLDER, or remove"):
        run.read_converted(tmp_path, others)


def test_a_report_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(InputError, match="was not written by a quickstart, and would be replaced"):
        run.quickstart(tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    """Such as the package `t2r`, in a clone."""
    (tmp_path / "t2r").mkdir()
    (tmp_path / "t2r" / "mine.py").write_text("mine")
    with pytest.raises(InputError, match="t2r is not a model directory, and would be replaced"):
        run.quickstart(tmp_path)
    assert (tmp_path / "t2r" / "mine.py").read_text() == "mine"


def test_the_page_says_on_which_data_of_ones_own(tmp_path):
    write_report(tmp_path / "report.html", REPORT._replace(data="text:<mine>.txt"))
    assert "each on 8 texts of text:<mine>.txt, and" in words((tmp_path / "report.html").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 500])
def test_the_page_is_seen_in_a_browser(width, tmp_path):
    """All sections, tables and plots, without scrolling sideways; a browser's window is at least 500 wide."""
    write_report(tmp_path / "report.html", REPORT)
    shown = look_at(tmp_path / "report.html", width)
    assert shown["width"] <= shown["window"] <= width
    seen = shown["seen"]
    titles = ["The same beginning, told by each model", "What was lost", "What was gained", "What to do next"]
    assert [element["text"] for element in seen["h2"]] == titles
    assert len(seen["figure > svg"]) == 2 and len(seen["table"]) == 3
    assert all(plot["width"] > 350 for plot in seen["figure > svg"])
    assert not any(text["cut"] for text in seen["pre"])
