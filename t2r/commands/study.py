"""Train and score all rows of a table, such as the paper's Tables 1 and 2, and write them as one JSON file and a table.

t2r study --config=enwik8 --data=text:wikipedia.txt --output=runs/enwik8 [--jobs=4] [--seeds=0,1,2]
t2r study --config=tatoeba --data=tsv:deu.txt --output=runs/tatoeba [--jobs=4] [--scale=0.5]

The rows are the variants of a config file; those that are converted wait for its row `transformer` with the same seed.
ROW_swapped, such as t2r_swapped, is converted and not finetuned. Each row is trained and scored by processes of its
own, --jobs at a time, in a folder of its own. Stopped or killed at any time, the same command continues: rows that are
finished are not done again. OUTPUT/study.json has a row each: perplexity (of the last 256 of 512 tokens of the test
split), steps, seconds of training, tokens; of translation models BLEU and chrF, with the flags of `t2r evaluate` in
EVALUATE of the config file. OUTPUT/study.md is the table, OUTPUT/ROW.log what a row's commands said.
"""

from typing import Any

from absl import flags

from t2r.commands._lists import define_numbers
from t2r.errors import UINT32_MAX

RESUMES = True  # after an interruption

_CONFIG = flags.DEFINE_string("config", None, "Config file with a variant for each row, such as enwik8.", required=True)
_DATA = flags.DEFINE_string(
    "data", None, "Text or sentence pairs that all rows train on and are scored on.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Directory of the study; created if missing.", required=True)
_ROWS = flags.DEFINE_list("rows", [], "Rows to run; default: all of the config, and those swapped and not finetuned.")
_SEEDS = define_numbers("seeds", ["0"], "Each row is trained once with each of these seeds.", least=0, most=UINT32_MAX)
_JOBS = flags.DEFINE_integer("jobs", 1, "Rows at a time, on the same device.", lower_bound=1, upper_bound=64)
_SPLIT = flags.DEFINE_string("split", "test", "The split that rows are scored on.")
_SCALE = flags.DEFINE_float(
    "scale", 1.0, "Factor of all rows' steps, warm-up and intervals, also of those that --set gives.", lower_bound=1e-4
)
_SET = flags.DEFINE_multi_string("set", [], "FIELD=VALUE: change a field of all rows' configs; may be repeated.")


def main() -> dict[str, Any]:
    from t2r.errors import InputError, raise_all
    from t2r.files import output_folder
    from t2r.workflow.study import Study, as_table, columns, rows_of

    config, problems = _CONFIG.value, []
    problems += [
        f"--set={field}: give FIELD=VALUE, such as steps=100" for field in _SET.value if not all(field.partition("="))
    ]
    own = {"seed": "--seeds chooses it", "data.source": "--data chooses it", "init_from": "it is the row transformer"}
    problems += [f"--set={field}: {own[name]}" for field in _SET.value if (name := field.partition("=")[0]) in own]
    rows = [row.strip() for row in _ROWS.value if row.strip()]
    if _ROWS.present and not rows:
        problems.append("--rows names no row: name some, such as transformer,t2r, or leave it out for all")
    if ":" in config:
        problems.append(f"--config={config}: leave out the variant; --rows chooses variants")
    raise_all("flags:", problems)
    output, seeds = output_folder(_OUTPUT.value), [int(seed) for seed in _SEEDS.value]
    study = Study(config, _DATA.value, output, _SET.value, split=_SPLIT.value, scale=_SCALE.value)
    result = study.run(rows or rows_of(config), seeds, _JOBS.value)
    names = columns(_DATA.value)
    print(as_table(result["rows"], names))
    if result["failed"]:
        reasons = "".join(f"\n  - {row}: {reason}" for row, reason in result["failed"].items())
        raise InputError(f"rows that failed; the others are in {output / 'study.json'}:{reasons}")
    short = [{name: row[name] for name in names} for row in result["rows"]]
    return {"study": str(output / "study.json"), "rows": short}
