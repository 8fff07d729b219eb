"""Convert the small transformer that ships with t2r into an RNN; report its stories, perplexity, speed and memory.

t2r quickstart [--workdir=runs/quickstart]

Converts, finetunes, merges, generates and measures; takes a few minutes on two CPU cores. The last line is JSON with
the path of report.html. After an interruption, run the same command to resume: finetuning continues at its last
checkpoint, and once the model is converted, only its speed is measured again.
"""

from typing import Any

from absl import flags

from t2r.commands._lists import define_numbers

RESUMES = True  # after an interruption

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory for all outputs.")
_DATA = flags.DEFINE_string(
    "data",
    None,
    "Text to finetune and test on: builtin:NAME or text:FILE; default: builtin:stories.",
)
_STEPS = flags.DEFINE_integer(
    "steps",
    None,
    "Finetuning steps of each conversion; default: those of configs/stories.py.",
    lower_bound=1,
)
_LENGTHS = define_numbers("lengths", ["128", "512", "1024", "2048"], "Generated lengths to measure, in tokens.")
_BATCH = flags.DEFINE_integer("batch", 16, "Sequences decoded at a time.", lower_bound=1)


def main() -> dict[str, Any]:
    from t2r.commands._benchmark import parse_lengths
    from t2r.quickstart.run import quickstart

    lengths = parse_lengths(_LENGTHS.value)
    return quickstart(_WORKDIR.value, data=_DATA.value, steps=_STEPS.value, lengths=lengths, batch=_BATCH.value)
