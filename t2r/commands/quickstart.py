"""Make the transformer that ships with t2r an RNN, and report what it cost and what it brought.

python -m t2r quickstart [--workdir=runs/quickstart]

Swap, finetune, merge, generate, measure; the last line is JSON and names report.html. An interrupted run goes on
where it was; a finished one is only measured again.
"""

import importlib.util
import time
from pathlib import Path
from typing import Any

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory for all that is made.")
_STEPS = flags.DEFINE_integer("steps", None, "Finetuning steps; default: the config's.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", ["128", "512", "1024", "2048"], "Generated lengths to measure.")
_BATCH = flags.DEFINE_integer("batch", 16, "Texts decoded at a time.", lower_bound=1)

MODEL = "builtin:tiny_lm"
CONFIG = Path(__file__).parents[2] / "configs" / "tiny_lm.py"
PROMPT = "Return a new"


def main() -> dict[str, Any]:
    from t2r import environment
    from t2r.benchmark.decode import linear_state_bytes, measure
    from t2r.benchmark.report import Report, write_report
    from t2r.console import say, table
    from t2r.convert import model_dir
    from t2r.convert.merge import merge
    from t2r.convert.swap import swap
    from t2r.data.batches import tokenize
    from t2r.data.sources import load_documents
    from t2r.decode.generate import go_on, start
    from t2r.decode.sampling import Sampling
    from t2r.errors import InputError
    from t2r.evaluate.perplexity import perplexity
    from t2r.train.metrics import read_metrics
    from t2r.train.trainer import train

    began = time.monotonic()
    workdir = Path(_WORKDIR.value)
    try:
        lengths = sorted({int(length) for length in _LENGTHS.value})
    except ValueError:
        raise InputError(f"--lengths={','.join(_LENGTHS.value)}: give whole numbers such as 128,512") from None
    config = load_config("t2r")
    if _STEPS.value is not None:
        config.steps = _STEPS.value

    say(f"1/6  the transformer: {MODEL}")
    transformer, tokenizer, _ = model_dir.load(MODEL)
    test = tokenize(tokenizer, load_documents(config.data.source, "test"))
    score = lambda model: perplexity(model, test, start=tokenizer.end).perplexity  # noqa: E731
    scores = {"transformer": score(transformer)}

    say("2/6  swap its attention")
    plan = config.convert
    swapped = swap(transformer, feature_map=plan.feature_map, features=plan.features, keep=plan.keep, seed=config.seed)
    scores["swapped"] = score(swapped)

    say(f"3/6  finetune for {config.steps} steps")
    result = train(config, workdir / "finetune")
    finetuned, _, provenance = model_dir.load(result["model"])
    scores["T2R"] = score(finetuned)

    say("4/6  merge φ into the projections")
    rnn = merge(finetuned)
    history = [*provenance["history"], {"action": "merge"}]
    model_dir.save(workdir / "t2r", model_dir.Model(rnn, tokenizer, {"history": history}), replace=True)

    say("5/6  generate")
    texts = {}
    for name, model in {"transformer": transformer, "swapped, not finetuned": swapped, "T2R": rnn}.items():
        generation = start(model, [tokenizer.encode(PROMPT)], 120)
        _, rows = go_on(model, generation, 120, end=tokenizer.end, sampling=Sampling(0.7, top_p=0.9))
        texts[name] = tokenizer.decode(rows[0])

    say(f"6/6  measure decoding at lengths {', '.join(map(str, lengths))}")
    speeds = {"transformer": [], "rnn": []}
    for length in lengths:  # side by side, so that a noisy moment falls on both
        for name, model in {"transformer": transformer, "rnn": rnn}.items():
            speeds[name].append(measure(model, length, batch=_BATCH.value))
            say(f"     {name} at {length}: {speeds[name][-1].tokens_per_second:,.0f} tokens/s")

    shape = rnn.config
    recovered = (scores["swapped"] - scores["T2R"]) / (scores["swapped"] - scores["transformer"])
    report = workdir / "report.html"
    write_report(
        report,
        Report(
            perplexity=scores,
            recovered=recovered,
            steps=config.steps,
            losses=read_metrics(workdir / "finetune" / "metrics.jsonl"),
            transformer=speeds["transformer"],
            rnn=speeds["rnn"],
            formula_bytes=linear_state_bytes(
                shape.layers, _BATCH.value, shape.heads, shape.attention[0].features, shape.head_dim
            ),
            prompt=PROMPT,
            texts=texts,
            environment=environment.describe(),
            seconds=time.monotonic() - began,
        ),
    )
    pairs = list(zip(speeds["transformer"], speeds["rnn"]))
    print(table(["model", "test perplexity"], scores.items()))
    print(f"\nfinetuning won back {recovered:.1%} of the perplexity the swap cost\n")
    headers = ["generated tokens", "transformer tokens/s", "RNN tokens/s", "speedup", "transformer state", "RNN state"]
    print(
        table(
            headers,
            [
                (a.length, a.tokens_per_second, b.tokens_per_second, a.seconds / b.seconds, a.state_bytes, b.state_bytes)
                for a, b in pairs
            ],
        )
    )
    print(f"\nthe RNN after {PROMPT!r}:{texts['T2R']}\n\nreport: {report}")
    return {
        "transformer_perplexity": scores["transformer"],
        "swapped_perplexity": scores["swapped"],
        "t2r_perplexity": scores["T2R"],
        "recovered": recovered,
        "speedup": {str(a.length): round(a.seconds / b.seconds, 2) for a, b in pairs},
        "state_bytes": {str(b.length): b.state_bytes for _, b in pairs},
        "transformer_state_bytes": {str(a.length): a.state_bytes for a, _ in pairs},
        "model": str(workdir / "t2r"),
        "report": str(report),
        "seconds": round(time.monotonic() - began),
    }


def load_config(variant: str):
    """The config that the quickstart shares with `python -m t2r train`."""
    spec = importlib.util.spec_from_file_location("tiny_lm", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variant)
