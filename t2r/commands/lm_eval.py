"""Evaluate a language model on tasks of lm-evaluation-harness: its own command line, with t2r's models.

t2r lm_eval --model t2r --model_args model=MODEL --batch_size 8 --tasks lambada_openai,hellaswag [any flag of lm_eval]

MODEL is a model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub. Other arguments in --model_args are
max_length (tokens; by default the model's positions, or 2048), dtype (float32 or bfloat16), device (as JAX names it:
cpu, cuda:0, tpu) and seed. Without arguments, lm_eval explains its flags. It needs the extra lm_eval.
"""

import sys

ARGUMENTS: list[str] = []  # of the harness, which parses them itself


def main() -> None:
    from t2r.errors import InputError
    from t2r.extras import require

    harness = require("lm_eval.__main__", "lm_eval")
    from t2r.evaluation import harness as models  # noqa: F401 - registers the model t2r

    sys.argv = ["lm_eval", *ARGUMENTS]
    try:
        harness.cli_evaluate()
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        raise InputError(f"{error}; `t2r lm_eval ls tasks` lists all, --include_path adds a folder of yours") from None
