"""The page in an exported directory: how to call it, what its arrays are, what it computes."""

from collections.abc import Sequence
from typing import Any

from t2r.export import formulas
from t2r.export.functions import Function, softmax_layers
from t2r.export.names import ranges, state_rows, weight_rows
from t2r.model.config import ModelConfig

LIBRARIES = {"sentencepiece": ", `sentencepiece`", "pieces": ", `sentencepiece`", "hub": ", `tokenizers`", "word": ""}

PAGE = """# {name}

{what}, exported by t2r to run without it. `python example.py {sample}` shows how; it needs `jax` {version} or newer,
`flatbuffers`, `safetensors`{libraries}.

| file | |
|---|---|
| `model.safetensors` | the weights |
| `{first}.stablehlo` | makes the state before the first token |
| `step.stablehlo` | the decoding step |
| `export.json` | shapes, types and ids, for programs |
| `example.py` | a program that uses all of these |

The other files are the tokenizer's.

## Calling it

`jax.export.deserialize(content of the file).call` is a function, for CPU, CUDA and TPU alike:

    state = {first}(weights, {given})
    logits, state = step(weights, state, token)

- `weights` and `state` are dicts of arrays by name, as below.
- `token` (b,) int32 is the next token of each text, `logits` (b, {vocabulary}) float32 says what may follow it.
{notes}

Inside is a StableHLO module (`mlir_module()`, `mlir_module_serialized`), which other compilers read too. Its arguments
are the platform's number (0 cpu, 1 cuda, 2 tpu) and the arrays in the order of the call, those of a dict by sorted
names; arrays that it does not use are left out (`module_kept_var_idx`).

## Weights

{weights}

## State

{start}

{state}

## What the step computes

For one token of one text; `·` is a product of numbers, vectors or matrices, `⊗` an outer product. Activations
are {dtype}; S, z and softmax are float32.

```
{formulas}
```
"""


def write(name: str, config: ModelConfig, functions: dict[str, Function], about: dict[str, Any]) -> str:
    """The page as Markdown."""
    step = functions["step"].arguments
    translates = bool(config.encoder_layers)
    first = "encode" if translates else "start"
    tokenizer = about["tokenizer"]["target"] if translates else about["tokenizer"]
    return PAGE.format(
        name=name,
        what=_what(config),
        sample='"a sentence"' if translates else '"a text" 50',
        version=about["environment"]["versions"]["jax"],
        libraries=LIBRARIES[tokenizer["kind"]],
        first=first,
        given="source" if translates else "token",
        vocabulary=config.vocab_size,
        notes="\n".join(f"- {note}" for note in _notes(about)),
        weights=_table(weight_rows(config, step["weights"])),
        start=_start(translates),
        state=_table(state_rows(step["state"])),
        dtype=config.dtype,
        formulas=formulas.write(config),
    )


def _what(config: ModelConfig) -> str:
    softmax = softmax_layers(config)
    layers = f"softmax attention in layers {ranges(softmax)}" if softmax else "linear attention in all layers"
    kind = "translation" if config.encoder_layers else "language"
    return f"A {kind} model of {config.layers} layers, {layers}"


def _notes(about: dict[str, Any]) -> list[str]:
    """What to know beyond shapes: which tokens begin and end texts, how many texts, how long."""
    ids, batch, longest = about["tokenizer"], about["batch"], about["longest"]
    if about["family"] == "seq2seq":
        source, target = ids["source"], ids["target"]
        notes = [
            f"`source` (b, m) int32 is a sentence a row: {source['before']}, its own tokens, {source['after']}; "
            f"{about['padding']} fills the rows of shorter ones.",
            f"A translation starts after {target['start']}, no part of it, which `step` reads one after the other, and "
            f"ends at {target['stop']}.",
        ]
        if about["config"]["positions"] == "learned":
            notes.append(
                f"A source has at most {about['config']['max_positions']} tokens: there are no more positions."
            )
    else:
        notes = [
            "`start` counts the tokens it is given, and does not read them.",
            "A prompt is read by calling `step` with one of its tokens after the other.",
        ]
        notes += [f"A text begins with token {ids['before'][0]}."] if ids["before"] else []
        ends = " or ".join(str(stop) for stop in ids["stops"] if stop >= 0)
        notes.append(f"A text ends at token {ends}." if ends else "No token ends a text.")
    texts = f"is {batch}" if batch else "is any, and the same in all arrays; each new one is compiled once"
    notes.append(f"The number of texts b {texts}. They go on together, a token each a step.")
    if longest is None:
        return [*notes, "Texts may be of any length: the state does not grow."]
    return [*notes, f"A text has at most {longest} tokens, as caches and positions end there: further logits are NaN."]


def _start(translates: bool) -> str:
    if translates:
        return "As `encode` makes it."
    return "As `start` makes it: zeros, false, and −1e30 where there is a `log_scale`."


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [["name", "layers", "shape", "meaning"], ["---"] * 4, *[[f"`{row[0]}`", *row[1:]] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
