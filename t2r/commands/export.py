"""Export a model for use without t2r: as StableHLO with an example, or as a directory that transformers loads.

t2r export --model=MODEL --output=DIR [--dtype=bfloat16] [--batch=N]
t2r export --model=MODEL --output=DIR --capacity=1024     (needed for softmax layers: the size of their cache)
python DIR/example.py "Once upon a time" 50               (needs jax, safetensors and the tokenizer's library)

DIR/README.md documents every array and the computation of a step. One StableHLO file serves CPU, CUDA and TPU.

t2r export --model=MODEL --output=DIR --format=huggingface [--dtype=bfloat16]

DIR is then what `transformers` loads, as in AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True), or
AutoModelForSeq2SeqLM for translation: weights, the model in plain torch, a tokenizer, and README.md, a model card. Of a
model of `t2r convert --finetune`, the card has the scores in MODEL.run/report.json.
"""

from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string(
    "model", None, "Model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.", required=True)
_FORMAT = flags.DEFINE_enum("format", "stablehlo", ["stablehlo", "huggingface"], "What to write.")
_BATCH = flags.DEFINE_integer(
    "batch", None, "Fixed batch size, for compilers that need fixed shapes; default: any.", lower_bound=1
)
_CAPACITY = flags.DEFINE_integer(
    "capacity", None, "Maximum tokens per sequence; for models with softmax layers only.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights and activations.")


def main() -> dict[str, Any]:
    from t2r.console import table

    result = _hugging_face() if _FORMAT.value == "huggingface" else _stablehlo()
    print(table(["file", "bytes"], result["files"].items()))
    return result


def _stablehlo() -> dict[str, Any]:
    from t2r.export.directory import export_model

    sizes = dict(batch=_BATCH.value, capacity=_CAPACITY.value)
    return export_model(_MODEL.value, _OUTPUT.value, dtype=_DTYPE.value, **sizes)


def _hugging_face() -> dict[str, Any]:
    from t2r.errors import InputError
    from t2r.export.hugging_face import export_model

    unused = [f"--{flag.name}" for flag in (_BATCH, _CAPACITY) if flag.value is not None]
    if unused:
        raise InputError(f"{', '.join(unused)}: with --format=huggingface there is no such limit: leave it out")
    return export_model(_MODEL.value, _OUTPUT.value, dtype=_DTYPE.value)
