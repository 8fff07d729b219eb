"""results/README.md and the picture of README.md say what the JSON files in results/ say."""

import importlib.machinery
import importlib.util
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results_page():
    path = ROOT / "launch" / "results_page"
    loader = importlib.machinery.SourceFileLoader("results_page", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("results_page", loader))
    loader.exec_module(module)
    return module


def test_the_page_and_the_pictures_are_what_the_files_say(results_page):
    """If this fails, run launch/results_page."""
    stale = [path.name for path, text in results_page.outputs().items() if path.read_text("utf-8") != text]
    assert stale == []


def test_figures_and_verdicts_follow_the_files(results_page, tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    monkeypatch.setattr(results_page, "RESULTS", tmp_path / "results")
    assert results_page.main(["--check"]) == 0
    path = tmp_path / "results" / "tiny_lm.json"
    content = json.loads(path.read_text())
    content["results"]["t2r_long"]["test"]["perplexity"] = 99.44
    path.write_text(json.dumps(content))
    before = {claim.claim: claim.verdict for claim in results_page.language_modelling()}
    assert before["A converted transformer keeps its accuracy"] == results_page.FAILS
    assert "99.4" in results_page.page() and results_page.main(["--check"]) == 1
    assert "README.md differ" in capsys.readouterr().err
    assert results_page.main([]) == 0 and results_page.main(["--check"]) == 0
    assert results_page.main(["--chek"]) == 2


def test_pictures_are_well_formed_and_load_nothing(results_page):
    for colors in (results_page.LIGHT, results_page.DARK):
        text = results_page.picture(colors)
        assert ET.fromstring(text).tag.endswith("svg") and "href" not in text and colors.rnn in text


def test_every_link_of_the_page_exists(results_page):
    import re

    links = re.findall(r"\]\(([^)]+)\)", results_page.page())
    assert len(links) > 30 and [link for link in links if not (ROOT / "results" / link).exists()] == []


def test_the_notes_on_rfa_have_the_figures_of_their_file():
    rows: dict[float, list[dict]] = {}
    for row in json.loads((ROOT / "results" / "rfa.json").read_text())["rows"]:
        rows.setdefault(row["sigma"], []).append(row)
    notes = (ROOT / "results" / "NOTES.md").read_text("utf-8")
    for sigma, members in rows.items():
        cells = [
            f"{one['distance']:.3f} ({100 * one['negative']:.0f}%, {100 * one['clamped']:.0f}%)" for one in members
        ]
        assert f"| {sigma:g} | {members[0]['kernel_distance']:.3f} | {' | '.join(cells)} |" in notes
