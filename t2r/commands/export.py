"""Export a model for use without t2r: weights (safetensors), the decoding step (StableHLO), a README, an example.

t2r export --model=MODEL --output=DIR [--dtype=bfloat16] [--batch=N]
t2r export --model=MODEL --output=DIR --capacity=1024     (needed for softmax layers: the size of their cache)
python DIR/example.py "Once upon a time" 50               (needs jax, safetensors and the tokenizer's library)

DIR/README.md documents every array and the computation of a step. One StableHLO file serves CPU, CUDA and TPU.
"""

from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory, or builtin:NAME.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.", required=True)
_BATCH = flags.DEFINE_integer(
    "batch", None, "Fixed batch size, for compilers that need fixed shapes; default: any.", lower_bound=1
)
_CAPACITY = flags.DEFINE_integer(
    "capacity", None, "Maximum tokens per sequence; for models with softmax layers only.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights and activations.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.export.directory import export_model

    sizes = dict(batch=_BATCH.value, capacity=_CAPACITY.value)
    result = export_model(_MODEL.value, _OUTPUT.value, dtype=_DTYPE.value, **sizes)
    print(table(["file", "bytes"], result["files"].items()))
    return result
