"""Converts the transformer that ships with t2r into an RNN: swap, finetune, merge, generate, measure, report."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from t2r import environment
from t2r.benchmark.steps import DecodeSpeed, linear_state_bytes, measure_decoding
from t2r.console import say, table
from t2r.conversion.directory import convert_model, merge_model
from t2r.data.prepared import stamps_of, tokenize
from t2r.data.sources import load_documents
from t2r.decode.sampling import Sampling
from t2r.decode.text import generate_text
from t2r.evaluation.perplexity import perplexity
from t2r.files import make_folder, read_json, write_json
from t2r.model.transformer import LanguageModel
from t2r.quickstart.page import Report, write_report
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from t2r.training.config import conversion, load_config
from t2r.training.metrics import read_metrics
from t2r.training.trainer import train

MODEL, CONFIG = "builtin:tiny_lm", "tiny_lm.py:t2r"
PROMPT, TEXT_LENGTH = "Return a new", 120  # the prompt, and the number of tokens to generate
LENGTHS = (128, 512, 1024, 2048)


def quickstart(
    workdir: str | Path = "runs/quickstart",
    *,
    data: str | None = None,
    steps: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 16,
) -> dict[str, Any]:
    """Converts the small pretrained transformer and writes report.html. Resumes an interrupted run in `workdir`.

    Returns the perplexities, speeds and sizes, and the paths of the model and the report.
    """
    began, workdir, lengths = time.monotonic(), Path(workdir), sorted(lengths)
    make_folder(workdir)
    config = load_config(CONFIG)
    config.data.source = data or config.data.source
    config.steps = steps or config.steps

    say(f"1/6  the transformer: {MODEL}")
    transformer = model_dir.load(MODEL)
    converted = read_converted(workdir, config)
    if converted:
        say(f"2-5  {workdir} has the converted model, its perplexities and texts: they are not computed again")
    else:
        converted = convert(transformer, config, workdir)
    scores, rnn = converted.perplexity, model_dir.load(workdir / "t2r")

    say(f"6/6  measure decoding at lengths {', '.join(map(str, lengths))}")
    slow, fast = measure_both(transformer.model, rnn.model, lengths, batch)

    sizes = rnn.model.config
    report = Report(
        perplexity=scores,
        recovered=(scores["swapped"] - scores["T2R"]) / (scores["swapped"] - scores["transformer"]),
        validation=converted.validation,
        transformer_validation=converted.transformer_validation,
        transformer=slow,
        rnn=fast,
        formula_bytes=linear_state_bytes(sizes.layers, batch, sizes.heads, sizes.attention[0].features, sizes.head_dim),
        prompt=PROMPT,
        texts=converted.texts,
        environment=environment.describe(),
        seconds=time.monotonic() - began,
    )
    path = workdir / "report.html"
    write_report(path, report)
    print_report(report, path)
    return {
        "transformer_perplexity": scores["transformer"],
        "swapped_perplexity": scores["swapped"],
        "t2r_perplexity": scores["T2R"],
        "recovered": report.recovered,
        "speedup": {str(a.length): round(a.seconds / b.seconds, 2) for a, b in zip(slow, fast)},
        "state_bytes": {str(speed.length): speed.state_bytes for speed in fast},
        "transformer_state_bytes": {str(speed.length): speed.state_bytes for speed in slow},
        "model": str(workdir / "t2r"),
        "report": str(path),
        "seconds": round(report.seconds),
    }


class Converted(NamedTuple):
    """What is known of a model once it is converted; the model itself is in workdir/t2r."""

    perplexity: dict[str, float]  # transformer, swapped, T2R → test perplexity
    transformer_validation: float
    validation: dict[int, float]  # finetuning step → validation perplexity
    texts: dict[str, str]  # model → generated continuation of the prompt


def convert(transformer: LoadedModel, config: ConfigDict, workdir: Path) -> Converted:
    """Swaps, finetunes, merges and generates; writes workdir/t2r and, last, workdir/converted.json."""
    tokenizer = transformer.tokenizer
    splits = {split: tokenize(tokenizer, load_documents(config.data.source, split)) for split in ("valid", "test")}

    def score(model: LanguageModel, split: str = "test") -> float:
        return perplexity(model, splits[split], start=tokenizer.end).perplexity

    say("2/6  swap its attention")
    swapped = convert_model(transformer, **conversion(config))
    scores = {"transformer": score(transformer.model), "swapped": score(swapped.model)}
    validation = {0: score(swapped.model, "valid")}

    say(f"3/6  finetune for {config.steps} steps")
    result = train(config, workdir / "finetune")
    finetuned = model_dir.load(result["model"])
    scores["T2R"] = score(finetuned.model)
    validation |= validation_curve(workdir / "finetune")

    say("4/6  merge φ into the projections")
    rnn = merge_model(finetuned)
    model_dir.save(workdir / "t2r", rnn, replace=True)

    say("5/6  generate")
    models = {"transformer": transformer, "swapped, not finetuned": swapped, "T2R": rnn}
    sampling = Sampling(0.8, top_p=0.95)
    texts = {
        name: generate_text(model, [PROMPT], TEXT_LENGTH, sampling=sampling).texts[0] for name, model in models.items()
    }
    converted = Converted(scores, score(transformer.model, "valid"), validation, texts)
    write_json(workdir / "converted.json", {"request": request_of(config), **converted._asdict()})
    return converted


def request_of(config: ConfigDict) -> dict[str, Any]:
    """All that the converted model depends on, as JSON."""
    return json.loads(json.dumps({"config": json.loads(config.to_json()), "data": stamps_of(config.data.source)}))


def read_converted(workdir: Path, config: ConfigDict) -> Converted | None:
    """What `convert` wrote for the same config and data; None if it has not finished."""
    path = workdir / "converted.json"
    if not os.path.lexists(path) or not (workdir / "t2r").exists():
        return None
    content = read_json(path, "remove it: it is then computed again")
    if content.pop("request", None) != request_of(config) or content.keys() != set(Converted._fields):
        return None
    validation = {int(step): score for step, score in content.pop("validation").items()}
    return Converted(validation=validation, **content)


def validation_curve(workdir: Path) -> dict[int, float]:
    """step → validation perplexity, from the metrics of the run."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return {line["step"]: line["valid_perplexity"] for line in lines if "valid_perplexity" in line}


def measure_both(
    transformer: LanguageModel, rnn: LanguageModel, lengths: list[int], batch: int
) -> tuple[list[DecodeSpeed], list[DecodeSpeed]]:
    """Decoding speeds of both models at each length. They alternate, so that other load on the machine affects both."""
    slow, fast = [], []
    for length in lengths:
        slow.append(measure_decoding(transformer, length, batch=batch))
        fast.append(measure_decoding(rnn, length, batch=batch))
        first, second = (f"{speeds[-1].tokens_per_second:,.0f}" for speeds in (slow, fast))
        say(f"     {length} tokens: transformer {first} tokens/s, RNN {second}")
    return slow, fast


def print_report(report: Report, path: Path) -> None:
    """Prints the figures of the report as plain tables."""
    print(table(["model", "test perplexity"], report.perplexity.items()))
    print(f"\nfinetuning recovered {report.recovered:.1%} of the perplexity that the swap cost\n")
    headers = ["generated tokens", "transformer tokens/s", "RNN tokens/s", "speedup", "transformer bytes", "RNN bytes"]
    rows = [
        (a.length, a.tokens_per_second, b.tokens_per_second, a.seconds / b.seconds, a.state_bytes, b.state_bytes)
        for a, b in zip(report.transformer, report.rnn)
    ]
    print(table(headers, rows))
    print(f"\nthe RNN's continuation of {report.prompt!r}:{report.texts['T2R']}\n\nreport: {path}")
