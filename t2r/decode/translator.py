"""Lines in, translations out, in the order of the lines, though the batches are of lines of like length."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t2r.batch import PADDING, pad_rows
from t2r.console import Progress
from t2r.data.sources import read_text
from t2r.data.tokenizer import decoder_start_ids
from t2r.decode import beam as beam_search
from t2r.decode.beam import Beam, default_limit
from t2r.decode.generate import generate_tokens, prefill_translation
from t2r.decode.sampling import Sampling
from t2r.errors import InputError
from t2r.store.model_dir import LoadedModel

# Batches translated before their lines are written: enough to sort by length, soon enough to be followed.
BATCHES_AT_ONCE = 64


class Translation(NamedTuple):
    """A translation and its score, which sampling does not have."""

    text: str
    score: float | None = None


class TranslateOptions(NamedTuple):
    """How to translate."""

    beam: Beam = Beam()
    sampling: Sampling | None = None  # instead of a search
    seed: int = 0
    batch: int = 32  # sentences at a time
    max_source: int = 1024  # tokens; longer lines are errors, or cut
    truncate: bool = False


def translate_lines(
    content: LoadedModel,
    lines: Sequence[str],
    options: TranslateOptions = TranslateOptions(),
    *,
    first_line: int = 1,
    warn: Callable[[str], None] = print,
    on_batch: Callable[[int], None] = lambda done: None,
) -> list[list[Translation]]:
    """For each line its translations, best first: as many as beams, or one that is sampled; for an empty line one that
    is empty. `first_line` is the number of the first, for messages."""
    model, tokenizer, _ = content
    if not model.config.encoder_layers:
        raise InputError("this model is a language model: translating takes a translation model")
    encoded = [tokenizer.encode_source(line) if line.strip() else [] for line in lines]
    encoded = fit(encoded, options, tokenizer.source.end, first_line, warn)
    order = sorted((i for i, ids in enumerate(encoded) if ids), key=lambda i: -len(encoded[i]))
    found = [[Translation("", 0.0 if options.sampling is None else None)] for _ in lines]
    on_batch(len(lines) - len(order))
    for first in range(0, len(order), options.batch):
        chosen = order[first : first + options.batch]
        rows = pad([encoded[i] for i in chosen], options.batch)
        for i, hypotheses in zip(chosen, _translate(model, tokenizer.target, rows, options, first)):
            found[i] = hypotheses
        on_batch(len(chosen))
    return found


def fit(
    encoded: list[list[int]], options: TranslateOptions, end: int, first_line: int, warn: Callable[[str], None]
) -> list[list[int]]:
    """Refuses lines that are too long, all in one error, or cuts them with a warning, whichever was asked for."""
    longer = [i for i, ids in enumerate(encoded) if len(ids) > options.max_source]
    if not longer:
        return encoded
    names = ", ".join(f"line {first_line + i:,} ({len(encoded[i]):,})" for i in longer[:10])
    names += f" and {len(longer) - 10:,} more" if len(longer) > 10 else ""
    what = f"more than max_source={options.max_source} tokens: {names}"
    if not options.truncate:
        raise InputError(f"{what}. Split them, allow more, or ask to truncate")
    warn(f"warning: cut, {what}")
    cut = set(longer)
    return [[*ids[: options.max_source - 1], end] if i in cut else ids for i, ids in enumerate(encoded)]


def pad(rows: list[list[int]], count: int) -> np.ndarray:
    """`count` rows as wide as a power of two, at least 16, so that few programs are compiled."""
    width = max(16, 1 << (max(map(len, rows)) - 1).bit_length())
    return pad_rows(rows, count, width)


def _translate(model, tokenizer, rows: np.ndarray, options: TranslateOptions, first: int) -> list[list[Translation]]:
    if options.sampling is None:
        found = beam_search.translate(
            model, rows, start=decoder_start_ids(tokenizer), end=tokenizer.stop, beam=options.beam
        )
        return [[Translation(_line(tokenizer, h.tokens), h.score) for h in hypotheses] for hypotheses in found]
    limits = [default_limit(int(length)) for length in (rows != PADDING).sum(1)]
    seed = options.seed + first  # each batch draws its own
    generation = prefill_translation(model, rows, max(limits), start=decoder_start_ids(tokenizer), seed=seed)
    _, found = generate_tokens(model, generation, max(limits), end=tokenizer.stop, sampling=options.sampling)
    return [[Translation(_line(tokenizer, ids[:limit]))] for ids, limit in zip(found, limits)]


def _line(tokenizer, ids: list[int]) -> str:
    """Text in one line, whatever bytes a model may spell."""
    return " ".join(tokenizer.decode(ids).split())


def translate_file(
    loaded: LoadedModel,
    source: str | Path | None,
    output: str | Path | None = None,
    options: TranslateOptions = TranslateOptions(),
    *,
    n_best: int = 1,
    scores: bool = False,
) -> dict[str, Any]:
    """Translates a file (None: standard input) line by line into another, written whole or not at all (None: standard
    output, at once). With `n_best` or `scores` a line is its source's number, the score and the text, between tabs."""
    if n_best > options.beam.size:
        raise InputError(f"--n_best={n_best} is more than --beam={options.beam.size}: raise the beam")
    if options.sampling and (n_best > 1 or scores):
        raise InputError("--n_best and --scores belong to a search: leave out --temperature")
    lines, began = read_lines(source), time.perf_counter()
    at_once = options.batch * BATCHES_AT_ONCE
    with writer(output) as write, Progress("translate", len(lines)) as progress:
        for first in range(0, len(lines), at_once):
            part = lines[first : first + at_once]
            hooks = dict(warn=progress.say, on_batch=progress.advance)
            translated = translate_lines(loaded, part, options, first_line=first + 1, **hooks)
            for number, translations in enumerate(translated, first + 1):
                for text, score in translations[:n_best]:
                    write(f"{number}\t{score:.4f}\t{text}\n" if scores or n_best > 1 else text + "\n")
    seconds = time.perf_counter() - began
    return {
        "sentences": len(lines),
        "empty": sum(not line.strip() for line in lines),
        "seconds": round(seconds, 2),
        "sentences_per_second": round(len(lines) / seconds, 1),
        "output": output and str(output),
    }


def read_lines(path: str | Path | None) -> list[str]:
    """The lines of a file or of standard input. Only line feeds end them: one line in must stay one line out."""
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
def writer(path: str | Path | None) -> Iterator[Callable[[str], Any]]:
    """A function that writes text to a file, which appears when all is written, or to standard output at once."""
    if not path:
        yield lambda text: print(text, end="", flush=True)
        return
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
