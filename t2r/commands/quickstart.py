"""Make the transformer that ships with t2r an RNN, and report what it cost and what it brought.

python -m t2r quickstart [--workdir=runs/quickstart]

Swap, finetune, merge, generate, measure; the last line is JSON and names report.html. An interrupted run goes on
where it was; a finished one is only measured again.
"""

import time
from pathlib import Path
from typing import Any

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory for all that is made.")
_DATA = flags.DEFINE_string("data", None, "Text to finetune and test on; default: builtin:pydoc.")
_STEPS = flags.DEFINE_integer("steps", None, "Finetuning steps; default: the config's.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", ["128", "512", "1024", "2048"], "Generated lengths to measure.")
_BATCH = flags.DEFINE_integer("batch", 16, "Texts decoded at a time.", lower_bound=1)

MODEL = "builtin:tiny_lm"
CONFIG = f"{Path(__file__).parents[2]}/configs/tiny_lm.py:t2r"
PROMPT = "Return a new"


def main() -> dict[str, Any]:
    from t2r import environment
    from t2r.benchmark.flags import parse_lengths
    from t2r.benchmark.report import Report, write_report
    from t2r.console import say
    from t2r.convert import model_dir
    from t2r.convert.merge import merge
    from t2r.convert.swap import swap
    from t2r.data.prepared import tokenize
    from t2r.data.sources import load_documents
    from t2r.evaluate.perplexity import perplexity
    from t2r.train.config import load_config
    from t2r.train.trainer import train

    began = time.monotonic()
    workdir, lengths = Path(_WORKDIR.value), parse_lengths(_LENGTHS.value)
    config = load_config(CONFIG)
    config.data.source = _DATA.value or config.data.source
    config.steps = _STEPS.value or config.steps

    say(f"1/6  the transformer: {MODEL}")
    transformer, tokenizer, _ = model_dir.load(MODEL)
    splits = {split: tokenize(tokenizer, load_documents(config.data.source, split)) for split in ("valid", "test")}

    def score(model, split: str = "test") -> float:
        return perplexity(model, splits[split], start=tokenizer.end).perplexity

    scores = {"transformer": score(transformer)}

    say("2/6  swap its attention")
    plan = config.convert
    swapped = swap(transformer, feature_map=plan.feature_map, features=plan.features, keep=plan.keep, seed=config.seed)
    scores["swapped"] = score(swapped)
    validation = {0: score(swapped, "valid")}

    say(f"3/6  finetune for {config.steps} steps")
    result = train(config, workdir / "finetune")
    finetuned, _, provenance = model_dir.load(result["model"])
    scores["T2R"] = score(finetuned)
    validation |= validation_curve(workdir / "finetune")

    say("4/6  merge φ into the projections")
    rnn = merge(finetuned)
    history = [*provenance["history"], {"action": "merge"}]
    model_dir.save(workdir / "t2r", model_dir.Model(rnn, tokenizer, {"history": history}), replace=True)

    say("5/6  generate")
    models = {"transformer": transformer, "swapped, not finetuned": swapped, "T2R": rnn}
    texts = {name: write_text(model, tokenizer) for name, model in models.items()}

    say(f"6/6  measure decoding at lengths {', '.join(map(str, lengths))}")
    transformer_speeds, rnn_speeds = measure_both(transformer, rnn, lengths, _BATCH.value)

    report = Report(
        perplexity=scores,
        recovered=(scores["swapped"] - scores["T2R"]) / (scores["swapped"] - scores["transformer"]),
        validation=validation,
        transformer_validation=score(transformer, "valid"),
        transformer=transformer_speeds,
        rnn=rnn_speeds,
        formula_bytes=formula_bytes(rnn.config, _BATCH.value),
        prompt=PROMPT,
        texts=texts,
        environment=environment.describe(),
        seconds=time.monotonic() - began,
    )
    path = workdir / "report.html"
    write_report(path, report)
    print_report(report, path)
    pairs = list(zip(transformer_speeds, rnn_speeds))
    return {
        "transformer_perplexity": scores["transformer"],
        "swapped_perplexity": scores["swapped"],
        "t2r_perplexity": scores["T2R"],
        "recovered": report.recovered,
        "speedup": {str(a.length): round(a.seconds / b.seconds, 2) for a, b in pairs},
        "state_bytes": {str(b.length): b.state_bytes for _, b in pairs},
        "transformer_state_bytes": {str(a.length): a.state_bytes for a, _ in pairs},
        "model": str(workdir / "t2r"),
        "report": str(path),
        "seconds": round(report.seconds),
    }


def validation_curve(workdir: Path) -> dict[int, float]:
    """step → perplexity, as the run logged it."""
    from t2r.train.metrics import read_metrics

    lines = read_metrics(workdir / "metrics.jsonl")
    return {line["step"]: line["valid_perplexity"] for line in lines if "valid_perplexity" in line}


def write_text(model, tokenizer) -> str:
    """What a model writes after the prompt."""
    from t2r.decode.generate import go_on, start
    from t2r.decode.sampling import Sampling

    generation = start(model, [tokenizer.encode(PROMPT)], 120)
    _, rows = go_on(model, generation, 120, end=tokenizer.stop, sampling=Sampling(0.8, top_p=0.95))
    return tokenizer.decode(rows[0])


def measure_both(transformer, rnn, lengths: list[int], batch: int) -> tuple[list, list]:
    """Decoding speeds at each length, the two models side by side, so that a noisy moment falls on both."""
    from t2r.benchmark.decode import measure
    from t2r.console import say

    speeds = []
    for length in lengths:
        speeds.append((measure(transformer, length, batch=batch), measure(rnn, length, batch=batch)))
        first, second = (f"{run.tokens_per_second:,.0f}" for run in speeds[-1])
        say(f"     {length} tokens: transformer {first} tokens/s, RNN {second}")
    return tuple(map(list, zip(*speeds)))


def formula_bytes(config, batch: int) -> int:
    """The state's size by the paper's formula."""
    from t2r.benchmark.decode import linear_state_bytes

    return linear_state_bytes(config.layers, batch, config.heads, config.attention[0].features, config.head_dim)


def print_report(report, path: Path) -> None:
    """The report's figures as plain tables."""
    from t2r.console import table

    print(table(["model", "test perplexity"], report.perplexity.items()))
    print(f"\nfinetuning won back {report.recovered:.1%} of the perplexity the swap cost\n")
    headers = ["generated tokens", "transformer tokens/s", "RNN tokens/s", "speedup", "transformer bytes", "RNN bytes"]
    rows = [
        (a.length, a.tokens_per_second, b.tokens_per_second, a.seconds / b.seconds, a.state_bytes, b.state_bytes)
        for a, b in zip(report.transformer, report.rnn)
    ]
    print(table(headers, rows))
    print(f"\nthe RNN after {report.prompt!r}:{report.texts['T2R']}\n\nreport: {path}")
