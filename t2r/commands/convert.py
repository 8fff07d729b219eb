"""Convert a model: put linear attention in place of softmax, or merge φ into the projections for inference.

python -m t2r convert --model=MODEL --output=MODEL [--feature_map=t2r] [--features=32] [--keep=none|every_4th|0,4,8]
python -m t2r convert --model=MODEL --output=MODEL --merge

After the swap a model must be finetuned: see `python -m t2r train --help` and config.init_from.
"""

from pathlib import Path
from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory, or builtin:NAME.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)
_FEATURE_MAP = flags.DEFINE_string("feature_map", "t2r", "t2r, elu, rfa or performer.")
_FEATURES = flags.DEFINE_integer("features", None, "Feature size k; default: the map's own (32; elu: the head size).")
_KEEP = flags.DEFINE_string("keep", "none", "Layers that stay softmax: none, every_4th (from the top), or 0,4,8.")
_MERGE = flags.DEFINE_bool("merge", False, "Fold φ of a finetuned T2R model into its projections instead.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the new feature maps.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.convert import model_dir
    from t2r.convert.merge import merge
    from t2r.convert.swap import swap
    from t2r.errors import InputError
    from t2r.model.parameters import arrays_of, count

    output = Path(_OUTPUT.value)
    if output.exists():
        raise InputError(f"--output={output} exists already: choose another or remove it")
    model, tokenizer, provenance = model_dir.load(_MODEL.value)
    if _MERGE.value:
        converted, entry = merge(model), {"action": "merge"}
    else:
        plan = dict(feature_map=_FEATURE_MAP.value, features=_FEATURES.value, keep=_KEEP.value, seed=_SEED.value)
        converted, entry = swap(model, **plan), {"action": "swap", **plan}
    history = [*provenance["history"], {**entry, "source": _MODEL.value}]
    model_dir.save(output, model_dir.Model(converted, tokenizer, {"history": history}))
    specs = converted.config.attention
    print(table(["layer", "attention", "feature map", "features"], _rows(specs)))
    return {
        "model": str(output),
        "parameters": count(arrays_of(converted)),
        "softmax_layers": [layer for layer, spec in enumerate(specs) if spec.kind == "softmax"],
        "linear_layers": [layer for layer, spec in enumerate(specs) if spec.kind != "softmax"],
    }


def _rows(specs):
    return [(str(layer), spec.kind, spec.feature_map or "", spec.features or "") for layer, spec in enumerate(specs)]
