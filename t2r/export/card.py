"""The model card, README.md, of a model exported to Hugging Face's form: what it is, how to load it, its limits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t2r.errors import InputError
from t2r.export.names import ranges
from t2r.files import read_json
from t2r.importers import hub
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.store.model_dir import LoadedModel

PAGE = """---
{front}
---

# {name}

{summary}

It was made with t2r after [Finetuning Pretrained Transformers into RNNs](https://arxiv.org/abs/2103.13076):
{state}.

## How to use it

The model is not part of `transformers`: its code, in plain torch, is in `modeling_t2r.py`, which is loaded with
`trust_remote_code=True`. It needs `torch` and `transformers` 5 or newer.{libraries}

```python
{example}
```

## Layers

{layers}

## History

{history}
{scores}
## Limits

{limits}
"""

LANGUAGE_MODEL = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer(["Once upon a time"], return_tensors="pt", padding=True)
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.batch_decode(output, skip_special_tokens=True))"""
TRANSLATION = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer(["A sentence."], return_tensors="pt", padding=True)
output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.batch_decode(output, skip_special_tokens=True))"""
LIBRARIES = {
    "sentencepiece": " The tokenizer needs the package `sentencepiece`.",
    "pieces": " The tokenizer needs the package `sentencepiece`.",
    "fairseq_subword": " The tokenizer needs the package `sacremoses`.",
}
AGAIN = "remove it, or copy it again"


def find_report(model: Path) -> dict[str, Any] | None:
    """The report that `t2r convert --finetune` wrote of this model beside it, in MODEL.run, if there is one."""
    path = model.with_name(f"{model.name}.run") / "report.json"
    if not path.exists():
        return None
    report = read_json(path, AGAIN)
    scores = report.get("scores")
    if not isinstance(scores, dict) or not all(isinstance(row, dict) for row in scores.values()):
        raise InputError(f"{path} has no scores of models: {AGAIN}")
    return report


def write(name: str, content: LoadedModel, report: Mapping[str, Any] | None = None) -> str:
    """README.md as a string."""
    config, tokenizer, history = content.model.config, content.tokenizer, content.provenance["history"]
    translates = bool(config.encoder_layers)
    recurrent = any(spec.kind != "softmax" for spec in (*config.attention, *config.cross_attention))
    softmax = [layer for layer, spec in enumerate(config.attention) if spec.kind == "softmax"]
    kind = getattr(tokenizer, "target", tokenizer).kind
    return PAGE.format(
        front="\n".join(_front(history, translates, recurrent)),
        name=name,
        summary=_summary(config),
        state=_state(softmax, recurrent),
        libraries=LIBRARIES.get(kind, ""),
        example=(TRANSLATION if translates else LANGUAGE_MODEL).format(name=name),
        layers=_layers(config),
        history="\n".join(f"{number}. {_event(entry)}" for number, entry in enumerate(history, 1)) or "Not recorded.",
        scores=_scores(report) if report else "",
        limits="\n".join(f"- {limit}" for limit in [*_unfinished(history), *_limits(config, softmax, bool(report))]),
    )


def _state(softmax: list[int], recurrent: bool) -> str:
    if not recurrent:
        return "it is a transformer, which was not converted"
    size = " in the layers that are not softmax" if softmax else ", with a state of one size at any length"
    return f"attention is computed by a recurrence{size}"


def _unfinished(history: list[Any]) -> list[str]:
    """Says so if a model was swapped, or swapped and merged, and not finetuned after that."""
    for entry in reversed(history):
        if _is(entry, "swap"):
            return ["Its attention was swapped and **not finetuned** after that: what it writes is noise."]
        if _is(entry, "train"):
            return []
    return []


def _front(history: list[Any], translates: bool, recurrent: bool) -> list[str]:
    """The YAML front matter; JSON strings are YAML, too."""
    lines = ["library_name: transformers", f"pipeline_tag: {'translation' if translates else 'text-generation'}"]
    sources = [entry.get("source") for entry in history if _is(entry, "import")]
    name = sources and isinstance(sources[0], str) and hub.NAME.fullmatch(sources[0])
    if name and _is(history[0], "import") and "commit" in history[0]:  # a model of the hub, not a path
        lines += [f"base_model: {json.dumps(name[1])}"]
    return [*lines, "tags:", "- t2r", *(["- linear-attention", "- rnn"] if recurrent else [])]


def _is(entry: Any, action: str) -> bool:
    return isinstance(entry, dict) and entry.get("action") == action


def _summary(config: ModelConfig) -> str:
    kind = "A translation model" if config.encoder_layers else "A language model"
    encoder = f"{config.encoder_layers} encoder and " if config.encoder_layers else ""
    sizes = f"{encoder}{config.layers} layers of width {config.width}, {config.heads} heads of {config.head_dim}"
    return f"{kind}: {sizes}, a vocabulary of {config.vocab_size:,} tokens."


def _layers(config: ModelConfig) -> str:
    rows = ["| layers | attention | feature map | features | exact for |", "|---|---|---|---|---|"]
    for title, specs in (("", config.attention), (", cross", config.cross_attention)):
        for spec in dict.fromkeys(specs):
            numbers = ranges([layer for layer, other in enumerate(specs) if other == spec])
            rows.append(f"| {numbers}{title} | {_columns(spec)} |")
    return "\n".join(rows)


def _columns(spec: AttentionSpec) -> str:
    return " | ".join(map(str, (spec.kind, spec.feature_map or "", spec.features or "", spec.exact_for)))


def _event(entry: Any) -> str:
    """One entry of provenance.json in a line; paths, which mean nothing elsewhere, by their last part."""
    if not isinstance(entry, dict):
        return "unknown"
    source = entry.get("source")
    if isinstance(source, str):
        is_hub = "commit" in entry
        source = f"`{source}`, commit {entry['commit']}" if is_hub else f"`{Path(source).name}`"
    config = entry.get("config") if isinstance(entry.get("config"), dict) else {}
    data = config.get("data", {}).get("source") if isinstance(config.get("data"), dict) else None
    details = [
        f"from {source}" if source else "",
        f"feature map {entry['feature_map']}" if entry.get("feature_map") else "",
        f"softmax kept in layers {entry['keep']}" if entry.get("keep") not in (None, "none", "") else "",
        f"{config['steps']:,} steps" if isinstance(config.get("steps"), int) else "",
        f"on `{Path(str(data)).name}`" if data else "",
    ]
    return ", ".join([str(entry.get("action", "unknown")), *filter(None, details)])


def _scores(report: Mapping[str, Any]) -> str:
    """The table of scores of a report of `t2r convert --finetune`."""
    scores = report["scores"]
    measures = list(dict.fromkeys(measure for row in scores.values() for measure in row))
    rows = [["model", *measures], ["---"] * (len(measures) + 1)]
    rows += [[name, *(_number(row.get(measure)) for measure in measures)] for name, row in scores.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    held_out = Path(str(report.get("held_out", "held-out data"))).name
    return f"\n## Scores\n\nOn {held_out}; `converted` is this model.\n\n{table}\n"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "" if value is None else str(value)


def _limits(config: ModelConfig, softmax: list[int], has_scores: bool) -> list[str]:
    if len(softmax) == config.layers:
        size = "All layers have softmax attention: the state grows with each token."
    elif softmax:
        size = f"Layers {ranges(softmax)} have softmax attention: their part of the state grows with each token."
    else:
        size = "The state has one size; what was read long ago is remembered less exactly than by a transformer."
    limits = [size]
    if config.max_positions:
        limits.append(f"A sequence has at most {config.max_positions:,} tokens: there are no further positions.")
    if not has_scores:
        limits.append("No scores were recorded with it: measure it on your own data before you use it.")
    limits.append("Nothing is known of its biases beyond those of the model and the data that it was made from.")
    limits.append("Its licence is that of the model that it was made from.")
    if config.adaptive_cutoffs:
        limits.append("It has an adaptive softmax: `logits` are log-probabilities.")
    return [*limits, "Without dropout in `modeling_t2r.py`, it is meant for inference; t2r finetunes it."]
