"""Export a model to run without this package: safetensors, the decoding step as StableHLO, a page, an example.

t2r export --model=MODEL --output=DIR [--dtype=bfloat16] [--batch=N]
t2r export --model=MODEL --output=DIR --capacity=1024     (softmax layers: their state has a length)
python DIR/example.py "Once upon a time" 50                         (needs jax and safetensors, and not t2r)

DIR/README.md documents every array and what the step computes; one file serves CPU, CUDA and TPU.
"""

from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory, or builtin:NAME.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.", required=True)
_BATCH = flags.DEFINE_integer(
    "batch", None, "Texts at a time, for compilers that want fixed shapes; default: any number.", lower_bound=1
)
_CAPACITY = flags.DEFINE_integer(
    "capacity", None, "Most tokens of a text; needed for softmax layers, and only for them.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights and activations.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.export.directory import export_model

    sizes = dict(batch=_BATCH.value, capacity=_CAPACITY.value)
    result = export_model(_MODEL.value, _OUTPUT.value, dtype=_DTYPE.value, **sizes)
    print(table(["file", "bytes"], result["files"].items()))
    return result
