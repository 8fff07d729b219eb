"""Analyses converted models: attention against the transformer's, perplexity, by feature size (Figures 4 to 6)."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from t2r.analysis.models import check_models, describe_model, find_model
from t2r.analysis.statistics import AttentionStatistics, averages, measure
from t2r.batch import Batch, pad_sequences
from t2r.console import say
from t2r.data.buckets import Buckets, Encoded, EncodedPairs
from t2r.data.pairs import is_pairs, load_pairs
from t2r.data.sources import load_documents
from t2r.data.tokenizer import same_tokens
from t2r.environment import describe
from t2r.errors import InputError
from t2r.evaluation.perplexity import pair_perplexity, perplexity
from t2r.evaluation.score import default_split
from t2r.importers import by_name
from t2r.model.transformer import LanguageModel, check_length
from t2r.store.model_dir import LoadedModel

LENGTH, SENTENCE = 512, 96  # tokens of a window of text, as in the paper; the most of a sentence
SEQUENCES = 256  # windows or pairs that are read
LENGTHS = 2  # to which sentences are padded; each is compiled once
LONGEST_TOKEN = 100  # characters: more than the mean of any text


def analyze(
    models: list[str],
    data: str,
    *,
    transformer: str | None = None,
    split: str | None = None,
    length: int | None = None,
    queries: int = 1,
    sequences: int = SEQUENCES,
    batch: int = 4,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The statistics of each model, those of the transformer first if there is one; see `docs/analysis.md`.

    Text is read in windows of `length` tokens, of which the last `queries` are looked at: with one, as in the paper,
    a word is predicted from the `length` words before it. Of sentence pairs all target tokens are looked at.
    """
    check_models(models, transformer)
    split = split or default_split(data)
    original = None if transformer is None else by_name.load(find_model(transformer), dtype=dtype)
    first = original or by_name.load(find_model(models[0]), dtype=dtype)
    translates = bool(first.model.config.encoder_layers)
    _check_data(data, translates)
    reader = _Pairs if translates else _Windows
    read = reader(first, data, split, length=length, sequences=sequences, batch=batch)
    if not translates and queries > read.length:
        raise InputError(f"queries={queries} must be at most length={read.length}")
    queries_seen = None if translates else queries
    names = [*([] if transformer is None else [transformer]), *models]
    results = []
    for number, name in enumerate(names, 1):
        loaded = original if name == transformer else by_name.load(find_model(name), dtype=dtype)
        if not same_tokens(first.tokenizer, loaded.tokenizer):
            raise InputError(f"{name} reads text as other tokens than {names[0]}: compare models with one tokenizer")
        described = describe_model(name, loaded)
        say(f"[{number}/{len(names)}] {name}: {described.series}")
        compared = original.model if original is not None and described.is_aligned else None
        statistics = measure(loaded.model, read.batches(), transformer=compared, queries=queries_seen)
        results.append(
            {
                **described._asdict(),
                "perplexity": read.perplexity(loaded.model),
                "causal": averages(statistics),
                "cross": averages(statistics, "cross") if translates else None,
                "attentions": [_plain(one) for one in statistics],
            }
        )
    return {
        "data": data,
        "split": split,
        "transformer": transformer,
        "length": read.length,
        "queries": queries_seen,
        "sequences": read.count,
        "models": results,
        "environment": describe(),
    }


def _check_data(data: str, translates: bool) -> None:
    if is_pairs(data) != translates:
        needed = "sentence pairs" if translates else "text"
        raise InputError(f"--data={data}: {'translation' if translates else 'language'} models need {needed}")


def _plain(one: AttentionStatistics) -> dict[str, Any]:
    return {**one._asdict(), "features": one.features and one.features._asdict()}


class _Windows:
    """A text in windows; no more of it is tokenised than is needed."""

    def __init__(self, loaded: LoadedModel, data: str, split: str, *, length: int | None, sequences: int, batch: int):
        positions = loaded.model.config.max_positions
        self.length = length or min(LENGTH, positions or LENGTH)
        check_length(loaded.model.config, self.length)
        self._tokens = _first_tokens(loaded, load_documents(data, split), sequences * self.length + 1)
        self._size, self.count = batch, (len(self._tokens) - 1) // self.length
        if not self.count:
            raise InputError(
                f"--data={data}: the {split} split has {len(self._tokens)} tokens, too few for a window of "
                f"{self.length} and the next token: give more text, or a smaller --length"
            )

    def batches(self) -> Iterator[Batch]:
        starts = range(0, self.count * self.length, self.length)
        for first in range(0, self.count, self._size):
            windows = [self._tokens[start : start + self.length + 1] for start in starts[first : first + self._size]]
            yield Batch(pad_sequences(windows, self._size, self.length + 1))

    def perplexity(self, model: LanguageModel) -> float:
        """Of the second half of windows, as in the paper."""
        return perplexity(model, self._tokens, window=self.length, batch=self._size, quiet=True).perplexity


def _first_tokens(loaded: LoadedModel, documents: list[str], count: int) -> np.ndarray:
    """The first `count` tokens of all documents, or all of them."""
    parts, left = [], count
    for document in documents:
        ids = loaded.tokenizer.encode_document(document[: left * LONGEST_TOKEN])
        parts.append(np.asarray(ids[:left], np.int32))
        left -= len(parts[-1])
        if not left:
            break
    return np.concatenate(parts)


class _Pairs:
    """Sentence pairs, padded."""

    def __init__(self, loaded: LoadedModel, data: str, split: str, *, length: int | None, sequences: int, batch: int):
        self.length, encode = length or SENTENCE, loaded.tokenizer
        check_length(loaded.model.config, self.length)
        pairs = [
            Encoded(encode.encode_source(source), encode.encode_target(target))
            for source, target in itertools.islice(load_pairs(data, split), sequences)
        ]
        short = [pair for pair in pairs if max(map(len, pair)) <= self.length]
        if not short:
            raise InputError(f"--length={self.length}: each of {len(pairs)} pairs of {data} is longer; raise it")
        self._buckets = Buckets(EncodedPairs.of(short), tokens=batch * self.length, count=LENGTHS)
        self.count = len(short)

    def batches(self) -> Iterator[Batch]:
        return (self._buckets.batch(number).whole() for number in range(len(self._buckets)))

    def perplexity(self, model: LanguageModel) -> float:
        """Of the target tokens."""
        return pair_perplexity(model, self._buckets)
