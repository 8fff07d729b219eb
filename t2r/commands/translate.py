"""Translate lines: one line out for each line in, in their order.

t2r translate --model=MODEL --input=FILE --output=FILE [--beam=5 --length_penalty=0.6]
echo "forty-two" | t2r translate --model=MODEL

Without --input lines come from standard input, without --output they go to standard output, and the line of JSON that
ends every command to standard error. Empty lines stay empty. With --n_best or --scores a line is the number of its
source line, the score (log-probability over length^penalty) and the text, with tabs between.
"""

import sys
from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory of a translation model.", required=True)
_INPUT = flags.DEFINE_string("input", None, "Text file (.gz too), a sentence a line; default: standard input.")
_OUTPUT = flags.DEFINE_string("output", None, "File to write, whole or not at all; default: standard output.")
_BEAM = flags.DEFINE_integer("beam", 5, "Beam size; 1: greedy.")
_PENALTY = flags.DEFINE_float("length_penalty", 0.6, "Scores are divided by length to this power.")
_EARLY = flags.DEFINE_bool("early_stopping", False, "Stop at as many results as beams, as the paper's toolkit does.")
_N_BEST = flags.DEFINE_integer("n_best", 1, "Translations of each line; at most as many as beams.", lower_bound=1)
_SCORES = flags.DEFINE_bool("scores", False, "Write line numbers and scores beside the text.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Above 0: sample, do not search.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k likeliest tokens only; 0: among all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample among the likeliest tokens that together reach this probability.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.")
_BATCH = flags.DEFINE_integer("batch", 32, "Sentences translated at a time.", lower_bound=1)
_MAX_SOURCE = flags.DEFINE_integer("max_source", 1024, "Most tokens of a line.", lower_bound=2)
_OVERLONG = flags.DEFINE_enum("overlong", "error", ["error", "truncate"], "What to do with longer lines.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations.")


def report_stream():
    """Where the line of JSON goes: beside the translations it would be one more of them."""
    return sys.stdout if _OUTPUT.value else sys.stderr


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.decode.beam import Beam
    from t2r.decode.sampling import Sampling
    from t2r.decode.translator import TranslateOptions, translate_file
    from t2r.store import model_dir

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value) if _TEMPERATURE.value else None
    options = TranslateOptions(
        beam=Beam(_BEAM.value, _PENALTY.value, _EARLY.value),
        sampling=sampling,
        seed=_SEED.value,
        batch=_BATCH.value,
        max_source=_MAX_SOURCE.value,
        truncate=_OVERLONG.value == "truncate",
    )
    loaded = model_dir.load(_MODEL.value, dtype=_DTYPE.value)
    result = translate_file(loaded, _INPUT.value, _OUTPUT.value, options, n_best=_N_BEST.value, scores=_SCORES.value)
    print(table(["translated", ""], result.items()), file=report_stream())
    return result
