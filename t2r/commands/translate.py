"""Translate a file line by line.

t2r translate --model=MODEL --input=FILE --output=FILE [--beam=5 --length_penalty=0.6]
echo "forty-two" | t2r translate --model=MODEL

Each input line gives one output line, in the same order; empty lines stay empty. Without --input, lines are read from
standard input. Without --output, translations go to standard output and the final line of JSON to standard error. With
--n_best or --scores, output lines have three columns, separated by tabs: the number of the source line, the score
(log-probability / length^penalty) and the translation.
"""

import sys
from typing import Any

from absl import flags

from t2r.commands import _decoding as decoding

_MODEL = flags.DEFINE_string(
    "model", None, "Translation model: a directory, or ORG/NAME of the Hugging Face hub.", required=True
)
_INPUT = flags.DEFINE_string("input", None, "Text file (also .gz), one sentence per line; default: standard input.")
_OUTPUT = flags.DEFINE_string("output", None, "File to write; default: standard output.")
_BEAM = flags.DEFINE_integer("beam", 5, "Beam size; 1: greedy.", lower_bound=1)
_PENALTY = flags.DEFINE_float("length_penalty", 0.6, "Scores are divided by length^penalty.", lower_bound=0)
_EARLY = flags.DEFINE_bool("early_stopping", False, "Stop when --beam hypotheses have ended, as fairseq does.")
_N_BEST = flags.DEFINE_integer("n_best", 1, "Translations per line; at most --beam.", lower_bound=1)
_SCORES = flags.DEFINE_bool("scores", False, "Also write line numbers and scores.")
_TEMPERATURE, _TOP_K, _TOP_P = decoding.define_sampling(meaning="Above 0: sample instead of beam search.")
_SEED = flags.DEFINE_integer("seed", 0, "Random seed for sampling.", lower_bound=0, upper_bound=2**32 - 1)
_BATCH = flags.DEFINE_integer("batch", 32, "Sentences translated at a time.", lower_bound=1)
_MAX_SOURCE = flags.DEFINE_integer("max_source", 1024, "Maximum tokens per line.", lower_bound=2)
_OVERLONG = flags.DEFINE_enum("overlong", "error", ["error", "truncate"], "What to do with longer lines.")
_DTYPE, _WEIGHTS, _KERNELS = decoding.define_dtype(), decoding.define_weights(), decoding.define_kernels()


def report_stream():
    """The stream for the final line of JSON: standard error if translations go to standard output."""
    return sys.stdout if _OUTPUT.value else sys.stderr


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.decode.beam import Beam
    from t2r.decode.sampling import Sampling
    from t2r.decode.translator import TranslateOptions, check_request, translate_file
    from t2r.importers import by_name
    from t2r.model.rows import for_decoding

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    options = TranslateOptions(
        beam=Beam(_BEAM.value, _PENALTY.value, _EARLY.value),
        sampling=sampling if sampling.temperature else None,
        seed=_SEED.value,
        batch=_BATCH.value,
        max_source=_MAX_SOURCE.value,
        truncate=_OVERLONG.value == "truncate",
    )
    request = dict(n_best=_N_BEST.value, scores=_SCORES.value)
    problems = decoding.ignored([_TOP_K, _TOP_P, _SEED], _TEMPERATURE)
    problems += decoding.ignored([_BEAM, _PENALTY, _EARLY], _TEMPERATURE, when_sampling=True)
    check_request(_INPUT.value, _OUTPUT.value, options, **request, problems=problems)
    loaded = by_name.load(_MODEL.value, dtype=_DTYPE.value, kernels=_KERNELS.value)
    loaded = loaded._replace(model=for_decoding(loaded.model, _WEIGHTS.value))
    result = translate_file(loaded, _INPUT.value, _OUTPUT.value, options, **request) | {"weights": _WEIGHTS.value}
    print(table(["translated", ""], result.items()), file=report_stream())
    return result
