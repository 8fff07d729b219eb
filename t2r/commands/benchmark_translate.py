"""Measure translation speed on a text, with weights in float32 and in 8 bits, beside CTranslate2 if installed.

t2r benchmark translate --model=MODEL[,MODEL] --input=FILE --output=DIR [--references=FILE] [--weights=float32,int8]
    [--beams=1,5] [--batch=32] [--rounds=3] [--first=100] [--same_lengths] [--ctranslate2=DIRECTORY]

All are measured in turn, in each of --rounds rounds; compilation is not timed, tokenizing is. Speeds are medians.
--ctranslate2 names a CTranslate2 model with its `sentencepiece.model`; it is given as many threads as there are cores.
DIR gets translate.json.
"""

from typing import Any

from absl import flags

from t2r.commands._lists import define_numbers

_MODEL = flags.DEFINE_list("model", None, "Model directories of translation models.", required=True)
_INPUT = flags.DEFINE_string("input", None, "Text file (also .gz), one sentence per line.", required=True)
_REFERENCES = flags.DEFINE_string("references", None, "Text file of translations; adds BLEU.")
_WEIGHTS = flags.DEFINE_list("weights", ["float32", "int8"], "Types of the matrices.")
_BEAMS = define_numbers("beams", ["1", "5"], "Beam sizes; 1: greedy.")
_BATCH = flags.DEFINE_integer("batch", 32, "Sentences translated at a time.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Times that each is measured.", lower_bound=1)
_FIRST = flags.DEFINE_integer("first", None, "Translate only the first N lines.", lower_bound=1)
_SAME = flags.DEFINE_bool(
    "same_lengths", False, "Generate at most as many tokens as the first model: for models that are not finetuned."
)
_PEER = flags.DEFINE_string("ctranslate2", None, "Directory of a CTranslate2 model to measure, too.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory for the results.")

KEPT_IF_INTERRUPTED = "rounds that were complete are in --output, if it was given"


def main() -> dict[str, Any]:
    from t2r.benchmark.translation import benchmark_translate

    return benchmark_translate(
        _MODEL.value,
        _INPUT.value,
        references=_REFERENCES.value,
        weights=_WEIGHTS.value,
        beams=[int(beam) for beam in _BEAMS.value],
        batch=_BATCH.value,
        rounds=_ROUNDS.value,
        first=_FIRST.value,
        same_lengths=_SAME.value,
        peer=_PEER.value,
        output=_OUTPUT.value,
    )
