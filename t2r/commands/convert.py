"""Convert a model into an RNN: swap its attention, finetune it, measure it. Or the swap alone; or merge φ alone.

t2r convert --model=SOURCE --output=MODEL --finetune [--data=text:FILE|tsv:FILE] [--keep=auto:4] [--window=64 --sinks=4]

SOURCE is a model directory, builtin:NAME, or what `t2r import` takes. The transformer is scored, its attention swapped,
the result trained (attention transfer, then distillation), merged where that is possible, and measured. Without --data
a language model trains on text that it writes itself. The work directory, OUTPUT.run by default, gets report.html and
report.json. After an interruption, run the same command to resume.

Without --finetune, the swap alone, or with --merge what comes last:
t2r convert --model=MODEL --output=MODEL [--feature_map=t2r] [--features=32] [--keep=none|every_4th|0,4,8]
t2r convert --model=MODEL --output=MODEL --window=64 --sinks=4 --keep=auto:4 --data=text:FILE
t2r convert --model=MODEL --output=MODEL --features=4 --cross_features=32     (a translation model)
t2r convert --model=MODEL --output=MODEL --merge

A swapped model must be finetuned before use: `t2r train` with config.init_from swaps and finetunes in one run.
"""

import shlex
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

from absl import flags

from t2r.commands._lists import define_numbers

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "Model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub; with --finetune all that `t2r import` takes.",
    required=True,
)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)
_FEATURE_MAP = flags.DEFINE_string(
    "feature_map", "t2r", "Feature map φ: t2r, hedgehog, elu, rfa, rfa_fixed, performer or t2r_elu."
)
_FEATURES = flags.DEFINE_integer(
    "features", None, "Feature size k; default: 32 (elu: the size of a head; recipes of translation with /paper: 4)."
)
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
    "four worst, auto for all that damage the model by more than 10%, auto:8MiB@4096 for as many of the worst as fit "
    "into so large a state of a sequence of 4096 tokens.",
)
_CROSS_KEEP = flags.DEFINE_string("cross_keep", None, "Layers whose cross attention keeps softmax; default: --keep.")
_DATA = flags.DEFINE_string(
    "data", None, "With --finetune: text or sentence pairs to train on. With --keep=auto: on which damage is measured."
)
_WINDOW = flags.DEFINE_integer(
    "window",
    None,
    "Causal attention stays exact for the last N tokens, beside φ for all earlier ones; 0: φ for all, which can be "
    "merged. Default: 0; with --finetune 64.",
)
_SINKS = flags.DEFINE_integer(
    "sinks", None, "With --window: the first N tokens of a sequence stay exact, too. Default: 0; with --finetune 4."
)
_MERGE = flags.DEFINE_bool("merge", False, "Do not convert: merge φ of a finetuned T2R model into its projections.")
_SEED = flags.DEFINE_integer("seed", 0, "Random seed of the new feature maps.", lower_bound=0, upper_bound=2**32 - 1)

_FINETUNE = flags.DEFINE_bool("finetune", False, "Also train the converted model, merge and measure it: all in one.")
_WORKDIR = flags.DEFINE_string("workdir", None, "With --finetune: directory of the report; default: OUTPUT.run.")
_STEPS = flags.DEFINE_integer("steps", None, "With --finetune: training steps; default: 2000.", lower_bound=1)
_RECIPE = flags.DEFINE_string(
    "recipe",
    None,
    "With --finetune: variant of configs/convert.py; default: text, or data_free without --data; or distilled.",
)
_PROMPT = flags.DEFINE_multi_string(
    "prompt", [], "With --finetune: begins a text in the report, or is translated; repeatable. Default: held-out text."
)
_LENGTHS = define_numbers(
    "lengths", ["128", "512", "2048", "8192"], "With --finetune: generated lengths at which decoding is measured."
)
_CONTROL = flags.DEFINE_bool("control", False, "With --finetune: also finetune the transformer, without a conversion.")
_CURVE = flags.DEFINE_list(
    "curve",
    [],
    "With --finetune: train once more for each of these numbers of layers that keep softmax, such as 0,2,4, and draw "
    "quality against the size of the state.",
)
_SET = flags.DEFINE_multi_string(
    "set", [], "With --finetune: a field of the run's config, as in --set=data.batch=16; repeatable."
)
PLAN = ("feature_map", "features", "cross_features", "window", "sinks", "attention", "keep", "cross_keep", "seed")
ONLY_FINETUNE = ("workdir", "steps", "recipe", "prompt", "lengths", "control", "curve", "set")


def RESUMES() -> bool:  # after an interruption
    return _FINETUNE.value


def main() -> dict[str, Any]:
    from t2r.errors import InputError

    given = {name: flags.FLAGS[name].value for name in PLAN if flags.FLAGS[name].present}
    unused = [name for name in ONLY_FINETUNE if flags.FLAGS[name].present and not _FINETUNE.value]
    if _MERGE.value:
        unused += [name for name in (*given, "data", "finetune") if flags.FLAGS[name].present]
        reason = "--merge changes no attention"
    else:
        reason = "without --finetune nothing is trained or measured"
    if unused:
        raise InputError(f"{reason}: leave out {', '.join(f'--{name}' for name in unused)}")
    if idle := [f"--{name}" for name in _idle(given) if name in given]:
        raise InputError(f"--attention={_ATTENTION.value}: leave out {', '.join(idle)}, which would change nothing")
    return _finetune(given) if _FINETUNE.value else _convert()


def _idle(given: Container[str]) -> list[str]:
    """The flags of the attention that --attention leaves as it is: it gets no features, and all its layers are kept."""
    if _ATTENTION.value == "causal":
        return ["cross_features", "cross_keep"]
    if _ATTENTION.value == "cross":  # which takes the flags of causal attention where it has none of its own
        return [name for name in ("features", "keep") if f"cross_{name}" in given]
    return []


def _finetune(plan: dict[str, Any]) -> dict[str, Any]:
    from t2r.commands._benchmark import parse_lengths
    from t2r.workflow.convert import convert_and_finetune
    from t2r.workflow.recipe import parse_fields

    fields = parse_fields(_SET.value)
    if "seed" in plan:
        fields["seed"] = plan.pop("seed")
    result = convert_and_finetune(
        _MODEL.value,
        _OUTPUT.value,
        data=_DATA.value,
        recipe=_RECIPE.value,
        steps=_STEPS.value,
        workdir=_WORKDIR.value,
        prompts=_PROMPT.value,
        lengths=parse_lengths(_LENGTHS.value),
        control=_CONTROL.value,
        curve=_counts(_CURVE.value),
        fields=fields,
        command=shlex.join(["t2r", *sys.argv[1:]]),
        **plan,
    )
    _print_result(result)
    return result


def _counts(items: list[str]) -> list[int]:
    from t2r.errors import InputError

    if not all(item.strip().isdecimal() for item in items):
        raise InputError(f"--curve={','.join(items)}: give numbers of layers, such as 0,2,4")
    return [int(item) for item in items]


def _print_result(result: dict[str, Any]) -> None:
    from t2r.console import table

    measures = list(result["scores"]["transformer"])
    print(table(["model", *measures], [(n, *(s.get(m, "") for m in measures)) for n, s in result["scores"].items()]))
    rows = [
        (int(n), speedup, result["transformer_state_bytes"][n], result["state_bytes"][n])
        for n, speedup in result["speedup"].items()
    ]
    print("\n" + table(["generated tokens", "speedup", "transformer bytes", "RNN bytes"], rows))
    print(f"\nreport: {result['report']}")


def _convert() -> dict[str, Any]:
    from t2r.console import table
    from t2r.conversion.directory import convert_directory
    from t2r.model.parameters import arrays_of, parameter_count

    if _MERGE.value:
        model = convert_directory(_MODEL.value, _OUTPUT.value, merge=True).model
    else:
        plan = {name: flags.FLAGS[name].value for name in PLAN} | {
            "window": _WINDOW.value or 0,
            "sinks": _SINKS.value or 0,
        }
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
    return spec.kind, spec.feature_map or "", spec.features or "", spec.exact_for


def _choose(loaded: Any, plan: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan with layer numbers in place of --keep=auto."""
    from t2r.errors import InputError
    from t2r.evaluation.damage import measure_on_data, reduction_of
    from t2r.evaluation.keep import choose_layers, is_automatic

    if _DATA.value is not None and not any(is_automatic(plan[name] or "") for name in ("keep", "cross_keep")):
        raise InputError(f"--data={_DATA.value} is for --keep=auto, which measures the model on it: leave it out")

    def measure() -> Any:
        if _DATA.value is None:
            raise InputError("--keep=auto measures the model: say on what, with --data=text:FILE or --data=tsv:FILE")
        return measure_on_data(loaded, _DATA.value, **reduction_of(plan))

    return choose_layers(plan, loaded.model.config, measure)
