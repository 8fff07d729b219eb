"""results/README.md and the picture of README.md say what the JSON files in results/ say."""

import importlib.machinery
import importlib.util
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from t2r.workflow.study import columns, markdown

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
    remove_studies(tmp_path / "results")
    path = tmp_path / "results" / "tiny_lm.json"
    content = json.loads(path.read_text())
    content["results"]["t2r_long"]["test"]["perplexity"] = 99.44
    path.write_text(json.dumps(content))
    before = {claim.claim: claim.verdict for claim in results_page.language_modelling()}
    assert before["A converted transformer keeps its accuracy"] == results_page.FAILS
    assert "99.4" in results_page.page() and results_page.main(["--check"]) == 1
    assert "results/README.md: not what the JSON files say" in capsys.readouterr().err
    assert results_page.main([]) == 0 and results_page.main(["--check"]) == 0
    assert results_page.main(["--chek"]) == 2


def test_a_file_that_cannot_be_read_is_named(results_page, tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    monkeypatch.setattr(results_page, "RESULTS", tmp_path / "results")
    path = tmp_path / "results" / "enwik8" / "study.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"rows": [row for row in content["rows"] if row["row"] != "elu"]}))
    results_page.language_models()
    assert "results/enwik8/study.json lacks elu: an older and smaller table is used" in capsys.readouterr().err
    path.write_text("{oops")
    with pytest.raises(SystemExit, match=r"results/enwik8/study\.json cannot be read"):
        results_page.main(["--check"])


def remove_studies(results: Path) -> None:
    """What is left is read from the older and smaller tables."""
    for name in ("enwik8", "tatoeba"):
        shutil.rmtree(results / name)


def write_study(results: Path, name: str, measure: str, scores: dict[str, list[float]]) -> None:
    """A study.json as `t2r study` writes it, with a score for each seed of each row."""
    rows = [
        {"row": row, "seed": seed, measure: value, "steps": 30 if row.endswith("_scratch") else 20, "seconds": 7.0,
         "parameters": 20_500_000, "environment": {"device": "1 x NVIDIA H200"}}
        for row, values in scores.items() for seed, value in enumerate(values)
    ]  # fmt: skip
    (results / name).mkdir()
    (results / name / "study.json").write_text(json.dumps({"rows": rows}))
    (results / name / "study.md").write_text("")


def test_claims_are_read_from_a_study_once_it_is_complete(results_page, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results)
    remove_studies(results)
    monkeypatch.setattr(results_page, "RESULTS", results)
    before = results_page.page()
    worse = {"transformer": 20, "softmax": 20, "t2r_75": 20, "t2r": 21, "elu": 23, "rfa": 24, "t2r_scratch": 22}
    worse |= {"elu_scratch": 25, "rfa_scratch": 26, "phi_frozen": 22, "phi_only": 30, "performer": 27}
    seeds = {
        row: [value - 0.7, value + 0.7] if row in ("t2r", "t2r_scratch") else [value] for row, value in worse.items()
    }
    write_study(results, "enwik8", "perplexity", {row: values for row, values in seeds.items() if row != "rfa"})
    assert results_page.language_modelling()[0].source == "tiny_lm.json", "a row is missing"
    shutil.rmtree(results / "enwik8")
    write_study(results, "enwik8", "perplexity", seeds)
    claims = {claim.claim: claim for claim in results_page.language_modelling()}
    first = claims["A converted transformer keeps its accuracy"]
    assert first.ours == "20.0 → 21.0 ± 0.7 (+5.0%); finetuned alike without a conversion 20.0"
    assert first.scale == (
        "20.5M parameters, Wikipedia (enwik8), 20 steps, 1 to 2 seeds, ± half their range, NVIDIA H200"
    )
    assert first.verdict == results_page.HOLDS and first.source == "enwik8/study.json"
    assert claims["T2R is better than ELU and RFA, converted alike"].verdict == results_page.HOLDS
    assert claims["Pretraining helps T2R"].verdict == results_page.WEAKLY, "seeds spread by more than it helps"
    assert claims["From random initialisation, too, T2R is better than ELU and RFA"].verdict == results_page.HOLDS

    assert claims["Performer, which the paper runs without subtracting a maximum, diverges"].ours.startswith("27.0 ")
    bleu = {row: [60.0 - value] for row, value in worse.items() if not row.startswith(("phi", "performer"))}
    write_study(results, "tatoeba", "bleu", bleu | {"elu": [38.8]})
    claims = {claim.claim: claim for claim in results_page.translation()}
    equal = claims["T2R is as good as ELU with far fewer features, and better than RFA"]
    assert equal.ours == "T2R 39.0, ELU 38.8, RFA 36.0" and equal.verdict == results_page.HOLDS
    assert not [claim for claim in claims if claim.startswith("Performer")], "a row that failed"
    behind = claims["From random initialisation T2R is behind ELU and RFA"]
    assert behind.ours == "T2R 38.0, RFA 34.0, ELU 35.0" and behind.verdict == results_page.FAILS
    assert ">46.4<" in results_page.picture(results_page.LIGHT), "of the models that were trained longest"
    page = results_page.page()
    assert "tatoeba/study.json" in page and "enwik8/study.md" in page and "45.9" not in page and page != before


def test_figures_of_the_study_replace_those_at_a_tiny_scale(results_page, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results)
    remove_studies(results)
    monkeypatch.setattr(results_page, "RESULTS", results)
    tiny = results_page.attention()
    write_study(results, "enwik8", "perplexity", {row: [20.0] for row in results_page.LM_ROWS})
    assert results_page.attention() == tiny, "a study without an analysis"
    shutil.copytree(results / "analysis", results / "enwik8" / "analysis")
    path = results / "enwik8" / "analysis" / "analysis.json"
    content = json.loads(path.read_text())
    for model in content["models"]:
        model["perplexity"] = {"finetuned": 20.0, "random initialisation": 21.5}.get(model["series"], 30.0)
    path.write_text(json.dumps(content))
    claims = {claim.claim: claim for claim in results_page.attention()}
    figure_4 = claims["Pretraining is better than random initialisation at every k"]
    assert figure_4.ours == "k = 4, 8, 32: converted 20.0, 20.0, 20.0; random 21.5, 21.5, 21.5"
    assert figure_4.verdict == results_page.HOLDS and figure_4.source == "enwik8/analysis/analysis.json"
    assert "20 steps of finetuning, 30 from random initialisation" in figure_4.scale
    assert "](enwik8/analysis/entropy.png)" in results_page.page() and "tiny scale" not in results_page.page()


def test_pictures_are_well_formed_and_load_nothing(results_page):
    for colors in (results_page.LIGHT, results_page.DARK):
        text = results_page.picture(colors)
        assert ET.fromstring(text).tag.endswith("svg") and "href" not in text and colors.rnn in text


def test_every_link_of_the_page_exists(results_page):
    import re

    links = re.findall(r"\]\(([^)]+)\)", results_page.page())
    assert (
        len(links) > 30 and [link for link in links if not (ROOT / "results" / link.partition("#")[0]).exists()] == []
    )


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("study.md")), ids=lambda path: path.parent.name)
def test_the_table_of_a_study_has_the_figures_of_its_file(path):
    content = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert path.read_text("utf-8") == markdown(content["rows"], columns(content["data"]))


def test_a_row_without_its_score_is_named(results_page, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results)
    monkeypatch.setattr(results_page, "RESULTS", results)
    path = results / "enwik8" / "study.json"
    content = json.loads(path.read_text("utf-8"))
    content["rows"][2]["perplexity"] = None
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=f"{content['rows'][2]['row']} has no perplexity: restore it from git"):
        results_page.language_models()


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


def test_a_part_of_a_study_gives_the_claims_that_need_no_more(results_page, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results)
    remove_studies(results)
    monkeypatch.setattr(results_page, "RESULTS", results)
    started = {"transformer": [30.0], "t2r_scratch": [25.0], "elu_scratch": [28.0], "rfa_scratch": [24.0]}
    write_study(results, "tatoeba", "bleu", started)
    claims = {claim.claim: claim for claim in results_page.translation()}
    assert claims["Pretraining helps T2R in translation"].source == "tatoeba.json"
    behind = claims["From random initialisation T2R is behind ELU and RFA"]
    assert (behind.source, behind.verdict) == ("tatoeba/study.json", results_page.FAILS)
    assert behind.reason == "it is behind ELU only: see NOTES.md"


def test_the_notes_on_the_study_have_the_losses_of_their_file():
    losses = json.loads((ROOT / "results" / "enwik8" / "losses.json").read_text())
    notes = (ROOT / "results" / "NOTES.md").read_text("utf-8")
    rows, control = ("t2r", "t2r_64", "elu", "performer", "t2r_75", "t2r_window"), losses["softmax"]
    for last in range(200, 1201, 200):
        steps = [step for step in control if last - 200 < int(step) <= last]
        gaps = [sum(losses[row][step] - control[step] for step in steps) / len(steps) for row in rows]
        assert f"| {last - 199} to {last} | {' | '.join(f'{gap:.3f}' for gap in gaps)} |" in notes
