"""Make the transformer that ships with t2r an RNN, and report what it cost and what it brought.

t2r quickstart [--workdir=runs/quickstart]

Swap, finetune, merge, generate, measure; the last line is JSON and names report.html. An interrupted run goes on
where it was; a finished one is only measured again.
"""

from typing import Any

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory for all that is made.")
_DATA = flags.DEFINE_string("data", None, "Text to finetune and test on; default: builtin:pydoc.")
_STEPS = flags.DEFINE_integer("steps", None, "Finetuning steps; default: the config's.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", ["128", "512", "1024", "2048"], "Generated lengths to measure.")
_BATCH = flags.DEFINE_integer("batch", 16, "Texts decoded at a time.", lower_bound=1)


def main() -> dict[str, Any]:
    from t2r.commands._benchmark import parse_lengths
    from t2r.quickstart.run import quickstart

    lengths = parse_lengths(_LENGTHS.value)
    return quickstart(_WORKDIR.value, data=_DATA.value, steps=_STEPS.value, lengths=lengths, batch=_BATCH.value)
