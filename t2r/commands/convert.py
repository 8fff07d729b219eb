"""Convert a model: replace softmax attention by linear attention, or merge φ into the projections for inference.

t2r convert --model=MODEL --output=MODEL [--feature_map=t2r] [--features=32] [--keep=none|every_4th|0,4,8]
t2r convert --model=MODEL --output=MODEL --window=64 --sinks=4 --keep=auto:4 --data=text:FILE
t2r convert --model=MODEL --output=MODEL --features=4 --cross_features=32     (a translation model)
t2r convert --model=MODEL --output=MODEL --merge

A converted model must be finetuned before use: `t2r train` with config.init_from converts and finetunes in one run.
"""

from pathlib import Path
from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory, or builtin:NAME.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)
_FEATURE_MAP = flags.DEFINE_string("feature_map", "t2r", "Feature map φ: t2r, elu, rfa or performer.")
_FEATURES = flags.DEFINE_integer("features", None, "Feature size k; default: 32 (elu: the size of a head).")
_CROSS_FEATURES = flags.DEFINE_integer(
    "cross_features", None, "Feature size k of cross attention; default: --features."
)
_ATTENTION = flags.DEFINE_enum(
    "attention", "all", ["all", "causal", "cross"], "Translation: which attention to convert."
)
_KEEP = flags.DEFINE_string(
    "keep",
    "none",
    "Layers that keep softmax: none, every_4th (from the top), 0,4,8; or by damage, measured on --data: auto:4 for the "
    "four worst, auto for all that damage the model by more than 10%.",
)
_CROSS_KEEP = flags.DEFINE_string("cross_keep", None, "Layers whose cross attention keeps softmax; default: --keep.")
_DATA = flags.DEFINE_string("data", None, "For --keep=auto: text, or sentence pairs, on which damage is measured.")
_WINDOW = flags.DEFINE_integer(
    "window", 0, "Causal attention stays exact for the last N tokens, beside φ for all earlier ones; 0: φ for all."
)
_SINKS = flags.DEFINE_integer("sinks", 0, "With --window: the first N tokens of a sequence stay exact, too.")
_MERGE = flags.DEFINE_bool("merge", False, "Do not convert: merge φ of a finetuned T2R model into its projections.")
_SEED = flags.DEFINE_integer("seed", 0, "Random seed of the new feature maps.", lower_bound=0, upper_bound=2**32 - 1)


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.conversion.directory import convert_directory
    from t2r.errors import InputError
    from t2r.model.parameters import arrays_of, parameter_count

    plan = dict(
        feature_map=_FEATURE_MAP.value,
        features=_FEATURES.value,
        cross_features=_CROSS_FEATURES.value,
        window=_WINDOW.value,
        sinks=_SINKS.value,
        attention=_ATTENTION.value,
        keep=_KEEP.value,
        cross_keep=_CROSS_KEEP.value,
        seed=_SEED.value,
    )
    given = [name for name in (*plan, "data") if flags.FLAGS[name].present]
    if _MERGE.value and given:
        raise InputError(f"--merge changes no attention: leave out {', '.join(f'--{name}' for name in given)}")
    if _MERGE.value:
        model = convert_directory(_MODEL.value, _OUTPUT.value, merge=True).model
    else:
        model = convert_directory(_MODEL.value, _OUTPUT.value, choose=_choose, **plan).model
    config = model.config
    rows = [(f"{layer}", *_columns(spec)) for layer, spec in enumerate(config.attention)]
    rows += [(f"{layer} cross", *_columns(spec)) for layer, spec in enumerate(config.cross_attention)]
    print(table(["layer", "attention", "feature map", "features", "exact for"], rows))
    specs = list(zip(config.attention, config.cross_attention or config.attention))
    linear = [layer for layer, both in enumerate(specs) if all(spec.kind != "softmax" for spec in both)]
    return {
        "model": str(Path(_OUTPUT.value)),
        "parameters": parameter_count(arrays_of(model)),
        "softmax_layers": [layer for layer in range(config.layers) if layer not in linear],
        "linear_layers": linear,
    }


def _columns(spec) -> tuple:
    return spec.kind, spec.feature_map or "", spec.features or "", _exact(spec)


def _exact(spec) -> str:
    """The tokens to which attention is exact."""
    if spec.kind in ("linear", "merged"):
        return "none"
    window = f"the last {spec.window}" if spec.window else "all"
    return window + (f", the first {spec.sinks}" if spec.kind == "windowed" and spec.sinks else "")


def _choose(loaded: Any, plan: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan with layer numbers in place of --keep=auto."""
    from t2r.errors import InputError
    from t2r.evaluation.damage import choose_layers, is_automatic, measure_on_data, reduction_of

    if _DATA.value is not None and not any(is_automatic(plan[name] or "") for name in ("keep", "cross_keep")):
        raise InputError(f"--data={_DATA.value} is for --keep=auto, which measures the model on it: leave it out")

    def measure() -> Any:
        if _DATA.value is None:
            raise InputError("--keep=auto measures the model: say on what, with --data=text:FILE or --data=tsv:FILE")
        return measure_on_data(loaded, _DATA.value, **reduction_of(plan))

    return choose_layers(plan, loaded.model.config, measure)
