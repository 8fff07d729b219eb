"""Measure the training speed of a config on the available devices: tokens per second, utilisation, forward pass.

t2r benchmark train --config=NAME[:VARIANT] [--config.FIELD=VALUE ...] [--steps=10]
    [--output=FILE.jsonl] [--profile=DIR]

Parameters and tokens are random: neither data nor a pretrained model is needed. Utilisation is the rate of the matrix
products that the model's definition requires, divided by the vendor's peak rate in bfloat16.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="Config: NAME[:VARIANT] of one that ships with t2r, or PATH.py[:VARIANT]."
)
_STEPS = flags.DEFINE_integer(
    "steps", 10, "Steps in each of five rounds; the result is the median round.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", None, "File to append the result to, as a line of JSON.")
_PROFILE = flags.DEFINE_string("profile", None, "Directory for a JAX profile of one more step.")


def main() -> dict[str, Any]:
    from t2r.benchmark.train import benchmark_train
    from t2r.console import table

    output = Path(_OUTPUT.value) if _OUTPUT.value else None
    result = benchmark_train(_CONFIG.value, steps=_STEPS.value, profile=_PROFILE.value, output=output)
    print(table(["", "measured"], [(name, value) for name, value in result.items() if name != "environment"]))
    return result
