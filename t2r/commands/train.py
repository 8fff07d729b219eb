"""Train or finetune a model as described by a config; run the same command again to resume.

t2r train --config=NAME[:VARIANT] --workdir=DIR [--config.FIELD=VALUE ...]
t2r train --config=convert:data_free --config.init_from=MODEL --workdir=DIR     (convert an imported model)

NAME is stories, tiny_lm, number_words, enwik8, tatoeba, wikitext103, wmt or convert (their files, in configs/, document
the variants), or the path of a config of your own, PATH.py. --config.FIELD=VALUE overrides a field;
t2r/training/config.py explains all.

DIR gets the resolved config (config.json), metrics.jsonl, TensorBoard scalars, checkpoints, and at the end model/, a
model directory for all other commands.

For several processes, on one or more machines, run the same command in each with --coordinator, --processes and
--process. They must share DIR and the data. launch/local, launch/slurm, launch/tpu and launch/gke start such runs.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

RESUMES = True  # after an interruption

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="Config: NAME[:VARIANT] of one that ships with t2r, or PATH.py[:VARIANT]."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "HOST:PORT of process 0, which must be free there; auto: on TPU slices, SLURM and GKE."
)
_PROCESSES = flags.DEFINE_integer("processes", 0, "With --coordinator: number of processes.")
_PROCESS = flags.DEFINE_integer("process", -1, "With --coordinator: index of this process, from 0.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; created if missing.", required=True)


def main() -> dict[str, Any]:
    from t2r import processes
    from t2r.console import table
    from t2r.training.trainer import train

    processes.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    with processes.exit_together():
        result = train(_CONFIG.value, Path(_WORKDIR.value))
    print(table(["result", ""], result.items()))
    return result
