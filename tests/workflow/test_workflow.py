"""convert --finetune: its pieces, and whole conversions that are killed and resumed."""

import html
import json
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import jax.numpy as jnp
import pytest

from conftest import WINDOW, make_model, micro, micro_mt, random_tokens
from t2r.analysis.features import feature_use
from t2r.batch import PADDING, Batch
from t2r.benchmark.steps import attention_bytes
from t2r.conversion.directory import convert_directory
from t2r.conversion.swap import swap
from t2r.data.pairs import number_pairs
from t2r.data.sources import load_documents
from t2r.errors import InputError
from t2r.model.parameters import arrays_of, with_arrays
from t2r.store import model_dir
from t2r.training.metrics import read_metrics
from t2r.workflow.convert import convert_and_finetune, warn_of_window
from t2r.workflow.page import gain, write_report
from t2r.workflow.recipe import make_config, parse_fields
from t2r.workflow.steps import Steps
from tests.commands.test_import import with_tokenizer
from tests.damages import snapshot
from tests.importers.make_references import FOLDER
from tests.training.runs import ROOT, environment, train


def without_features(model, name: str, heads_and_features: list[tuple[int, int]]):
    """The model with some features of one φ that are zero for every input."""
    arrays = dict(arrays_of(model))
    weight, bias = (f"blocks.{name}.feature_map.{part}" for part in ("weight", "bias"))
    for head, feature in heads_and_features:
        arrays[weight] = arrays[weight].at[head, feature].set(0)
        arrays[bias] = arrays[bias].at[head, feature].set(-1)
    return with_arrays(model, arrays)


@pytest.mark.parametrize("plan", [{}, WINDOW], ids=["linear", "windowed"])
def test_dead_features_are_those_that_are_zero_for_all_tokens(plan):
    model = swap(make_model(micro()), features=6, keep="1", **plan)
    batch = Batch(random_tokens(4, 40))
    alive = feature_use(model, batch)["0.attention"]
    dead = feature_use(without_features(model, "0.attention", [(0, 2), (1, 5), (1, 1)]), batch)
    assert list(dead) == ["0.attention"], "layer 1 keeps softmax"
    assert dead["0.attention"].features == alive.features == 6 * model.config.kv_heads
    assert alive.dead == 0 and dead["0.attention"].dead == 3
    assert (alive.clamped is None) == bool(plan), "a window's normaliser has no bound"


def test_clamped_normalisers_are_counted_and_padding_is_not():
    """All features of one head are zero: the normalisers of that head are zero, those of the others are not."""
    model = swap(make_model(micro_mt(encoder_layers=1, layers=1)), features=4)
    tokens, source = random_tokens(3, 9), random_tokens(3, 7, 1)
    before = feature_use(model, Batch(tokens, source))["0.cross"]
    model = without_features(model, "0.cross", [(0, feature) for feature in range(4)])
    use = feature_use(model, Batch(tokens, source))
    assert use.keys() == {"0.attention", "0.cross"}
    assert before.clamped == 0 and use["0.cross"].clamped == 1 / model.config.heads
    assert 4 <= use["0.cross"].dead <= 4 + before.dead
    padded = [jnp.pad(ids, ((0, 2), (0, 5)), constant_values=PADDING) for ids in (tokens, source)]
    again = feature_use(model, Batch(*padded))
    assert {name: u.dead for name, u in again.items()} == {name: u.dead for name, u in use.items()}
    for name in use:
        assert again[name].clamped == pytest.approx(use[name].clamped, abs=1e-6)


def test_a_finished_step_is_not_done_again(tmp_path):
    done = []

    def work(result):
        done.append(result)
        if result == "fails":
            raise KeyboardInterrupt
        return {"result": result, "pair": (1, 2)}

    path = tmp_path / "steps.json"
    steps = Steps(path, {"config.steps": 4}, total=3)
    assert steps.run("a", "first", lambda: work(1)) == {"result": 1, "pair": [1, 2]}
    with pytest.raises(KeyboardInterrupt):
        steps.run("b", "second", lambda: work("fails"))
    steps = Steps(path, {"config.steps": 4}, total=3)
    assert steps.run("a", "first", lambda: work("again"))["result"] == 1
    assert steps.run("b", "second", lambda: work(2), asked=[128])["result"] == 2
    assert steps.run("b", "second", lambda: work(3), asked=[256])["result"] == 3, "it was asked for something else"
    assert done == [1, "fails", 2, 3] and steps.seconds.keys() == {"a", "b"}
    with pytest.raises(InputError, match=r"another conversion.*\n  - config.steps was 4, is 5"):
        Steps(path, {"config.steps": 5}, total=3)
    path.write_text(path.read_text().replace('"result": 1', '"result": 7'))
    with pytest.raises(InputError, match=r"steps.json is damaged.*move it away"):
        Steps(path, {"config.steps": 4}, total=3)


def test_what_has_finished_nothing_may_be_asked_for_anew(tmp_path):
    Steps(tmp_path / "steps.json", {"keep": "auto:99"}, total=3)
    steps = Steps(tmp_path / "steps.json", {"keep": "auto:1"}, total=3)
    steps.run("a", "first", lambda: {})
    Steps(tmp_path / "steps.json", {"keep": "auto:1"}, total=3)
    with pytest.raises(InputError, match=r"keep was auto:1, is auto:2"):
        Steps(tmp_path / "steps.json", {"keep": "auto:2"}, total=3)


def test_a_conversion_that_cannot_be_is_refused_before_anything_is_computed(tmp_path):
    def convert(*arguments, model="builtin:tiny_lm"):
        options = dict(data="builtin:pydoc", steps=5, **dict(argument.split("=") for argument in arguments))
        convert_and_finetune(model, tmp_path / "out", **options)

    for option, message in (
        ("keep=auto:99", "the model has 4 layers"),
        ("keep=auto:1KiB@64", "give at least as much"),
        ("keep=7,9", "layers"),
        ("keep=foo", "keep='foo'"),
    ):
        with pytest.raises(InputError, match=message):
            convert(option)
    with pytest.raises(InputError, match="the model to convert is --model=builtin:tiny_lm"):
        convert_and_finetune(
            "builtin:tiny_lm", tmp_path / "out", data="builtin:pydoc", fields={"init_from": "runs/other"}
        )
    convert_directory("builtin:tiny_lm", tmp_path / "hybrid", keep="3", window=8)
    with pytest.raises(InputError, match="converted already"):
        convert(model=str(tmp_path / "hybrid"))
    assert not list(tmp_path.glob("out*"))


def test_a_window_as_long_as_the_sequences_of_training_is_said(capsys):
    config = make_config("m", micro(), data="text:a.txt", plan=dict(window=300))
    warn_of_window(config)
    assert "exact for 304 tokens, and training sequences have 256" in "".join(capsys.readouterr())
    warn_of_window(make_config("m", micro(), data="text:a.txt"))
    assert "exact" not in "".join(capsys.readouterr())


def test_the_recipe_follows_the_model_and_its_data():
    lm, translator = micro(), micro_mt()
    free = make_config("m", lm, steps=100, fields={"data.batch": 8})
    assert free.teacher.writes and (free.steps, free.transfer.steps, free.eval_every) == (100, 20, 20)
    assert free.teacher.texts == 800 and (free.convert.window, free.convert.sinks) == (64, 4)
    text = make_config("m", lm, data="text:a.txt", plan=dict(window=0, keep="auto:1", features=None))
    assert not text.teacher.writes and text.data.source == "text:a.txt" and text.convert.features == 32
    assert (text.convert.window, text.convert.sinks, text.convert.keep) == (0, 0, "auto:1")
    pairs = make_config("m", translator, data="tsv:a.tsv", fields=parse_fields(["data.valid=tsv:b.tsv", "seed=3"]))
    assert pairs.teacher.writes and pairs.data.valid == "tsv:b.tsv" and pairs.seed == 3
    assert make_config("m", lm, plan=dict(feature_map="elu")).convert.features == 0, "as many as the head has"
    learned = make_config("m", micro(positions="learned", max_positions=32))
    assert learned.data.length == 32 and learned.teacher.length == 31


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data=tsv:a.tsv"], "a language model needs text"),
        (["--recipe=distilled", "--data=text:a.txt"], "choose text or data_free"),
        (["--recipe=text"], "--data is missing"),
        (["--recipe=sonnet"], "unknown variant 'sonnet'"),
        (["--set=data.bach=4"], "did you mean 'data.batch'"),
        (["--set=data.batch"], "write FIELD=VALUE"),
        (["--set=data.batch=many", "--set=steps=1.5"], "data.batch=many (a whole number is needed), steps=1.5 ("),
        (["--window=-1"], "config.convert.window=-1"),
        (["--lengths=few"], "few"),
        (["--curve=few"], "--curve=few: give numbers of layers"),
        (["--curve=0,2,9"], "--curve has 2, 9: of 2 layers 0 to 1 can be kept"),
        (["--workdir={output}"], "two folders that are not in each other"),
        (["--workdir={output}/run"], "two folders that are not in each other"),
        (["--merge"], "--merge changes no attention: leave out --finetune"),
        (["--nofinetune", "--steps=3", "--control"], "nothing is trained or measured: leave out --steps, --control"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_get_one_clear_error(options, message, saved_lm, tmp_path, call):
    options = [option.format(output=tmp_path / "rnn") for option in options]
    status, printed = call("convert", f"--model={saved_lm}", f"--output={tmp_path}/rnn", "--finetune", *options)
    assert status == 2 and message in printed, printed
    assert not list(tmp_path.iterdir())


REPORT = {
    "source": "models/<b>tiny</b>",
    "model": "runs/a & b",
    "data": "3 < 4 tokens",
    "held_out": "<i>text</i>",
    "steps": 5,
    "transfer_steps": 1,
    "plan": {"keep": "0"},
    "scores": {
        "transformer": {"perplexity": 2.5, "recall_512": 1.25},
        "swapped": {"perplexity": 7.5, "recall_512": 6.5},
        "after transfer": {"perplexity": 3.5},
        "converted": {"perplexity": 3.0, "recall_512": 2.0},
    },
    "recovered": 0.9,
    "curve": {"0": 7.5, "1": 3.5, "5": 3.0},
    "attentions": [
        dict(name="0.attention", attention="softmax", exact_for="all", damage=4.5, distance=None, features=None,
             dead=None, dead_by_head=None, clamped=None),
        dict(name="1.attention", attention="linear", exact_for="none", damage=2.75, distance=0.125, features=64,
             dead=7, dead_by_head=[3, 4], clamped=0.015),
    ],
    "damage": {"base": 2.5, "scores": {"0.attention": 4.5, "1.attention": 2.75}, "seconds": 1.0},
    "decoding": {
        "transformer": [dict(length=n, batch=2, seconds=n / 64, spread=0.1, compile_seconds=1.0, state_bytes=2**18 * n,
                             steps=4) for n in (8, 16)],
        "rnn": [dict(length=n, batch=2, seconds=0.2, spread=0.1, compile_seconds=1.0, state_bytes=2**20, steps=4)
                for n in (8, 16)],
        "left_out": {"9999": "the models have 16 positions"},
        "dtype": "float32",
        "bandwidth": {"read": 1e9},
        "predicted_crossover": 12,
        "measured_crossover": 12.8,
    },
    "samples": {name: dict(sample_perplexity=perplexity, sample_repetition=0.0625, sample_loops=0.0, sample_tokens=32.0,
                           greedy_perplexity=1.5, greedy_repetition=0.75, greedy_loops=0.5, greedy_tokens=32.0)
                for name, perplexity in (("transformer", 2.625), ("converted", 3.375))},
    "state_curve": {"length": 2048, "points": [
        dict(name="transformer", state_bytes=2**24, perplexity=2.5, recall_512=1.25),
        dict(name="0 softmax", state_bytes=2**20, perplexity=3.0, recall_512=2.0),
        dict(name="1 softmax", state_bytes=2**23, perplexity=2.75, recall_512=1.5),
    ]},
    "texts": {name: [{"prompt": "Is 1 < 2?", "text": f"<script>alert('{name}')</script>" + 90 * "x"}]
              for name in ("transformer", "swapped", "converted")},
    "not_merged": "cannot merge:\n  - layer 1: <reason>",
    "parameters": 1234,
    "environment": {"device": "1 x cpu", "processor": "x", "python": "3.11", "versions": {"jax": "0.10"}},
    "step_seconds": {"training": 12.5},
    "seconds": 13,
    "command": "t2r convert --prompt='<a>'",
    "config": {"steps": 5},
}  # fmt: skip


class Page(HTMLParser):
    """Checks that every element is closed, and collects elements and their text."""

    VOID = ("meta", "br", "path", "use", "rect", "image")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check_page(text: str) -> Page:
    page = Page(text)
    assert not page.open and not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.seen}
    loaded = [attrs.get("src") or attrs.get("href") or attrs.get("xlink:href") or "#" for _, attrs in page.seen]
    assert all(name.startswith("#") for name in loaded) and "@import" not in text and "url(http" not in text
    assert "color-scheme: light dark" in text
    return page


def test_the_page_shows_what_was_measured_and_escapes_html(tmp_path):
    write_report(tmp_path / "report.html", REPORT)
    page = check_page((tmp_path / "report.html").read_text("utf-8"))
    assert {"b", "i", "reason", "a"} & {tag for tag, _ in page.seen} == {"b"}, "only the page's own"
    for text in ("<script>alert('swapped')</script>", "Is 1 < 2?", "<i>text</i>", "runs/a & b", "<reason>"):
        assert text in page.text
    for text in (
        "90.0%",
        "recall at 512 tokens",
        "after transfer",
        "0.1250",
        "1.50%",
        "12 tokens (predicted",
        "3.375",
        "6.25%",
        "8.00 MiB",
    ):
        assert text in page.text
    assert "13 tokens (measured)" in page.text and "9999 tokens are left out" in page.text
    assert [tag for tag, _ in page.seen].count("svg") == 4, "curve, damage, decoding, state"
    for share, words in [(-0.2, "made it worse"), (2.4, "now below the transformer's"), (None, "")]:
        text = gain({"recovered": share})
        assert words in text and "%" not in text
    json.dumps(REPORT)  # the page is made from what report.json holds


# Runs in the page: the size of each element that must be seen, as JSON in its title.
LOOK = """<script>
addEventListener("load", () => {
  const sizes = tag => [...document.querySelectorAll(tag)].map(element => {
    const {width, height} = element.getBoundingClientRect();
    return {text: element.textContent, width, height, cut: element.scrollWidth > element.clientWidth};
  });
  const seen = Object.fromEntries(["h1", "h2", "table", "figure > svg", "pre"].map(tag => [tag, sizes(tag)]));
  const page = document.documentElement;
  document.title = JSON.stringify({seen, width: page.scrollWidth, window: innerWidth});
});
</script>"""


def look_at(path: Path, width: int) -> dict:
    """What a browser shows of a page in a window of this width."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    watched = path.with_name("watched.html")
    watched.write_text(path.read_text("utf-8").replace("</html>", f"{LOOK}</html>"), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    options += [f"--user-data-dir={path.parent}/profile", "--dump-dom", watched.as_uri()]
    run = subprocess.run([browser, *options], capture_output=True, text=True, timeout=120, check=True)
    assert ":CONSOLE" not in run.stderr, run.stderr
    return json.loads(html.unescape(run.stdout.partition("<title>")[2].partition("</title>")[0]))


@pytest.mark.parametrize("width", [1100, pytest.param(500, marks=pytest.mark.slow)])
def test_the_page_is_seen_in_a_browser(width, tmp_path):
    """All sections, tables and plots, without an error, and without scrolling sideways, also in a narrow window."""
    write_report(tmp_path / "report.html", REPORT)
    shown = look_at(tmp_path / "report.html", width)
    assert shown["width"] <= shown["window"] <= width
    seen = shown["seen"]
    assert [element["text"] for element in seen["h2"]] == [
        "Scores", "Each attention", "Decoding", "Quality against state", "What the models write", "Texts",
        "How it was made",
    ]  # fmt: skip
    assert len(seen["figure > svg"]) == 4 and len(seen["table"]) == 6
    assert all(plot["width"] > 400 and plot["height"] > 100 for plot in seen["figure > svg"])
    assert not any(text["cut"] for text in seen["pre"]), "long words are broken"
    hidden = {"cannot merge", json.dumps(REPORT["config"], indent=1)[:12]}  # in what a click unfolds
    for element in (*seen["h1"], *seen["h2"], *seen["table"], *seen["pre"]):
        if not element["text"].startswith(tuple(hidden)):
            assert element["width"] > 50 and element["height"] > 15, element


@pytest.mark.slow
def test_an_error_of_a_page_is_noticed(tmp_path):
    (tmp_path / "page.html").write_text("<html><meta charset=utf-8><script>missing()</script></html>")
    with pytest.raises(AssertionError, match="CONSOLE"):
        look_at(tmp_path / "page.html", 500)


def command(*arguments):
    return [sys.executable, "-m", "t2r", "convert", "--finetune", *arguments]


def kill_at(line: str, arguments, with_signal=signal.SIGKILL) -> str:
    """Runs the command until it prints a line, then kills it; returns what it printed after that line."""
    process = subprocess.Popen(command(*arguments), env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    printed = []
    for text in process.stderr:
        printed.append(text)
        if text.startswith(line):
            break
    process.send_signal(with_signal)
    _, rest = process.communicate(timeout=300)
    assert printed and printed[-1].startswith(line), "".join(printed)
    return rest


def run(arguments) -> tuple[dict, str]:
    done = subprocess.run(command(*arguments), env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_a_language_model_is_converted_and_resumed_after_kills(tmp_path):
    """On a text the model was not trained on; killed in the training and after it."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(load_documents("builtin:pydoc", "test"))[:40_000])
    output = tmp_path / "rnn"
    small = ["--set=data.batch=2", "--set=data.length=32", "--lengths=16,32", "--prompt=Return a new"]
    options = ["--model=builtin:tiny_lm", f"--output={output}", f"--data=text:{text}", "--steps=5", "--keep=auto:1"]
    options += ["--window=8", "--sinks=1", "--control", *small]
    kill_at("stage distill", options)
    workdir = tmp_path / "rnn.run"
    assert not output.exists() and "training" not in json.loads((workdir / "steps.json").read_text())["steps"]
    assert kill_at("6/10", options, signal.SIGINT).endswith("interrupted: run the same command to resume\n")
    before = snapshot(output), snapshot(workdir / "finetune")
    result, printed = run(options)
    assert printed.count("(finished before)") == 5 and "stage transfer" not in printed
    assert (snapshot(output), snapshot(workdir / "finetune")) == before

    scores = result["scores"]
    assert list(scores) == ["transformer", "swapped", "after transfer", "converted", "control"]
    logged = {line["step"]: line.get("valid_perplexity") for line in read_metrics(workdir / "finetune/metrics.jsonl")}
    assert scores["after transfer"] == {"perplexity": logged[1]}
    assert scores["converted"]["perplexity"] == pytest.approx(logged[5], rel=1e-4)
    assert scores["transformer"]["perplexity"] < scores["swapped"]["perplexity"]
    assert all("recall_512" in scores[name] for name in ("transformer", "swapped", "converted", "control"))
    assert list(result["samples"]) == ["transformer", "converted", "control"]
    assert result["samples"]["transformer"]["sample_perplexity"] < result["samples"]["converted"]["sample_perplexity"]
    assert result["merged"] is False and result["speedup"].keys() == {"16", "32"} == result["state_bytes"].keys()
    history = model_dir.load(output).provenance["history"]
    assert [entry["action"] for entry in history][-2:] == ["swap", "train"] and "damage" in history[-2]
    report = json.loads((workdir / "report.json").read_text())
    kept = history[-2]["keep"]
    for attention in report["attentions"]:
        softmax = attention["name"] == f"{kept}.attention"
        assert attention["attention"] == ("softmax" if softmax else "windowed")
        assert (attention["distance"] is None) == (attention["dead"] is None) == softmax
        assert attention["damage"] == report["damage"]["scores"][attention["name"]]
    page = check_page(Path(result["report"]).read_text("utf-8"))
    assert "a window needs its queries and keys" in page.text and "Return a new" in page.text
    assert "t2r convert --finetune" in page.text

    again, printed = run(options)
    assert again == result and printed.count("(finished before)") == 10
    status = subprocess.run(command(*options, "--seed=1"), env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert status.returncode == 2 and "config.seed was 0, is 1" in status.stderr


@pytest.mark.slow
def test_a_translation_model_is_converted_and_merged(saved_translator, tmp_path, call):
    """On sentence pairs, since the translations of a random model do not end; without a window, so that φ is merged."""
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("\n".join("\t".join(pair) for pair in number_pairs(1000)[:300]))
    options = [f"--model={saved_translator}", f"--output={tmp_path}/rnn", f"--data=tsv:{pairs}", "--steps=4"]
    options += ["--window=0", "--set=data.length=16", "--set=data.batch_tokens=128", "--set=data.buckets=1"]
    options += ["--recipe=pairs", "--set=transfer.steps=2", "--lengths=8", "--finetune"]
    status, result = call("convert", *options)
    assert status == 0, result
    assert (
        result["samples"] is None
        and result["merged"]
        and set(result["scores"]["converted"]) == {"perplexity", "bleu", "chrf", "sentences"}
    )
    loaded = model_dir.load(tmp_path / "rnn")
    assert {spec.kind for spec in (*loaded.model.config.attention, *loaded.model.config.cross_attention)} == {"merged"}
    assert [entry["action"] for entry in loaded.provenance["history"]] == ["swap", "train", "merge"]
    report = json.loads((tmp_path / "rnn.run" / "report.json").read_text())
    assert [attention["name"] for attention in report["attentions"]] == [
        "0.attention", "0.cross", "1.attention", "1.cross",
    ]  # fmt: skip
    assert all(attention["clamped"] is not None for attention in report["attentions"])
    assert len(report["texts"]["converted"]) == 3
    check_page((tmp_path / "rnn.run" / "report.html").read_text("utf-8"))


TRANSLATOR = """
from t2r.training.config import architecture, load_config

def get_config():
    config = load_config("number_words")
    config.model = architecture("micro_mt", width=64, feedforward=128)
    config.data.update(source="tsv:{pairs}", vocab_size=330, length=24, batch_tokens=1024, buckets=1)
    config.steps, config.label_smoothing, config.average_checkpoints = 100, 0.0, 1
    config.optimizer.update(schedule="constant", learning_rate=3e-3, warmup_steps=20, clip_norm=1.0)
    return config
"""


@pytest.mark.slow
def test_a_translation_model_learns_from_its_own_translations(tmp_path):
    """The default recipe, whole: a translator of numbers is trained, and converted with what it translates itself."""
    pairs, config = tmp_path / "pairs.tsv", tmp_path / "config.py"
    pairs.write_text("\n".join(f"{german}\t{english}" for english, german in number_pairs(1000)[100:]))
    config.write_text(TRANSLATOR.format(pairs=pairs))
    trained = train(config, tmp_path / "translator")
    assert trained.returncode == 0, trained.stderr
    # What it learns from must be its own translations: the targets that it is given now are of no use.
    sources = tmp_path / "sources.tsv"
    sources.write_text("\n".join(f"{line.partition(chr(9))[0]}\tnot read" for line in pairs.read_text().splitlines()))
    scored = tmp_path / "scored.tsv"
    scored.write_text("\n".join(pairs.read_text().splitlines()[::9]))
    options = [f"--model={tmp_path}/translator/model", f"--output={tmp_path}/rnn", f"--data=tsv:{sources}"]
    options += [f"--set=data.valid=tsv:{scored}", "--steps=40", "--keep=auto:1", "--window=4", "--sinks=1"]
    options += ["--set=data.length=24", "--set=data.batch_tokens=1024", "--set=data.buckets=1", "--lengths=8,16"]
    result, printed = run([*options, "--set=optimizer.learning_rate=2e-3", "--curve=1"])
    assert "generates 900 texts" in printed

    scores = result["scores"]
    assert list(scores) == ["transformer", "swapped", "after transfer", "converted"]
    before, swapped, after = (scores[name]["bleu"] for name in ("transformer", "swapped", "converted"))
    assert before > 80 and swapped < before - 10 and after > (before + swapped) / 2
    history = model_dir.load(tmp_path / "rnn").provenance["history"]
    entry = next(entry for entry in history if entry["action"] == "swap")
    assert entry["asked"] == {"keep": "auto:1", "cross_keep": "auto:1"}
    damage = entry["damage"]["scores"]
    assert list(damage) == ["0.attention", "0.cross", "1.attention", "1.cross"]
    for field, name in (("keep", "attention"), ("cross_keep", "cross")):
        assert entry[field] == max("01", key=lambda layer: damage[f"{layer}.{name}"])
    report = json.loads((tmp_path / "rnn.run/report.json").read_text())
    for attention in report["attentions"]:
        kept = entry["keep"] if attention["name"].endswith(".attention") else entry["cross_keep"]
        assert (attention["attention"] == "softmax") == attention["name"].startswith(f"{kept}.")
        assert attention["damage"] == damage[attention["name"]]
    assert [point["name"] for point in report["state_curve"]["points"]] == ["transformer", "1 softmax"]
    assert all("bleu" in point for point in report["state_curve"]["points"]) and report["samples"] is None
    page = check_page(Path(result["report"]).read_text("utf-8"))
    assert "Quality against state" in page.text and "What the models write" not in page.text


@pytest.mark.slow
def test_a_model_of_another_library_is_imported_once(tmp_path, call):
    """From a Hugging Face directory to an RNN that trained on what the transformer wrote."""
    source = shutil.copytree(FOLDER / "llama", tmp_path / "llama")
    with_tokenizer(source)
    options = [f"--model={source}", f"--output={tmp_path}/rnn", "--steps=5", "--features=4", "--window=4", "--finetune"]
    options += ["--set=teacher.texts=40", "--set=teacher.length=24", "--set=data.length=24", "--set=data.batch=8"]
    options += ["--lengths=8", "--control", "--curve=0,1"]
    status, result = call("convert", *options)
    assert status == 0, result
    curve, points = result["state_curve"], {point["name"]: point for point in result["state_curve"]["points"]}
    assert list(points) == ["transformer", "control", "0 softmax", "1 softmax"] and curve["length"] == 2048
    assert points["0 softmax"].items() >= result["scores"]["converted"].items(), "it is not trained twice"
    paths = dict(zip(points, ("transformer", "control/model", "finetune/model", "curve/1/model")))
    for name, path in paths.items():
        state = model_dir.load(tmp_path / "rnn.run" / path).model.init_state(1, curve["length"])
        assert points[name]["state_bytes"] == attention_bytes(state)
    assert sorted(path.name for path in (tmp_path / "rnn.run/curve").iterdir()) == ["1"]
    assert next((tmp_path / "rnn.run/curve/1").glob("teacher-*")).is_symlink(), "the texts are those of the first run"
    assert "recall_" in "".join(result["scores"]["converted"]) and result["scores"]["control"]["perplexity"] > 1
    history = model_dir.load(tmp_path / "rnn").provenance["history"]
    assert [entry["action"] for entry in history] == ["import", "swap", "train"]
    assert "the texts that the transformer wrote" in (tmp_path / "rnn.run" / "report.html").read_text("utf-8")
    before = snapshot(tmp_path / "rnn.run" / "transformer")
    assert call("convert", *options) == (0, result)
    assert snapshot(tmp_path / "rnn.run" / "transformer") == before

    elsewhere = shutil.copytree(source, tmp_path / "other")
    status, printed = call("convert", *options, f"--model={elsewhere}")
    assert status == 2 and f"was imported from {source}" in printed
    shutil.rmtree(tmp_path / "rnn")  # it is written again, from the training run
    status, again = call("convert", *options)
    assert status == 0 and again["scores"] == result["scores"]
    assert model_dir.load(tmp_path / "rnn").provenance["history"] == history
