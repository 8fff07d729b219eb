"""Writes README.md of an exported model: how to call it, its arrays, and what it computes."""

from collections.abc import Sequence
from typing import Any

from t2r.export import formulas
from t2r.export.functions import Function, softmax_layers
from t2r.export.names import ranges, state_rows, weight_rows
from t2r.model.config import ModelConfig

LIBRARIES = {
    "sentencepiece": ", `sentencepiece`",
    "pieces": ", `sentencepiece`",
    "hub": ", `tokenizers`",
    "word": "",
    "fairseq_word": "",
    "fairseq_subword": ", `sacremoses`",
}

PAGE = """# {name}

{summary}, exported by t2r to run without it. `python example.py {sample}` runs it; it needs `jax` {version} or newer,
`flatbuffers`, `safetensors`{libraries}.

| file | content |
|---|---|
| `model.safetensors` | the weights |
| `{first}.stablehlo` | the function that makes the initial state |
| `step.stablehlo` | the decoding step |
| `export.json` | shapes, types and special tokens, for programs |
| `example.py` | a program that uses all of these |

The other files belong to the tokenizer.

## Calling it

`jax.export.deserialize(content of the file).call` is a function that runs on CPU, CUDA and TPU:

    state = {first}(weights, {argument})
    logits, state = step(weights, state, token)

- `weights` and `state` are dicts from name to array, listed below.
- `token` (b,) int32 is the next token of each sequence; `logits` (b, {vocabulary}) float32 predict the token after
  it.
{notes}

Each file contains a StableHLO module (`mlir_module()`, `mlir_module_serialized`), which other compilers can read. Its
arguments are the index of the platform (0 cpu, 1 cuda, 2 tpu), then the arrays in the order of the call, a dict's
sorted by name; unused arrays are left out (`module_kept_var_idx` lists the used ones).

## Weights

{weights}

## State

{start}

{state}

## What the step computes

For one token of one sequence. `·` is a product of scalars, vectors or matrices, `⊗` an outer and `⊙` an elementwise
product. Activations are {dtype}; S, z and softmax are float32.

```
{formulas}
```
"""


def write(name: str, config: ModelConfig, functions: dict[str, Function], about: dict[str, Any]) -> str:
    """README.md as a string."""
    step = functions["step"].arguments
    translates = bool(config.encoder_layers)
    first = "encode" if translates else "start"
    tokenizer = about["tokenizer"]["target"] if translates else about["tokenizer"]
    return PAGE.format(
        name=name,
        summary=_summary(config),
        sample='"a sentence"' if translates else '"a text" 50',
        version=about["environment"]["versions"]["jax"],
        libraries=LIBRARIES[tokenizer["kind"]],
        first=first,
        argument="source" if translates else "token",
        vocabulary=config.vocab_size,
        notes="\n".join(f"- {note}" for note in _notes(about)),
        weights=_table(weight_rows(config, step["weights"])),
        start=_start(translates),
        state=_table(state_rows(step["state"])),
        dtype=config.dtype,
        formulas=formulas.write(config),
    )


def _summary(config: ModelConfig) -> str:
    softmax = softmax_layers(config)
    layers = f"softmax attention in layers {ranges(softmax)}" if softmax else "linear attention in all layers"
    windowed = [layer for layer, spec in enumerate(config.attention) if spec.kind == "windowed"]
    layers += f", exact for a window of the last tokens in layers {ranges(windowed)}" if windowed else ""
    kind = "translation" if config.encoder_layers else "language"
    return f"A {kind} model of {config.layers} layers, {layers}"


def _notes(about: dict[str, Any]) -> list[str]:
    """What a caller must know beyond shapes: special tokens, batch size, maximal length."""
    ids, batch, longest = about["tokenizer"], about["batch"], about["longest"]
    if about["family"] == "seq2seq":
        source, target = ids["source"], ids["target"]
        notes = [
            f"`source` (b, m) int32 holds one sentence per row: the tokens {source['before']}, its own tokens, then "
            f"{source['after']}; shorter sentences are padded with {about['padding']} at the end.",
            f"To translate, call `step` with the tokens {target['start']} one by one, which are not part of the "
            f"translation, then with each generated token. The translation ends at token {target['stop']}.",
        ]
        if about["config"]["max_positions"]:
            notes.append(f"A source has at most {about['config']['max_positions']} tokens, the number of positions.")
    else:
        notes = [
            "`start` uses only the shape of `token`, which gives the batch size; it does not read the tokens.",
            "To read a prompt, call `step` with its tokens one by one.",
        ]
        notes += [f"A sequence must begin with token {ids['before'][0]}."] if ids["before"] else []
        stops = " or ".join(str(stop) for stop in ids["stops"] if stop >= 0)
        notes.append(f"A sequence ends at token {stops}." if stops else "No token ends a sequence.")
    size = f"is {batch}" if batch else "is any number, the same in all arrays; each new one is compiled once"
    notes.append(f"The batch size b {size}. Each step reads one token of every sequence.")
    if longest is None:
        return [*notes, "Sequences may have any length: the state does not grow."]
    return [
        *notes,
        f"A sequence has at most {longest} tokens (the size of caches or positions): further logits are NaN.",
    ]


def _start(translates: bool) -> str:
    if translates:
        return "`encode` makes the initial state."
    return "`start` makes the initial state: zeros and false; `log_scale`, if there is one, is −1e30."


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [["name", "layers", "shape", "meaning"], ["---"] * 4, *[[f"`{row[0]}`", *row[1:]] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
