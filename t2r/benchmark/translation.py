"""Translation speed of models on a text, in several types of weights, beside CTranslate2, if it can be imported.

All are measured in turn, round after round, so that what else the machine does meanwhile slows all of them alike.
"""

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from t2r import environment
from t2r.benchmark.peers import versions
from t2r.console import say, table
from t2r.decode import beam as beam_search
from t2r.decode.beam import Beam
from t2r.decode.translator import TranslateOptions, pad, read_lines, special_tokens, translate_lines
from t2r.errors import InputError, raise_all
from t2r.evaluation.bleu import check_tokenizer, score_translations
from t2r.files import make_folder, output_folder, write_json
from t2r.importers import by_name
from t2r.model.rows import WEIGHTS, for_decoding
from t2r.store import model_dir

PEER = "ctranslate2"
LENGTH_PENALTY = 0.6


class Row(NamedTuple):
    """One line of the table. `translate(lines, limits)` gives each line at most so many tokens; None: no such limit."""

    model: str
    weights: str
    beam: int
    translate: Callable[[Sequence[str], Sequence[int] | None], list[str]]


class Result(NamedTuple):
    """The times of one row, one for each round so far, and its last translations."""

    row: Row
    seconds: list[float]
    processor_seconds: list[float]  # of all cores together
    translations: list[str]


def benchmark_translate(
    models: Sequence[str],
    source: str,
    *,
    references: str | None = None,
    weights: Sequence[str] = WEIGHTS,
    beams: Sequence[int] = (1, 5),
    batch: int = 32,
    rounds: int = 3,
    first: int | None = None,
    same_lengths: bool = False,
    peer: str | None = None,
    output: str | None = None,
) -> dict[str, Any]:
    """Sentences per second of each model, type of weights and beam: medians over `rounds`.

    With `same_lengths`, no model generates more tokens for a line than the first model does greedily: for models that
    are not finetuned, and do not stop. `peer` is the directory of a CTranslate2 model with its `sentencepiece.model`;
    `references` adds BLEU. Prints a table, writes translate.json into the folder `output`, and returns its content.
    """
    unknown = [name for name in weights if name not in WEIGHTS]
    problems = [f"weights={','.join(unknown)}: choose from {', '.join(WEIGHTS)}"] if unknown else []
    files = {"input": source, "references": references}
    problems += [
        f"{name}={path} does not exist: give a text file"
        for name, path in files.items()
        if path and not Path(path).exists()
    ]
    problems += [f"beam {beam} must be at least 1" for beam in beams if beam < 1]
    asked_for = {"model": models, "weights": weights, "beams": beams}
    problems += [f"{name} is empty: give at least one" for name, values in asked_for.items() if not values]
    problems += _peer_problems(Path(peer)) if peer else []
    raise_all("benchmark translate:", problems)
    if references:
        check_tokenizer("13a")
    if output:
        make_folder(output_folder(output))
    lines = read_lines(source)
    expected = read_lines(references) if references else None
    if expected is not None and len(expected) != len(lines):
        counts = f"{len(expected):,} lines, and input={source} {len(lines):,}"
        raise InputError(f"references={references} has {counts}: give one line for each")
    lines, expected = lines[:first], expected and expected[:first]
    rows = [row for model in models for row in _rows(model, weights, beams, batch)]
    notes: list[str] = []
    if peer:
        rows += _peer_rows(Path(peer), weights, beams, batch, notes)
    limits = _lengths(models[0], lines, batch) if same_lengths else None
    asked = dict(lines=len(lines), batch=batch, same_lengths=same_lengths, notes=notes)
    for number, results in enumerate(_measure(rows, lines, limits, rounds), 1):
        summary = {**asked, "rounds": number, "rows": [_figures(result, results, expected) for result in results]}
        if output:  # after every round: an interrupted run has measured something, too
            write_json(Path(output) / "translate.json", {"environment": environment.describe(), **summary})
    print(_table(summary["rows"]))
    for note in notes:
        say(note)
    return summary


def _figures(result: Result, results: Sequence[Result], references: list[str] | None) -> dict[str, Any]:
    """What is reported of one row."""
    row, lines = result.row, len(result.translations)
    speed = lambda other: round(lines / statistics.median(other.seconds), 2)  # noqa: E731
    peer = [other for other in results if other.row[:3] == (PEER, *row[1:3])]
    figures = {"model": row.model, "weights": row.weights, "beam": row.beam, "sentences_per_second": speed(result)}
    figures["relative_to_ctranslate2"] = round(speed(result) / speed(peer[0]), 2) if peer else None
    if references:
        figures["bleu"] = round(score_translations(result.translations, references)["bleu"], 2)
    return {**figures, "seconds": result.seconds[:], "processor_seconds": result.processor_seconds[:]}


def _rows(path: str, weights: Sequence[str], beams: Sequence[int], batch: int) -> list[Row]:
    loaded = by_name.load(path)
    if not loaded.model.config.encoder_layers:
        raise InputError(f"{path} is a language model: give translation models")

    def translate(
        content: model_dir.LoadedModel, beam: int, lines: Sequence[str], limits: Sequence[int] | None
    ) -> list[str]:
        options = TranslateOptions(beam=Beam(beam, LENGTH_PENALTY), batch=batch)
        return [found[0].text for found in translate_lines(content, lines, options, limits=limits, warn=say)]

    contents = {name: loaded._replace(model=for_decoding(loaded.model, name)) for name in weights}
    return [
        Row(path, name, beam, functools.partial(translate, content, beam))
        for name, content in contents.items()
        for beam in beams
    ]


def _lengths(path: str, lines: Sequence[str], batch: int) -> list[int]:
    """The number of tokens of the model's greedy translation of each line."""
    model, tokenizer, _ = by_name.load(path)
    sources = [tokenizer.encode_source(line) for line in lines]
    options = dict(beam=Beam(1), batch=batch, **special_tokens(tokenizer.target))
    found = beam_search.translate(for_decoding(model), pad(sources, len(sources)), **options)
    return [len(hypotheses[0].tokens) if hypotheses else 0 for hypotheses in found]


def _peer_problems(path: Path) -> list[str]:
    """What is missing in the directory of a CTranslate2 model, if it will be read."""
    if importlib.util.find_spec(PEER) is None:
        return []
    files = _peer_folder(path) / "model.bin", path / "sentencepiece.model"
    return [f"ctranslate2={path}: {file} does not exist: give a converted model" for file in files if not file.exists()]


def _peer_folder(path: Path) -> Path:
    return path / "model" if (path / "model").is_dir() else path


def _peer_rows(path: Path, weights: Sequence[str], beams: Sequence[int], batch: int, notes: list[str]) -> list[Row]:
    """CTranslate2 with as many threads as the machine has cores; none, and a note, if it is not installed."""
    if importlib.util.find_spec(PEER) is None:
        notes.append(f"{PEER} is skipped: it cannot be imported (pip install {PEER})")
        return []
    import ctranslate2
    import sentencepiece

    subwords = sentencepiece.SentencePieceProcessor(str(path / "sentencepiece.model"))
    folder = _peer_folder(path)
    threads = environment.cores()
    notes.append(f"{PEER} {versions(PEER)[PEER]}, {threads} threads")

    def translate(translator: Any, beam: int, lines: Sequence[str], limits: Sequence[int] | None) -> list[str]:
        pieces = subwords.encode(list(lines), out_type=str)
        options = dict(beam_size=beam, max_batch_size=batch, length_penalty=LENGTH_PENALTY)
        results = translator.translate_batch(pieces, **options)  # it has no limit for each line, and needs none
        return [subwords.decode(result.hypotheses[0]) for result in results]

    options = dict(device="cpu", inter_threads=1, intra_threads=threads)
    translators = {name: ctranslate2.Translator(str(folder), compute_type=name, **options) for name in weights}
    return [
        Row(PEER, name, beam, functools.partial(translate, translator, beam))
        for name, translator in translators.items()
        for beam in beams
    ]


def _measure(
    rows: Sequence[Row], lines: Sequence[str], limits: Sequence[int] | None, rounds: int
) -> Iterator[list[Result]]:
    """Measures all rows in turn, `rounds` times; yields all results after each round.

    First each row translates everything once, which compiles its programs: caches grow with the translations.
    """
    for row in rows:
        if row.model != PEER:
            row.translate(lines, limits)
            say(f"compiled: {row.model}, {row.weights}, beam {row.beam}")
    results = [Result(row, [], [], []) for row in rows]
    for number in range(1, rounds + 1):
        for row, seconds, processor_seconds, translations in results:
            began, worked = time.perf_counter(), time.process_time()
            translations[:] = row.translate(lines, limits)
            seconds.append(round(time.perf_counter() - began, 3))
            processor_seconds.append(round(time.process_time() - worked, 3))
            say(f"round {number}, {row.model}, {row.weights}, beam {row.beam}: {seconds[-1]:.1f} s")
        yield results


def _table(results: Sequence[dict[str, Any]]) -> str:
    columns = ("model", "weights", "beam", "sentences_per_second", "relative_to_ctranslate2", "bleu")
    shown = [column for column in columns if any(result.get(column) is not None for result in results)]
    return table(shown, [[result.get(column) for column in shown] for result in results])
