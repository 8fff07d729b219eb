"""Converts the transformer that ships with t2r into RNNs: swap, finetune, merge, generate, measure, report."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from t2r import environment
from t2r.benchmark.steps import Decoder, DecodeSpeed
from t2r.console import say, table
from t2r.conversion.directory import convert_model, merge_model
from t2r.data.prepared import stamps_of, tokenize
from t2r.data.sources import load_documents
from t2r.decode.sampling import Sampling
from t2r.decode.text import generate_text
from t2r.errors import InputError
from t2r.evaluation.perplexity import document_perplexity
from t2r.evaluation.recall import recall
from t2r.files import make_folder, output_folder, read_json, write_json
from t2r.model.parameters import arrays_of, parameter_count
from t2r.model.transformer import LanguageModel
from t2r.quickstart.page import LABELS, Report, write_report
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from t2r.training.config import conversion, load_config
from t2r.training.trainer import train

MODEL = "builtin:stories"
CONFIGS = {"t2r": "stories.py:t2r", "window": "stories.py:window"}  # conversion → its config; also its folder's name
PROMPT, STORY_LENGTH = "Once upon a time, there was a big bear who lived in the forest.", 160  # in tokens
SAMPLING = Sampling(temperature=0.7, top_p=0.9)
LENGTHS = (128, 512, 1024, 2048)
TIMED_STEPS = 32  # decoding steps that are timed at each length, the last ones


def quickstart(
    workdir: str | Path = "runs/quickstart",
    *,
    data: str | None = None,
    steps: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 16,
) -> dict[str, Any]:
    """Converts the small pretrained transformer and writes report.html. Resumes an interrupted run in `workdir`.

    Returns the perplexities, speeds and sizes, and the paths of the models and the report.
    """
    began, workdir, lengths = time.monotonic(), Path(workdir), sorted(lengths)
    make_folder(output_folder(str(workdir)))
    _check_foreign(workdir)
    configs = {name: load(config, data, steps) for name, config in CONFIGS.items()}

    say(f"1/6  the transformer: {MODEL}")
    transformer = model_dir.load(MODEL)
    converted = read_converted(workdir, configs)
    if converted:
        say(f"2-5  {workdir} has the converted models, their scores and stories: they are not computed again")
    else:
        converted = convert(transformer, configs, workdir)

    say(f"6/6  measure decoding at lengths {', '.join(map(str, lengths))}")
    models = {"transformer": transformer.model, **{name: model_dir.load(workdir / name).model for name in CONFIGS}}
    speeds = measure(models, lengths, batch)

    perplexities = {name: scores["perplexity"] for name, scores in converted.scores.items()}
    lost = perplexities["swapped"] - perplexities["transformer"]
    report = Report(
        parameters=parameter_count(arrays_of(transformer.model)),
        layers=transformer.model.config.layers,
        data=configs["t2r"].data.source,
        steps={name: config.steps for name, config in configs.items()},
        stories_per_step=configs["t2r"].data.batch,
        scores=converted.scores,
        recovered=(perplexities["swapped"] - perplexities["t2r"]) / lost,
        speeds=speeds,
        prompt=PROMPT,
        stories=converted.stories,
        models={name: str(workdir / name) for name in CONFIGS},
        environment=environment.describe(),
        seconds=time.monotonic() - began,
    )
    path = workdir / "report.html"
    write_report(path, report)
    print_report(report, path)
    return summary(report, path)


def _check_foreign(workdir: Path) -> None:
    """Refuses a folder with a report or folders of something else, which would be replaced."""
    for name in CONFIGS:
        model_dir.check_replaceable(workdir / name)
    report = workdir / "report.html"
    if report.exists() and not (workdir / "converted.json").exists():
        raise InputError(f"{report} was not written by a quickstart, and would be replaced: add --workdir=FOLDER")


def load(name: str, data: str | None, steps: int | None) -> ConfigDict:
    """A config that ships, with other data and fewer or more steps if they are given."""
    config = load_config(name)
    config.data.source = data or config.data.source
    if steps:
        config.transfer.steps = config.transfer.steps * steps // config.steps
        config.steps = steps
    return config


class Converted(NamedTuple):
    """What is known of the models once they are converted; they themselves are in workdir/t2r and workdir/window."""

    scores: dict[str, dict[str, float]]  # transformer, swapped, t2r, window → perplexity, recall
    stories: dict[str, str]  # model → continuation of the prompt


def convert(transformer: LoadedModel, configs: dict[str, ConfigDict], workdir: Path) -> Converted:
    """Swaps, finetunes, merges and generates; writes a folder for each conversion and, last, workdir/converted.json."""
    data, tokenizer = configs["t2r"].data, transformer.tokenizer
    tests = [tokenizer.encode(text) for text in load_documents(data.source, "test")]
    pieces = [ids[i : i + data.length - 1] for ids in tests for i in range(0, len(ids), data.length - 1)]
    stream = tokenize(tokenizer, load_documents(data.source, "test"))

    def score(model: LanguageModel) -> dict[str, float]:
        found = document_perplexity(model, pieces, start=tokenizer.end, window=data.length, quiet=True)
        length = min(data.length, 2 * len(stream))
        return {
            "perplexity": found.perplexity,
            "recall": recall(model, stream, length=length, sequences=16, quiet=True),
        }

    say("2/6  swap its attention: φ starts at random")
    swapped = convert_model(transformer, **conversion(configs["t2r"]))
    models = {"transformer": transformer, "swapped": swapped}
    scores = {name: score(loaded.model) for name, loaded in models.items()}

    for number, (name, config) in enumerate(configs.items(), 3):
        say(f"{number}/6  finetune {LABELS[name]} for {config.steps} steps")
        finetuned = model_dir.load(train(config, workdir / "finetune" / name)["model"])
        # Attention with a window needs queries and keys beside φ of them: it stays as it is.
        models[name] = finetuned if config.convert.window else merge_model(finetuned)
        scores[name] = score(models[name].model)
        model_dir.save(workdir / name, models[name], replace=True)

    say("5/6  each tells a story")

    def tell(loaded: LoadedModel) -> str:
        return generate_text(loaded, [PROMPT], STORY_LENGTH, sampling=SAMPLING).texts[0]

    converted = Converted(scores, {name: tell(loaded) for name, loaded in models.items()})
    write_json(workdir / "converted.json", {"request": request_of(configs), **converted._asdict()})
    return converted


def request_of(configs: dict[str, ConfigDict]) -> dict[str, Any]:
    """All that the converted models depend on, as JSON."""
    request = {name: json.loads(config.to_json()) for name, config in configs.items()}
    return json.loads(json.dumps({"configs": request, "data": stamps_of(configs["t2r"].data.source)}))


def read_converted(workdir: Path, configs: dict[str, ConfigDict]) -> Converted | None:
    """What `convert` wrote for the same configs and data; None if it has not finished."""
    path = workdir / "converted.json"
    if not os.path.lexists(path) or not all((workdir / name).exists() for name in configs):
        return None
    content, request = read_json(path, "remove it: it is then computed again"), request_of(configs)
    before = content.pop("request", None)
    if isinstance(before, dict) and before.get("configs") != request["configs"]:
        raise InputError(
            f"{workdir} has a quickstart with other options ({_differences(before, request)}): add --workdir=FOLDER, "
            f"or remove {workdir}"
        )
    return Converted(**content) if before == request and content.keys() == set(Converted._fields) else None


def _differences(before: dict[str, Any], request: dict[str, Any]) -> str:
    """Which options of the quickstart differ; both as `request_of` has them."""
    old, new = (one.get("configs", {}).get("t2r", {}) for one in (before, request))
    pairs = {"--steps": (old.get("steps"), new["steps"])}
    pairs["--data"] = tuple(one.get("data", {}).get("source") for one in (old, new))
    changed = [f"{flag}={was}, now {now}" for flag, (was, now) in pairs.items() if was != now]
    return "; ".join(changed) or "by another version of t2r"


def measure(models: dict[str, LanguageModel], lengths: list[int], batch: int) -> dict[str, list[DecodeSpeed]]:
    """Decoding speeds of each model at each length. They alternate, so that other load on the machine affects all."""
    decoders = {name: Decoder(model, repeat_for=1.0) for name, model in models.items()}
    speeds = {name: [] for name in models}
    for length in lengths:
        for name, decoder in decoders.items():
            speeds[name].append(decoder.steps(batch, length, TIMED_STEPS))
        figures = ", ".join(f"{LABELS[name]} {runs[-1].tokens_per_second:,.0f}" for name, runs in speeds.items())
        say(f"     {length} tokens, in tokens/s: {figures}")
    return speeds


def summary(report: Report, path: Path) -> dict[str, Any]:
    """The JSON line."""
    speeds = report.speeds

    def speedups(name: str) -> dict[str, float]:
        pairs = zip(speeds["transformer"], speeds[name])
        return {str(a.length): round(a.step_seconds / b.step_seconds, 2) for a, b in pairs}

    def sizes(name: str) -> dict[str, int]:
        return {str(speed.length): speed.state_bytes for speed in speeds[name]}

    return {
        **{f"{name}_perplexity": scores["perplexity"] for name, scores in report.scores.items()},
        **{f"{name}_recall": scores["recall"] for name, scores in report.scores.items()},
        "recovered": report.recovered,
        "speedup": speedups("t2r"),
        "window_speedup": speedups("window"),
        "state_bytes": sizes("t2r"),
        "window_state_bytes": sizes("window"),
        "transformer_state_bytes": sizes("transformer"),
        "model": report.models["t2r"],
        "window_model": report.models["window"],
        "report": str(path),
        "seconds": round(report.seconds),
    }


def print_report(report: Report, path: Path) -> None:
    """Prints the figures of the report as plain tables, and its stories."""
    rows = [(LABELS[name], scores["perplexity"], scores["recall"]) for name, scores in report.scores.items()]
    print(table(["model", "perplexity", "recall"], rows))
    print(f"\nfinetuning recovered {report.recovered:.1%} of the perplexity that the swap cost\n")
    names = list(report.speeds)
    headers = ["generated tokens", *(f"{LABELS[name]}{unit}" for unit in (", tokens/s", ", MiB") for name in names)]
    rows = [
        (runs[0].length, *(run.tokens_per_second for run in runs), *(run.state_bytes / 2**20 for run in runs))
        for runs in zip(*report.speeds.values())
    ]
    print(table(headers, rows))
    for name, story in report.stories.items():
        print(f"\n{LABELS[name]}:\n{report.prompt}{story}")
    print(f"\nreport: {path}")
