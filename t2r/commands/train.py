"""Train or finetune a model from a config; start again with the same command to continue.

t2r train --config=configs/NAME.py[:VARIANT] --workdir=DIR [--config.FIELD=VALUE ...]

The work directory gets the resolved config, metrics.jsonl, TensorBoard scalars, checkpoints, and at the end model/,
a model directory for all other commands.

On several machines, or with several processes on one, start the same command in each, with --coordinator; they share
the work directory and the data. launch/local, launch/slurm, launch/tpu and launch/gke do that.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", help_string="Config file of the run, with an optional :VARIANT.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "Where processes of one run meet: HOST:PORT, free on the machine of the first; or auto."
)
_PROCESSES = flags.DEFINE_integer("processes", 0, "How many they are.")
_PROCESS = flags.DEFINE_integer("process", -1, "Which of them this is, from 0.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; made if it is not there.", required=True)


def main() -> dict[str, Any]:
    from t2r import processes
    from t2r.console import table
    from t2r.training.trainer import train

    processes.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    with processes.exit_together():
        result = train(_CONFIG.value, Path(_WORKDIR.value))
    print(table(["result", ""], result.items()))
    return result
