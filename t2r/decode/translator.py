"""Translates lines of text, in batches of lines of similar length; results are in the order of the lines."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t2r.batch import pad_sequences
from t2r.console import Progress
from t2r.data.sources import read_text
from t2r.data.tokenizer import decoder_start_ids
from t2r.decode import beam as beam_search
from t2r.decode.beam import Beam, default_limit, padded_width, within_positions
from t2r.decode.generate import generate_tokens, prefill_translation
from t2r.decode.sampling import Sampling
from t2r.errors import InputError, check_seed, raise_all
from t2r.files import atomic_file, check_output_file, is_same_file
from t2r.model.rows import for_decoding
from t2r.model.transformer import Seq2Seq
from t2r.store.model_dir import LoadedModel

# Lines are sorted by length within this many batches, and written after them: a compromise between little padding and
# early output.
BATCHES_AT_ONCE = 64
_LISTED_LINES = 10  # in one error message
_ROWS = 4  # a batch has a multiple of so many sentences, so that few programs are compiled


class Translation(NamedTuple):
    """A translation and its score; a sampled one has none."""

    text: str
    score: float | None = None


class TranslateOptions(NamedTuple):
    """The options of translation."""

    beam: Beam = Beam()
    sampling: Sampling | None = None  # instead of beam search
    seed: int = 0
    batch: int = 32  # sentences per batch
    max_source: int = 1024  # tokens; a longer line is an error, or with `truncate` it is cut
    truncate: bool = False


def translate_lines(
    content: LoadedModel,
    lines: Sequence[str],
    options: TranslateOptions = TranslateOptions(),
    *,
    limits: Sequence[int] | None = None,
    first_line: int = 1,
    warn: Callable[[str], None] = print,
    on_batch: Callable[[int], None] = lambda done: None,
) -> list[list[Translation]]:
    """The translations of each line, best first: `beam.size` of them, or one that is sampled; an empty line gives one
    empty translation.

    `limits` holds the most tokens of each line's translation, by default `default_limit` of its source's length.
    `first_line` is the number of the first line, for messages.
    """
    model, tokenizer, _ = content
    if not model.config.encoder_layers:
        raise InputError("this model is a language model: give a translation model, or use `t2r generate`")
    model = for_decoding(model)
    check_seed(options.seed)
    encoded = [tokenizer.encode_source(line) if line.strip() else [] for line in lines]
    encoded = fit(encoded, options, tokenizer.source.end, first_line, warn)
    order = sorted((i for i, ids in enumerate(encoded) if ids), key=lambda i: -len(encoded[i]))
    results = [[Translation("", 0.0 if options.sampling is None else None)] for _ in lines]
    on_batch(len(lines) - len(order))
    if not order:
        return results
    most = [default_limit(len(encoded[i])) if limits is None else limits[i] for i in order]
    sources = [encoded[i] for i in order]
    if options.sampling is None:
        sizes = dict(beam=options.beam, limits=most, batch=options.batch)
        padded, special = pad(sources, len(sources)), special_tokens(tokenizer.target)
        searched = beam_search.translate(model, padded, on_done=on_batch, **sizes, **special)
        found = [[(h.tokens, h.score) for h in hypotheses] for hypotheses in searched]
    else:
        found = [[(ids, None)] for ids in _sample(model, tokenizer.target, sources, most, options, on_batch)]
    for i, scored in zip(order, found):
        results[i] = [Translation(_line(tokenizer.target, ids), score) for ids, score in scored]
    return results


def fit(
    encoded: list[list[int]], options: TranslateOptions, end: int, first_line: int, warn: Callable[[str], None]
) -> list[list[int]]:
    """Cuts lines of more than `max_source` tokens with a warning; without `truncate`, they are one error."""
    too_long = [i for i, ids in enumerate(encoded) if len(ids) > options.max_source]
    if not too_long:
        return encoded
    names = ", ".join(f"line {first_line + i:,} ({len(encoded[i]):,})" for i in too_long[:_LISTED_LINES])
    names += f" and {len(too_long) - _LISTED_LINES:,} more" if len(too_long) > _LISTED_LINES else ""
    problem = f"more than max_source={options.max_source} tokens: {names}"
    if not options.truncate:
        raise InputError(f"{problem}. Split these lines (t2r translate also has --max_source and --overlong)")
    warn(f"warning: lines were cut, {problem}")
    cut = set(too_long)
    return [[*ids[: options.max_source - 1], end] if i in cut else ids for i, ids in enumerate(encoded)]


def pad(sequences: list[list[int]], count: int) -> np.ndarray:
    """`count` sequences padded to one width, of which there are few: so few programs are compiled."""
    return pad_sequences(sequences, count, padded_width(max(map(len, sequences))))


def _sample(
    model: Seq2Seq,
    tokenizer: Any,
    sources: list[list[int]],
    limits: list[int],
    options: TranslateOptions,
    on_batch: Callable[[int], None],
) -> list[list[int]]:
    """One translation of each source, which is sampled; batches have equally many sources, or nearly."""
    start, end, padding = special_tokens(tokenizer).values()
    # As in beam search: no padding, and no stop token at once.
    never = tuple({start[0], padding} - {end, None})
    sampling = dataclasses.replace(options.sampling, never=never)
    first_sampling = dataclasses.replace(sampling, never=(*never, end))
    rows, limits, results = batch_rows(len(sources), options.batch), within_positions(model, limits, len(start)), []
    for done in range(0, len(sources), rows):
        some, longest = sources[done : done + rows], max(limits[done : done + rows])
        seed = options.seed + done  # different in each batch
        generation = prefill_translation(model, pad(some, rows), longest, start=start, seed=seed)
        generation, firsts = generate_tokens(model, generation, 1, end=end, sampling=first_sampling)
        _, rests = generate_tokens(model, generation, longest - 1, end=end, sampling=sampling)
        results += [[*first, *rest] for first, rest in zip(firsts, rests)][: len(some)]
        on_batch(len(some))
    return [ids[:limit] for ids, limit in zip(results, limits)]


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """What decoding must know of a target tokenizer: the start tokens, the stop token, the padding token or None."""
    start = decoder_start_ids(tokenizer)
    return {"start": start, "end": tokenizer.stop, "padding": getattr(tokenizer, "padding", None)}


def batch_rows(lines: int, most: int) -> int:
    """Sentences per batch: as few batches as possible, about equally full, so that little of the last one is empty."""
    batches = max(1, -(-lines // most))
    rows = -(-lines // batches)
    return min(most, -(-rows // _ROWS) * _ROWS)


def _line(tokenizer, ids: list[int]) -> str:
    """The decoded text as one line, even if the model generates line breaks."""
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
    """Translates a file line by line (None: standard input). `output` is written atomically (None: standard output).

    With `n_best` > 1 or `scores`, an output line has the source's line number, the score and the text, tab-separated.
    """
    check_request(source, output, options, n_best=n_best, scores=scores)
    loaded = loaded._replace(model=for_decoding(loaded.model))  # once, not for each part
    lines, began = read_lines(source), time.perf_counter()
    lines_at_once = options.batch * BATCHES_AT_ONCE
    with writer(output) as write, Progress("translate", len(lines)) as progress:
        for first in range(0, len(lines), lines_at_once):
            part = lines[first : first + lines_at_once]
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


def check_request(
    source: str | Path | None,
    output: str | Path | None,
    options: TranslateOptions,
    *,
    n_best: int,
    scores: bool,
    problems: Sequence[str] = (),
) -> None:
    """Raises one error for `problems` and all else that can be known to be wrong before a model is loaded."""
    problems = list(problems)
    of_search = [name for name, given in (("--n_best", n_best > 1), ("--scores", scores)) if given]
    if options.sampling and of_search:
        problems.append(f"{' and '.join(of_search)}: for beam search only; leave out --temperature")
    elif n_best > options.beam.size:
        problems.append(f"--n_best={n_best} is more than --beam={options.beam.size}: raise the beam, or lower --n_best")
    if source and not os.path.lexists(source):  # what is wrong with a link, reading it says
        problems.append(f"--input={source}: there is no such file; check the path")
    elif source and os.path.isdir(source):
        problems.append(f"--input={source} is a folder: name a file")
    if source and output and is_same_file(source, output):
        problems.append(f"--output={output} is the input: choose another file")
    raise_all("cannot translate:", problems)
    if output:
        check_output_file(Path(output))


def read_lines(path: str | Path | None) -> list[str]:
    """The lines of a file or of standard input, split only at line feeds, so that input and output lines correspond."""
    if path:
        text = read_text(Path(path))
    elif sys.stdin is None:
        raise InputError("standard input is closed: give --input=FILE")
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
    """Yields a function that writes text: to a file, which is renamed into place at the end, or to standard output."""
    if not path:
        yield lambda text: print(text, end="", flush=True)
        return
    with atomic_file(Path(path)) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as file:
        yield file.write
