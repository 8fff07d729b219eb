"""Measure training speed: tokens per second and utilisation of a config's real step on the devices there are, and its
forward pass alone.

python -m t2r benchmark train --config=configs/NAME.py[:VARIANT] [--config.FIELD=VALUE ...] [--steps=10]
    [--output=FILE.json] [--profile=DIR]

Parameters and words are random: neither data nor a pretrained model is needed. Utilisation is the products that the
model's definition asks for, over what the devices' maker says they can do in bfloat16.
"""

import json
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", help_string="Config file of the run, with an optional :VARIANT.")
_STEPS = flags.DEFINE_integer("steps", 10, "Steps in each of five rounds; the median round counts.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "File to add the result to, as a line of JSON.")
_PROFILE = flags.DEFINE_string("profile", None, "Directory for a profile of one more step.")


def main() -> dict[str, Any]:
    import jax

    from t2r import environment
    from t2r.benchmark.decode import is_out_of_memory
    from t2r.benchmark.train import measure
    from t2r.console import table
    from t2r.errors import InputError

    config = _CONFIG.value
    try:
        speed = measure(config, steps=_STEPS.value, profile=_PROFILE.value)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        mend = "Take fewer tokens at once (config.data, config.accumulate), or config.model.remat=True"
        raise InputError(f"a step does not fit: {str(error).splitlines()[0]} {mend}") from error
    print(table(["", "measured"], speed._asdict().items()))
    result = {**speed._asdict(), "environment": environment.describe(), "config": config.to_dict()}
    if _OUTPUT.value:
        with Path(_OUTPUT.value).open("a") as file:
            file.write(json.dumps(result) + "\n")
    return {key: value for key, value in result.items() if key != "config"}
