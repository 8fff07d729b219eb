"""The two training tasks, language modelling and translation: their data, batches and validation."""

from pathlib import Path
from typing import Protocol, runtime_checkable

import grain
import numpy as np
from ml_collections import ConfigDict

from t2r.data.batches import Blocks, Documents, Repeating, training_batches
from t2r.data.buckets import Buckets
from t2r.data.pairs import is_pairs
from t2r.data.prepared import prepare_pairs, prepare_tokenizer, prepare_tokenizers, prepare_tokens
from t2r.data.tokenizer import Tokenizer, TokenizerPair, stop_ids
from t2r.errors import InputError
from t2r.evaluation.perplexity import document_perplexity, pair_perplexity, perplexity
from t2r.model.transformer import LanguageModel, check_length
from t2r.training.sharding import sequences_per_part
from t2r.training.teacher import written_pairs, written_tokens

Corpus = tuple[np.ndarray, np.ndarray]  # the token ids of all documents, and the index at which each document ends
TRAINING_SHARE = 19, 20  # 19 of 20 texts that the teacher generates are trained on; the rest validates
VALIDATION_TOKENS = 4096  # padded tokens per side in a validation batch of pairs


@runtime_checkable
class Task(Protocol):
    """What the trainer needs from a task."""

    summary: str  # a sentence about the data, for the log

    def batches(self) -> grain.DatasetIterator: ...  # endless and resumable; each item is the list of parts of one step
    def validate(self, model: LanguageModel) -> float: ...  # perplexity


class LanguageModelling:
    """Predicts each token of a text from the tokens before it."""

    def __init__(self, config: ConfigDict, workdir: Path, model: LanguageModel, tokenizer: Tokenizer, devices: int):
        check_length(model.config, config.data.length)
        sequences_per_part(config, devices)  # raises if the batch cannot be divided
        data, self._config, self._start = config.data, config, tokenizer.end
        self._closing = {tokenizer.end, *stop_ids(tokenizer)}
        (tokens, ends), self._valid = corpora(config, workdir, tokenizer)
        if data.documents:
            self._sequences, kind = Documents(tokens, ends, data.length, tokenizer.end), "documents"
        else:
            self._sequences, kind = Blocks(tokens, data.length), "blocks"
        self.summary = f"{len(tokens):,} tokens, in batches of {data.batch} {kind} of {data.length:,}"
        if data.repeat:
            self._sequences = Repeating(self._sequences, data.repeat, config.seed)
            self.summary += f", in {data.repeat:.0%} of which the beginning repeats"

    def batches(self) -> grain.DatasetIterator:
        config = self._config
        return training_batches(self._sequences, batch=config.data.batch, seed=config.seed, parts=config.accumulate)

    def validate(self, model: LanguageModel) -> float:
        tokens, ends = self._valid
        options = dict(window=self._config.data.length, quiet=True)
        if self._config.data.documents:
            # As `evaluate --documents` does: without the tokens that end a document.
            documents = [_without_end(ids, self._closing) for ids in np.split(tokens, ends[:-1])]
            return document_perplexity(model, documents, start=self._start, **options).perplexity
        return perplexity(model, np.append(self._start, tokens), **options).perplexity


def _without_end(ids: np.ndarray, closing: set[int]) -> np.ndarray:
    """A document without its closing tokens."""
    length = len(ids)
    while length and int(ids[length - 1]) in closing:
        length -= 1
    return ids[:length]


class Translation:
    """Predicts each target token from the source and the target tokens before it."""

    def __init__(self, config: ConfigDict, workdir: Path, model: LanguageModel, tokenizer: TokenizerPair, devices: int):
        data = config.data
        check_length(model.config, data.length)
        train, valid = splits(config)
        folder = prepared_folder(config, workdir)
        valid = prepare_pairs(folder, *valid, tokenizer)
        if config.teacher.writes:
            train = written_pairs(config, workdir, *train, tokenizer)
        else:
            train = prepare_pairs(folder, *train, tokenizer)
        options = dict(count=data.buckets, multiple=devices, longest=data.length)
        self._parts = config.accumulate
        tokens = data.batch_tokens // config.accumulate
        self._buckets = buckets = Buckets(train, tokens=tokens, seed=config.seed, ratio=data.max_ratio, **options)
        self._valid = Buckets(valid, tokens=VALIDATION_TOKENS, **options)
        self.summary = (
            f"{len(train) - buckets.left_out:,} pairs (data.length={data.length} and data.max_ratio={data.max_ratio} "
            f"leave out {buckets.left_out:,}), {buckets.tokens[1]:,} target tokens, in batches of "
            f"{len(buckets.bounds)} lengths up to {buckets.bounds[-1]}, {buckets.padding:.1%} of which is padding; "
            f"{len(buckets) / config.accumulate:,.1f} steps an epoch"
        )

    def batches(self) -> grain.DatasetIterator:
        return self._buckets.training_batches(self._parts)

    def validate(self, model: LanguageModel) -> float:
        return pair_perplexity(model, self._valid)


def make_task(
    config: ConfigDict, workdir: Path, model: LanguageModel, tokenizer: Tokenizer | TokenizerPair, devices: int
) -> LanguageModelling | Translation:
    """The task for this data and model; raises an InputError if one is for text and the other for pairs."""
    pairs, translates = is_pairs(config.data.source), bool(model.config.encoder_layers)
    if pairs != translates:
        kinds = ("text", "pairs"), ("a language model", "a translation model")
        raise InputError(
            f"config.data.source={config.data.source!r} is {kinds[0][pairs]}, but the model is {kinds[1][translates]}: "
            f"it needs {kinds[0][translates]}"
        )
    return (Translation if pairs else LanguageModelling)(config, workdir, model, tokenizer, devices)


def learn_tokenizer(config: ConfigDict, workdir: Path) -> Tokenizer | TokenizerPair:
    """Trains the tokenizer of a randomly initialised model on the training data."""
    data, folder = config.data, prepared_folder(config, workdir)
    (source, split), _ = splits(config)
    if not is_pairs(source):
        return prepare_tokenizer(folder, source, split, data.tokenizer, data.vocab_size)
    sizes = data.vocab_size, data.source_vocab_size
    return prepare_tokenizers(folder, source, split, data.tokenizer, *sizes, data.joint_tokenizer)


def corpora(config: ConfigDict, workdir: Path, tokenizer: Tokenizer) -> tuple[Corpus, Corpus]:
    """(training corpus, validation corpus), from data.source or generated by the teacher."""
    train, valid = splits(config)
    folder = prepared_folder(config, workdir)
    if not config.teacher.writes:
        return prepare_tokens(folder, *train, tokenizer), prepare_tokens(folder, *valid, tokenizer)
    tokens, ends = written_tokens(config, workdir, tokenizer)
    if config.data.valid:
        return (tokens, ends), prepare_tokens(folder, *valid, tokenizer)
    count = len(ends) * TRAINING_SHARE[0] // TRAINING_SHARE[1]
    bound = ends[count - 1]
    return (tokens[:bound], ends[:count]), (tokens[bound:], ends[count:] - bound)


def prepared_folder(config: ConfigDict, workdir: Path) -> Path:
    """Where tokenizers and token ids are kept."""
    return Path(config.prepared) if config.prepared else workdir


def splits(config: ConfigDict) -> tuple[tuple[str, str], tuple[str, str]]:
    """(source, split) for training and for validation. With data.valid, all of data.source is for training."""
    data = config.data
    if data.valid:
        return (data.source, "all"), (data.valid, "all")
    return (data.source, "train"), (data.source, "valid")
