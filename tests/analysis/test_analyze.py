"""t2r analyze: what models are, and what the command writes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from t2r.analysis import page
from t2r.analysis.figures import draw_all
from t2r.analysis.models import SCRATCH, SWAPPED, describe_model, find_model
from t2r.conversion.directory import convert_directory
from t2r.data.tokenizer import SentencePiece
from t2r.errors import InputError
from t2r.model.config import AttentionSpec
from t2r.store import model_dir
from tests.conftest import PROSE, make_model, micro

TRAIN, SWAP = {"action": "train", "config": {"trainable": "all"}}, {"action": "swap"}


def trained(trainable):
    return {"action": "train", "config": {"trainable": trainable}}


def described(history, spec=AttentionSpec("linear", "t2r", 8)):
    model = SimpleNamespace(config=micro(layers=2, attention=(spec, spec)))
    return describe_model("runs/x", model_dir.LoadedModel(model, None, {"history": history}))


def test_what_a_model_is_from_its_provenance():
    assert described([SWAP, TRAIN]).series == SCRATCH and not described([SWAP, TRAIN]).is_aligned
    assert described([TRAIN, SWAP]).series == SWAPPED
    assert described([{"action": "import"}, SWAP]).series == SWAPPED
    assert described([TRAIN, SWAP, TRAIN]).series == "finetuned"
    assert described([TRAIN, SWAP, trained("all_but_feature_maps")]).series == "finetuned, φ frozen"
    assert described([TRAIN, SWAP, trained("feature_maps")]).series == "only φ trained"
    assert described([TRAIN, SWAP, TRAIN]).features == 8
    assert described([TRAIN, SWAP, TRAIN, {"action": "merge"}], AttentionSpec("merged", "t2r", 8)).features == 8
    assert described([TRAIN], AttentionSpec()).series == "transformer"


def test_conversions_other_than_the_papers_are_named():
    windowed = AttentionSpec("windowed", "t2r", 8, window=16, sinks=2)
    assert described([TRAIN, SWAP, TRAIN], windowed).series == "window 16, finetuned"
    assert described([SWAP, TRAIN], AttentionSpec("linear", "rfa", 8)).series == f"rfa, {SCRATCH}"


def model(series, k, perplexity, distance, entropy):
    heads = dict(distance=[distance] * 2, kl=[1.0] * 2, entropy=[entropy] * 2, look_back=[3.0] * 2, span=[9.0] * 2)
    means = dict(distance=distance, kl=1.0, entropy=entropy, look_back=3.0, span=9.0, dead=0.1, clamped=0, no_weight=0)
    attention = dict(name="0.attention", kind="linear", no_weight=0.0, features=None, **heads)
    return dict(model=f"{series}_{k}", series=series, features=k, cross_features=None, perplexity=perplexity,
                causal=means, cross=None, attentions=[attention])  # fmt: skip


def test_figures_have_a_curve_for_each_series(tmp_path):
    """Of Figure 4 models before finetuning are left out; the transformer is a line."""
    models = [model("transformer", None, 60.0, 0.0, 1.0)]
    models += [model(SWAPPED, k, 200.0, 0.9, 3.0) for k in (4, 8)]
    models += [model("finetuned", k, 100.5 - k, 1 / k, 2.0) for k in (8, 4)]
    analysis = dict(data="text:x", split="all", length=8, queries=1, sequences=2, models=models,
                    environment=dict(device="cpu", processor="p", python="3", versions={}))  # fmt: skip
    figures = draw_all(analysis)
    assert list(figures) == ["perplexity", "distance", "entropy", "layers"]
    curves = {line.get_label(): line for line in figures["perplexity"].axes[0].lines}
    assert list(curves) == ["finetuned", "transformer"]
    np.testing.assert_array_equal(curves["finetuned"].get_xdata(), [4, 8])
    np.testing.assert_array_equal(curves["finetuned"].get_ydata(), [96.5, 92.5])
    assert {line.get_label() for line in figures["distance"].axes[0].lines} == {SWAPPED, "finetuned"}
    paths = page.write(tmp_path, analysis, "t2r analyze")
    assert len(paths) == 8 and all((tmp_path / path).stat().st_size for path in paths)
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "<script" not in text and "src=" not in text and text.count("<svg") == 4 and "92.50" in text
    assert json.loads((tmp_path / "analysis.json").read_text())["models"][0]["perplexity"] == 60
    fewer = page.write(tmp_path, analysis | {"models": models[:1]})
    assert {str(path) for path in tmp_path.glob("*.png")} == {path for path in map(str, fewer) if path.endswith("png")}


@pytest.fixture(scope="module")
def imported(tmp_path_factory, tokenizer):
    """(a transformer, its conversion before finetuning): directories of random weights."""
    folder = tmp_path_factory.mktemp("analysed")
    history = {"history": [{"action": "import"}]}
    model_dir.save(folder / "a", model_dir.LoadedModel(make_model(micro(vocab_size=300)), tokenizer, history))
    convert_directory(str(folder / "a"), folder / "b", feature_map="t2r", features=4)
    return folder / "a", folder / "b"


@pytest.mark.slow
def test_the_command(imported, text_file, tmp_path, call):
    """Figures of one point each, the page, and the JSON line."""
    transformer, swapped = imported
    status, result = call(
        "analyze", f"--model={swapped}", f"--transformer={transformer}", f"--data=text:{text_file}", "--length=16",
        "--sequences=3", "--batch=2", "--queries=8", f"--output={tmp_path / 'out'}",
    )  # fmt: skip
    first, second = result["models"]
    assert status == 0 and (first["series"], second["series"], second["features"]) == ("transformer", SWAPPED, 4)
    assert first["causal"]["distance"] == 0 < 0.1 < second["causal"]["distance"] and result["sequences"] == 3
    written = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert [one["perplexity"] for one in written["models"]] == [first["perplexity"], second["perplexity"]]
    assert len(written["models"][1]["attentions"]) == 2 and (tmp_path / "out" / "distance.png").stat().st_size > 5000


@pytest.mark.slow
def test_translation_models_have_figures_of_both_kinds(saved_translator, tmp_path, call):
    convert_directory(str(saved_translator), tmp_path / "t2r", feature_map="t2r", features=4, cross_features=8)
    status, result = call(
        "analyze", f"--model={tmp_path / 't2r'}", "--data=builtin:numbers-en-de", "--sequences=6", "--batch=2",
        f"--output={tmp_path / 'out'}",
    )  # fmt: skip
    (model,) = result["models"]
    assert status == 0 and (model["features"], model["cross_features"]) == (4, 8)
    assert model["cross"]["look_back"] is None and model["causal"]["look_back"] >= 0 and model["perplexity"] > 1
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names >= {"entropy_causal.png", "entropy_cross.png", "layers_cross.png"} and "distance.png" not in names


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model=", "--data=text:{text}"], "--model is empty"),
        (["--model={b},{b}", "--data=text:{text}"], "more than once"),
        (["--model={b},{b}/", "--data=text:{text}"], "more than once"),
        (["--model={b}", "--data=text:{text}", "--transformer={b}"], "has been converted"),
        (["--model={b}", "--data=text:{text}", "--transformer=builtin:tiny_lm"], "cannot be compared"),
        (["--model={b}", "--data=builtin:numbers-en-de"], "language models need text"),
        (["--model={b}", "--data=text:{text}", "--length=100000"], "too few for a window of 100000"),
        (["--model={b}", "--data=text:{text}", "--length=16", "--queries=17"], "queries=17 must be at most length=16"),
        (["--model={b}", "--data=text:{text}.none"], "no text file"),
        (["--model={b}", "--data=text:{text}", "--split=dev"], "unknown split 'dev'"),
        (["--model={folder}/none", "--data=text:{text}"], "none"),
        (["--model={folder}/none,{b},{folder}/nothing", "--data=text:{text}"], "nothing"),
        (["--model={folder}", "--data=text:{text}"], "config.json does not exist"),
        (["--model={b}", "--data=text:{text}", "--queries=0"], "--queries=0"),
        (["--model={b}", "--data=text:{text}", "--batch=x"], "--batch=x"),
        (["--model={b}", "--data=text:{text}", "--transformer="], "--transformer is empty"),
        (["--model={b}", "--data=text:{text}", "--output="], "the name of the output is empty"),
        (["--model={b}"], "data"),
        (["--model={b},{a}", "--data=text:{text}", "--transformer={a}"], "leave it out of --model"),
        (["--model={b},{a}/", "--data=text:{text}", "--transformer={a}"], "leave it out of --model"),
        (["--model={b}", "--data=text:{text}", "--output={b}"], "holds a model"),
    ],
)
def test_bad_input_gets_one_clear_error(imported, text_file, tmp_path, call, flags, message):
    names = dict(a=imported[0], b=imported[1], text=text_file, folder=tmp_path)
    status, printed = call("analyze", f"--output={tmp_path / 'out'}", *(flag.format(**names) for flag in flags))
    assert status == 2 and printed.startswith("error: ") and message in printed, printed
    assert "Traceback" not in printed and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["report.html", "analysis.json"])
def test_files_of_others_are_not_replaced(imported, text_file, tmp_path, call, name):
    (tmp_path / name).write_text("mine")
    status, printed = call("analyze", f"--model={imported[1]}", f"--data=text:{text_file}", f"--output={tmp_path}")
    assert status == 2 and f"{name} was not written by t2r analyze" in printed
    assert (tmp_path / name).read_text() == "mine"


def test_models_with_other_tokens_are_refused(imported, text_file, tmp_path, call):
    other = SentencePiece.train(PROSE[::-1], 300)  # as many subwords, and others
    model_dir.save(tmp_path / "other", model_dir.LoadedModel(make_model(micro(vocab_size=300)), other, {"history": []}))
    flags = [f"--model={imported[1]}", f"--transformer={tmp_path / 'other'}", f"--data=text:{text_file}", "--length=16"]
    status, printed = call("analyze", *flags, "--sequences=1", f"--output={tmp_path / 'out'}")
    assert status == 2 and "reads text as other tokens than" in printed


def test_an_output_that_is_a_file_is_refused(imported, text_file, call):
    status, printed = call("analyze", f"--model={imported[1]}", f"--data=text:{text_file}", f"--output={text_file}")
    assert status == 2 and "it is a file, not a folder" in printed


def test_a_study_is_no_model(tmp_path):
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InputError, match="is a study: name its rows"):
        find_model(str(tmp_path))


def test_a_run_stands_for_its_model(tmp_path):
    (tmp_path / "model").mkdir()
    assert find_model(str(tmp_path)) == str(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == str(tmp_path / "model") and find_model("builtin:tiny_lm") == "builtin:tiny_lm"


def test_names_in_tables_are_short():
    assert page._short_names(["builtin:a", "runs/x/k4/model", "runs/x/k8/model"]) == {
        "builtin:a": "builtin:a", "runs/x/k4/model": "k4", "runs/x/k8/model": "k8"
    }  # fmt: skip
    assert page._short_names(["a/k4", "b/k4"]) == {"a/k4": "a/k4", "b/k4": "b/k4"}
