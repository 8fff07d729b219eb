"""The command line in real processes: results in the last line of output, and errors."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK_TO_COMPILE, make_model, micro
from t2r.data.sources import load_documents
from t2r.model.parameters import arrays_of, with_arrays
from t2r.store import model_dir
from tests.damages import snapshot

ROOT = Path(__file__).parents[2]


def t2r(*arguments, timeout=300, xla_flags=QUICK_TO_COMPILE, stdin=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags}
    return subprocess.run(
        [sys.executable, "-m", "t2r", *map(str, arguments)], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=timeout, input=stdin,
    )  # fmt: skip


def result(run):
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_convert_evaluate_generate_merge(tmp_path, text_file, call):
    """The README's steps, on the model that ships: a random one would generate incomplete characters."""

    def run(*arguments):
        status, output = call(*arguments)
        assert status == 0, output
        return output

    options = ["--model=builtin:tiny_lm", f"--output={tmp_path}/swapped", "--features=8", "--keep=1"]
    swapped = run("convert", *options)
    assert swapped["linear_layers"] == [0, 2, 3] and swapped["softmax_layers"] == [1]
    run("convert", f"--model={tmp_path}/swapped", f"--output={tmp_path}/merged", "--merge")
    scores = run("evaluate", f"--model={tmp_path}/merged", f"--data=text:{text_file}", "--window=64")
    assert {"perplexity", "perplexity_all", "bits_per_byte", "word_perplexity", "tokens"} <= scores.keys()

    state = tmp_path / "state"
    options = [f"--model={tmp_path}/merged", "--temperature=0.9"]
    whole = t2r("generate", *options, "--seed=3", "--prompt=The old", "--length=20")
    first = run("generate", *options, "--seed=3", "--prompt=The old", "--length=8", f"--save_state={state}")
    second = run("generate", *options, f"--load_state={state}", "--length=12")
    assert first["text"] + second["text"] == result(whole)["text"]
    assert result(whole)["tokens_per_second"] > 0
    assert whole.stdout.startswith("The old" + result(whole)["text"]), "the text is streamed"
    both = run("generate", *options, "--prompt=The", "--prompt=A lazy fox", "--length=5")
    assert len(both["text"]) == 2


@pytest.mark.slow
def test_a_window_and_the_layers_that_damage_most_and_recall(saved_lm, tmp_path, text_file, call):
    """damage, convert --window --keep=auto and evaluate --recall: the layer that does most damage keeps softmax."""

    def run(*arguments):
        status, output = call(*arguments)
        assert status == 0, output
        return output

    with_data = [f"--model={saved_lm}", f"--data=text:{text_file}"]
    sizes = ["--window=3", "--sinks=1", "--length=32", "--sequences=4"]
    damage = run("damage", *with_data, *sizes, f"--output={tmp_path}/damage.svg")
    assert damage["scores"].keys() == {"0.attention", "1.attention"} and damage["window"] == 3 and damage["sinks"] == 1
    assert "<svg" in (tmp_path / "damage.svg").read_text()

    options = [f"--output={tmp_path}/rnn", "--window=3", "--sinks=1", "--features=4", "--keep=auto:1"]
    converted = run("convert", *with_data, *options)
    entry = model_dir.load(tmp_path / "rnn").provenance["history"][-1]
    scores = entry["damage"]["scores"]
    worst = max((0, 1), key=lambda layer: scores[f"{layer}.attention"])
    assert converted["softmax_layers"] == [worst] and converted["linear_layers"] == [1 - worst]
    assert entry["keep"] == str(worst) and entry["asked"] == {"keep": "auto:1"}
    config = model_dir.load_config(tmp_path / "rnn")
    assert (config.attention[1 - worst].window, config.attention[1 - worst].sinks) == (3, 1)

    options = [f"--data=text:{text_file}", "--window=64", "--recall=32,48", "--samples=2", f"--scorer={saved_lm}"]
    scores = run("evaluate", f"--model={tmp_path}/rnn", *options, "--sample_length=8", "--sample_prompt=4")
    assert scores["recall_32"] > 1 and scores["recall_48"] > 1
    assert scores["samples"] == 2 and scores["sample_perplexity"] > 1 and 0 < scores["greedy_tokens"] <= 8
    assert scores["sample_repetition"] < 1 and scores["greedy_loops"] == 0
    status, message = call("convert", f"--model={tmp_path}/rnn", f"--output={tmp_path}/merged", "--merge")
    assert status == 2 and f"layer {1 - worst}: attention with a window needs its queries and keys" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damage.svg", "prose.txt", "rnn"]


def test_converts_table_says_which_tokens_are_exact(saved_lm, tmp_path, capsys):
    from conftest import forget_commands
    from t2r.__main__ import main

    flags = [f"--model={saved_lm}", f"--output={tmp_path}/rnn", "--window=3", "--sinks=1", "--features=4", "--keep=1"]
    forget_commands()
    assert main(["convert", *flags]) == 0
    first, second = (re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()[-3:-1])
    assert first == ["0", "windowed", "t2r", "4", "the last 3, the first 1"] and second == ["1", "softmax", "all"]
    forget_commands()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["convert", "--window=-1"], "window=-1 must be at least 0"),
        (["convert", "--window=3", "--sinks=-2"], "sinks=-2 must be at least 0"),
        (["convert", "--sinks=2"], "sinks=2 needs a window"),
        (["convert", "--window=many"], "--window=many"),
        (["convert", "--window=3", "--merge"], "--merge changes no attention: leave out --window"),
        (["convert", "--keep=auto:1"], "--keep=auto measures the model: say on what"),
        (["convert", "--keep=auto:x", "--data=builtin:pydoc"], "keep='auto:x'"),
        (["convert", "--keep=auto:1", "--data=tsv:pairs.tsv"], "a language model needs text"),
        (["convert", "--keep=auto:1", "--data=text:missing.txt"], "missing.txt"),
        (["convert", "--cross_keep=auto:1", "--data=builtin:pydoc"], "a language model has no cross attention"),
        (["convert", "--keep=1", "--data=builtin:pydoc"], "is for --keep=auto"),
        (["convert", "--keep=auto:9", "--data=builtin:pydoc"], "keep='auto:9': the model has 2 layers"),
        (["convert", "--window=999999999"], "must be at most 65,536"),
        (["evaluate", "--data=builtin:pydoc", "--recall=1000000000"], "recall over 1000000000 tokens needs a text"),
        (["generate", "--length=99999999999999999999"], "at most 2,147,483,647"),
        (["generate", "--texts=3"], "--texts and --output belong together"),
        (["generate", "--texts=3", "--output=o.txt", "--prompt=a", "--prompt=b"], "--texts begins all texts alike"),
        (["generate", "--texts=9", "--output=o.txt", "--length=1"], "of 128 texts ended within length=1 tokens"),
        (["generate", "--load_state=tests"], "tests is a folder, not a state file"),
        (["damage", "--data=builtin:pydoc", "--window=0"], "--window=0"),
        (["damage", "--data=builtin:pydoc", "--sinks=-1"], "--sinks=-1"),
        (["damage", "--data=tsv:pairs.tsv"], "a language model needs text"),
        (["damage", "--data=builtin:pydoc", "--output=damage.txt"], "FILE.png or FILE.svg"),
        (["damage", "--data=builtin:pydoc", "--output=missing/damage.png"], "no directory missing"),
        (["damage"], "--data is missing"),
        (["evaluate", "--data=builtin:pydoc", "--recall=many"], "--recall=many: give lengths"),
        (["evaluate", "--data=builtin:pydoc", "--recall=512,2"], "at least 4 tokens"),
        (["evaluate", "--data=builtin:pydoc", "--recall=8", "--documents"], "leave out one of the two"),
        (["evaluate", "--data=builtin:pydoc", "--samples=8", "--documents"], "leave out one of the two"),
        (["evaluate", "--data=builtin:pydoc", "--samples=-1"], "--samples=-1"),
        (["evaluate", "--data=builtin:pydoc", "--scorer=a", "--sample_length=9"], "--sample_length=9: say how many"),
        (["evaluate", "--data=builtin:pydoc", "--samples=8", "--scorer=missing"], "missing"),
        (
            ["evaluate", "--data=builtin:pydoc", "--samples=8", "--scorer=builtin:tiny_lm"],
            "other tokens than the model",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_windows_keeps_and_recalls_get_one_clear_error(flags, message, saved_lm, tmp_path, call):
    output = [f"--output={tmp_path}/x"] if flags[0] == "convert" else []
    status, printed = call(flags[0], f"--model={saved_lm}", *flags[1:], *output)
    assert status == 2 and message in printed, printed
    assert not list(tmp_path.iterdir())


def test_evaluate_documents_independently(saved_lm, tmp_path, call):
    stories = tmp_path / "stories.txt"
    stories.write_text("\n<|endoftext|>\n".join(["The old fox.", "The river " * 20, "A lamp."]))
    options = ["--documents", "--window=16", "--batch=1"]
    _, two = call("evaluate", f"--model={saved_lm}", f"--data=text:{stories}", *options, "--first=2")
    stories.write_text("The old fox.")
    _, one = call("evaluate", f"--model={saved_lm}", f"--data=text:{stories}", *options)
    assert two["documents"] == 2 and two["tokens"] == one["tokens"] + 15 and one["perplexity"] > 1


@pytest.mark.slow
def test_convert_translate_evaluate(saved_translator, tmp_path):
    """Standard input, files, n-best lists and scores, from a hybrid."""
    options = ["--features=4", "--cross_features=8", "--keep=1", f"--output={tmp_path}/rnn"]
    swapped = result(t2r("convert", f"--model={saved_translator}", *options))
    assert swapped["linear_layers"] == [0] and swapped["softmax_layers"] == [1]
    result(t2r("convert", f"--model={tmp_path}/rnn", f"--output={tmp_path}/merged", "--merge"))

    lines = ["forty-two", "", "nine thousand and twelve\u2028one", "six"]
    piped = t2r("translate", f"--model={tmp_path}/merged", "--beam=2", stdin="\n".join(lines) + "\n")
    assert piped.returncode == 0, piped.stderr
    texts = piped.stdout.split("\n")
    assert (
        len(texts) == 5 and texts[1] == texts[4] == "" and json.loads(piped.stderr.splitlines()[-1])["sentences"] == 4
    )
    (tmp_path / "in.txt").write_text("\n".join(lines))
    options = [f"--model={tmp_path}/merged", "--beam=2", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.txt"]
    assert result(t2r("translate", *options, "--n_best=2"))["empty"] == 1
    columns = [line.split("\t") for line in (tmp_path / "out.txt").read_text().splitlines()]
    assert [line[0] for line in columns] == ["1", "1", "2", "3", "3", "4", "4"]
    assert columns[0][2] == texts[0] and float(columns[0][1]) >= float(columns[1][1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt", "merged", "out.txt", "rnn"]

    (tmp_path / "pairs.tsv").write_text("six\tsechs\nten\tzehn\none\teins\n")
    options = [f"--data=tsv:{tmp_path}/pairs.tsv", "--first=2", "--beam=2", "--moses=de"]
    scores = result(t2r("evaluate", f"--model={tmp_path}/merged", *options))
    assert scores["sentences"] == 2 and 0 <= scores["bleu"] <= 100 and 0 <= scores["exact_match"] <= 1
    assert "tok:13a" in scores["signature"] and {"chrf", "tokenized_bleu"} <= scores.keys()


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(tmp_path):
    """On few stories, with few steps and short lengths; the report is self-contained."""
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(load_documents("builtin:stories", "test")))
    options = [f"--workdir={tmp_path}/run", f"--data=text:{text}", "--steps=4", "--lengths=8,16", "--batch=2"]
    run = t2r("quickstart", *options, timeout=900)
    summary = result(run)
    assert summary["transformer_perplexity"] < summary["t2r_perplexity"] < summary["swapped_perplexity"]
    assert summary["transformer_perplexity"] < summary["window_perplexity"] < summary["t2r_perplexity"]
    assert summary["transformer_recall"] > 1 and summary["window_recall"] > 1
    for name in ("speedup", "state_bytes", "window_speedup", "window_state_bytes", "transformer_state_bytes"):
        assert summary[name].keys() == {"8", "16"}
    assert summary["state_bytes"]["8"] == summary["state_bytes"]["16"]
    page = Path(summary["report"]).read_text()
    assert page.count("<svg") == 2 and page.count("<table>") == 3 and page.count("<blockquote>") == 4
    for figure in ("transformer_perplexity", "swapped_recall", "window_perplexity"):
        assert f"<td>{summary[figure]:.2f}</td>" in page
    assert not any(external in page for external in ("<script src", "<link", 'src="http', "@import"))
    assert "<small>Made in" in page and "with Python" in page and "{" not in page.partition("<small>Made in")[2]
    assert "merge" in (tmp_path / "run" / "t2r" / "provenance.json").read_text()

    assert "merge" not in (tmp_path / "run" / "window" / "provenance.json").read_text()

    folders = [tmp_path / "run" / name for name in ("finetune", "t2r", "window")]
    before = [snapshot(folder) for folder in folders]
    again = t2r("quickstart", *options, timeout=900)
    assert "they are not computed again" in again.stderr and "finetune" not in again.stderr
    assert [snapshot(folder) for folder in folders] == before
    measured = ("speedup", "window_speedup", "seconds")
    kept, first = ({k: v for k, v in r.items() if k not in measured} for r in (result(again), summary))
    assert kept == first


@pytest.mark.parametrize("command", ["train", "convert", "damage", "evaluate", "generate", "translate", "quickstart"])
def test_help_names_each_command_and_its_flags(command):
    run = t2r(command, "--help")
    assert run.returncode == 0 and f"t2r {command}" in run.stdout and "\nFlags:\n  --" in run.stdout
    assert command == "quickstart" or "Required. " in run.stdout.split("Flags:")[1].splitlines()[2]
    assert not any(noise in run.stdout for noise in ("None", "t2r.commands", "repeat this option", "(an integer)"))
    listing = t2r("--help")
    assert listing.returncode == 0 and command in listing.stdout


def test_bad_input_gets_one_clear_error(saved_lm, saved_translator, tmp_path):
    def refused(*arguments):
        run = t2r(*arguments)
        assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
        return run.stderr

    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\0\1\2")
    with_model = f"--model={saved_lm}"
    assert "unknown command 'trian'" in refused("trian")
    assert "'t2rr'" in refused("convert", with_model, f"--output={tmp_path}/x", "--feature_map=t2rr")
    assert "features=0" in refused("convert", with_model, f"--output={tmp_path}/x", "--features=0")
    assert "exists already" in refused("convert", with_model, f"--output={tmp_path}")
    assert "binary" in refused("evaluate", with_model, f"--data=text:{binary}")
    assert "lenght" in refused("generate", with_model, "--lenght=5")
    assert "temperature=-1" in refused("generate", with_model, "--temperature=-1")
    assert "GiB are free" in refused("generate", with_model, "--prompt=The", "--length=2000000000")
    assert "--model" in refused("generate", "--prompt=The")
    with_model = f"--model={saved_translator}"
    assert "is text, but the model is" in refused("evaluate", with_model, "--data=builtin:pydoc")
    assert "--n_best=3 is more than --beam=2" in refused("translate", with_model, "--beam=2", "--n_best=3")
    (tmp_path / "long.txt").write_text("one\n" + "seven hundred " * 40)
    long = f"--input={tmp_path}/long.txt"
    assert "line 2" in refused("translate", with_model, long, "--max_source=20", f"--output={tmp_path}/x")
    assert not (tmp_path / "x").exists()


def test_seeds_out_of_range_are_refused(call):
    for command in ("generate", "translate", "convert --output=o"):
        for seed in (-1, 2**64):
            status, printed = call(*command.split(), "--model=builtin:tiny_lm", f"--seed={seed}")
            assert status == 2 and len(printed.splitlines()) == 1 and str(seed) in printed


def test_a_score_that_is_not_a_number_is_null_in_json(tmp_path, text_file, tokenizer, call):
    """The weights are finite; the logits overflow."""
    fields = micro(vocab_size=300, layers=1, adaptive_cutoffs=())
    model = with_arrays(make_model(fields), {n: a * 1e30 for n, a in arrays_of(make_model(fields)).items()})
    model_dir.save(tmp_path / "model", model_dir.LoadedModel(model, tokenizer, {"history": []}))
    status, scores = call("evaluate", f"--model={tmp_path}/model", f"--data=text:{text_file}", "--window=32")
    assert status == 0 and scores["perplexity"] is None and scores["tokens"] > 0


@pytest.mark.slow
def test_on_a_terminal_a_text_is_printed_once():
    """Into a pipe, the last line has it again, for programs."""
    options = ["generate", "--model=builtin:tiny_lm", "--prompt=Return a new", "--length=12"]
    text = result(t2r(*options))["text"]
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "t2r", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=end, stderr=subprocess.DEVNULL)
    os.close(end)
    pieces = []
    with contextlib.suppress(OSError):  # Linux raises it where a terminal ends
        while piece := os.read(terminal, 10_000):
            pieces.append(piece.decode())
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    printed = "".join(pieces).replace("\r\n", "\n")
    assert printed.startswith("Return a new" + text) and printed.count(text) == 1
    summary = json.loads(printed.splitlines()[-1])
    assert summary["tokens"] == 12 and "text" not in summary
