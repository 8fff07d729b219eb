"""Export a model to run without this package: safetensors, the decoding step as StableHLO, a page, an example.

python -m t2r export --model=MODEL --output=DIR [--dtype=bfloat16] [--batch=N]
python -m t2r export --model=MODEL --output=DIR --capacity=1024     (softmax layers: their state has a length)
python DIR/example.py "Once upon a time" 50                         (needs jax and safetensors, and not t2r)

DIR/README.md documents every array and what the step computes; one file serves CPU, CUDA and TPU.
"""

from pathlib import Path
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
    from t2r.convert import model_dir
    from t2r.export import directory
    from t2r.export.functions import Sizes
    from t2r.model.parameters import arrays_of, count

    output = Path(_OUTPUT.value)
    directory.check_free(output)
    model, tokenizer, provenance = model_dir.load(_MODEL.value, dtype=_DTYPE.value)
    sizes = Sizes(_BATCH.value, _CAPACITY.value)
    entry = {"action": "export", "source": _MODEL.value, "dtype": _DTYPE.value, **sizes._asdict()}
    content = model_dir.Model(model, tokenizer, {"history": [*provenance["history"], entry]})
    about = directory.save(output, content, sizes)
    files = {str(file.relative_to(output)): file.stat().st_size for file in sorted(output.rglob("*")) if file.is_file()}
    print(table(["file", "bytes"], files.items()))
    texts = sizes.batch or 1
    return {
        "output": str(output),
        "files": files,
        "parameters": count(arrays_of(model)),
        "state_bytes": directory.state_bytes(about, b=texts, m=0),  # a source's caches, if any, come on top
        "platforms": about["platforms"],
        "longest": about["longest"],
    }
