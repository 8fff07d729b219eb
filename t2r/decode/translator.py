"""Lines in, translations out, in the order of the lines, though the batches are of lines of like length."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from t2r.convert.model_dir import Model
from t2r.data.tokenizer import opening
from t2r.decode import beam as beam_search
from t2r.decode.beam import Beam, default_limit
from t2r.decode.generate import go_on, start_translation
from t2r.decode.sampling import Sampling
from t2r.errors import InputError
from t2r.model.loss import PADDING, pad_rows


class Translation(NamedTuple):
    """A translation and its score, which sampling does not have."""

    text: str
    score: float | None = None


class Options(NamedTuple):
    """How to translate."""

    beam: Beam = Beam()
    sampling: Sampling | None = None  # instead of a search
    seed: int = 0
    batch: int = 32  # sentences at a time
    max_source: int = 1024  # tokens; longer lines are errors, or cut
    truncate: bool = False


def translate_lines(
    content: Model,
    lines: Sequence[str],
    options: Options = Options(),
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
    encoded: list[list[int]], options: Options, end: int, first_line: int, warn: Callable[[str], None]
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


def _translate(model, tokenizer, rows: np.ndarray, options: Options, first: int) -> list[list[Translation]]:
    if options.sampling is None:
        found = beam_search.translate(model, rows, start=opening(tokenizer), end=tokenizer.stop, beam=options.beam)
        return [[Translation(_line(tokenizer, h.tokens), h.score) for h in hypotheses] for hypotheses in found]
    limits = [default_limit(int(length)) for length in (rows != PADDING).sum(1)]
    seed = options.seed + first  # each batch draws its own
    generation = start_translation(model, rows, max(limits), start=opening(tokenizer), seed=seed)
    _, found = go_on(model, generation, max(limits), end=tokenizer.stop, sampling=options.sampling)
    return [[Translation(_line(tokenizer, ids[:limit]))] for ids, limit in zip(found, limits)]


def _line(tokenizer, ids: list[int]) -> str:
    """Text in one line, whatever bytes a model may spell."""
    return " ".join(tokenizer.decode(ids).split())
