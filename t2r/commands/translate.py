"""Translate lines: one line out for each line in, in their order.

python -m t2r translate --model=MODEL --input=FILE --output=FILE [--beam=5 --length_penalty=0.6]
echo "forty-two" | python -m t2r translate --model=MODEL

Without --input lines come from standard input, without --output they go to standard output, and the line of JSON that
ends every command to standard error. Empty lines stay empty. With --n_best or --scores a line is the number of its
source line, the score (log-probability over length^penalty) and the text, with tabs between.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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

# Batches translated before their lines are written: enough to sort by length, soon enough to be followed.
BATCHES_AT_ONCE = 64


def report_stream():
    """Where the line of JSON goes: beside the translations it would be one more of them."""
    return sys.stdout if _OUTPUT.value else sys.stderr


def main() -> dict[str, Any]:
    from t2r.console import Progress, table
    from t2r.convert import model_dir
    from t2r.decode.beam import Beam
    from t2r.decode.sampling import Sampling
    from t2r.decode.translator import Options, translate_lines
    from t2r.errors import InputError

    if _N_BEST.value > _BEAM.value:
        raise InputError(f"--n_best={_N_BEST.value} is more than --beam={_BEAM.value}: raise the beam")
    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value) if _TEMPERATURE.value else None
    if sampling and (_N_BEST.value > 1 or _SCORES.value):
        raise InputError("--n_best and --scores belong to a search: leave out --temperature")
    options = Options(
        beam=Beam(_BEAM.value, _PENALTY.value, _EARLY.value),
        sampling=sampling,
        seed=_SEED.value,
        batch=_BATCH.value,
        max_source=_MAX_SOURCE.value,
        truncate=_OVERLONG.value == "truncate",
    )
    content = model_dir.load(_MODEL.value, dtype=_DTYPE.value)
    lines = read_lines(_INPUT.value)
    began = time.perf_counter()
    at_once = _BATCH.value * BATCHES_AT_ONCE
    with writer(_OUTPUT.value) as write, Progress("translate", len(lines)) as progress:
        for first in range(0, len(lines), at_once):
            found = translate_lines(
                content,
                lines[first : first + at_once],
                options,
                first_line=first + 1,
                warn=progress.say,
                on_batch=progress.advance,
            )
            for number, translations in enumerate(found, first + 1):
                for text, score in translations[: _N_BEST.value]:
                    numbered = _SCORES.value or _N_BEST.value > 1
                    write(f"{number}\t{score:.4f}\t{text}\n" if numbered else text + "\n")
    seconds = time.perf_counter() - began
    result = {
        "sentences": len(lines),
        "empty": sum(not line.strip() for line in lines),
        "seconds": round(seconds, 2),
        "sentences_per_second": round(len(lines) / seconds, 1),
        "output": _OUTPUT.value,
    }
    print(table(["translated", ""], result.items()), file=report_stream())
    return result


def read_lines(path: str | None) -> list[str]:
    """The lines of a file or of standard input. Only line feeds end them: one line in must stay one line out."""
    from t2r.data.sources import read_text
    from t2r.errors import InputError

    if path:
        text = read_text(Path(path))
    else:
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text: byte {error.start}") from None
    if not text:
        raise InputError("standard input is empty: give lines to translate, or --input=FILE")
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]


@contextlib.contextmanager
def writer(path: str | None) -> Iterator[Any]:
    """A function that writes text to a file, which appears when all is written, or to standard output at once."""
    if not path:
        yield lambda text: print(text, end="", flush=True)
        return
    from t2r.errors import InputError

    unfinished = Path(f"{path}.{os.getpid()}.unfinished")
    try:
        file = unfinished.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    try:
        with file:
            yield file.write
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
