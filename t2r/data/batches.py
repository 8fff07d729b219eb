"""Text → batches: blocks of contiguous tokens, shuffled anew each epoch, from an iterator that can be saved."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import grain
import numpy as np

from t2r.data.pairs import load_pairs
from t2r.data.sources import load_documents
from t2r.data.tokenizer import Tokenizer, TokenizerPair, load_tokenizer, train_tokenizer
from t2r.errors import InputError
from t2r.model.loss import Batch


class Blocks:
    """Blocks of `length` tokens and their successors, ignoring document boundaries; a last partial one is left out."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)


def training_batches(
    tokens: np.ndarray, *, length: int, batch: int, seed: int, parts: int = 1
) -> grain.DatasetIterator:
    """An endless iterator of lists of `parts` batches, together `batch` blocks; get_state and set_state resume it."""
    blocks = Blocks(tokens, length)
    if len(blocks) < batch:
        raise InputError(
            f"{len(tokens):,} training tokens make {len(blocks)} blocks of data.length={length}, fewer than "
            f"data.batch={batch}: lower one of them or give more text"
        )
    dataset = grain.MapDataset.source(blocks).seed(seed).shuffle().repeat()
    # No prefetch threads: a block is a slice of memory, and the state stays a plain count.
    blocks_in_order = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return iter(blocks_in_order.batch(batch // parts).batch(parts, batch_fn=lambda found: [Batch(x) for x in found]))


def prepare_tokenizer(workdir: Path, spec: str, split: str, kind: str, vocab_size: int) -> Tokenizer:
    """Learns a tokenizer from a split, once per work directory and request."""
    request = f"{spec} {split} {kind} {vocab_size}"
    return _once(workdir, request, lambda: train_tokenizer(kind, "\n".join(load_documents(spec, split)), vocab_size))


def prepare_pair(
    workdir: Path, spec: str, split: str, kind: str, vocab_size: int, source_vocab_size: int, joint: bool
) -> TokenizerPair:
    """Learns the tokenizers of a translation model likewise: one from both sides, or one from each."""

    def learn(side: str, size: int) -> Tokenizer:
        def train() -> Tokenizer:
            pairs = load_pairs(spec, split)
            sides = {"source": [0], "target": [1], "joint": [0, 1]}[side]
            text = "\n".join(pair[which] for pair in pairs for which in sides)
            return train_tokenizer(kind, text, size, sentences=True)

        return _once(workdir, f"{spec} {split} {kind} {size} {side}", train)

    if joint:
        both = learn("joint", vocab_size)
        return TokenizerPair(both, both)
    return TokenizerPair(learn("source", source_vocab_size or vocab_size), learn("target", vocab_size))


def _once(workdir: Path, request: str, learn: Callable[[], Tokenizer]) -> Tokenizer:
    folder = workdir / f"tokenizer-{zlib.crc32(request.encode()):08x}"
    if not folder.exists():
        tokenizer = learn()
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True)
        tokenizer.save(unfinished)
        unfinished.rename(folder)
    return load_tokenizer(folder)


def tokenize(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Documents as one array of ids, each with its end."""
    return np.concatenate([np.asarray(tokenizer.encode_document(text), np.int32) for text in documents])
