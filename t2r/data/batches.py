"""Tokens → batches: blocks of contiguous tokens, shuffled anew each epoch, from an iterator that can be saved."""

import os
import zlib
from pathlib import Path

import grain
import numpy as np

from t2r.data.sources import load_documents
from t2r.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from t2r.errors import InputError


class Blocks:
    """Blocks of `length` tokens and their successors, ignoring document boundaries; a last partial one is left out."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)


def training_batches(tokens: np.ndarray, *, length: int, batch: int, seed: int) -> grain.DatasetIterator:
    """An endless iterator of (batch, length + 1) tokens; its get_state and set_state make it resumable."""
    blocks = Blocks(tokens, length)
    if len(blocks) < batch:
        raise InputError(
            f"{len(tokens):,} training tokens make {len(blocks)} blocks of data.length={length}, fewer than "
            f"data.batch={batch}: lower one of them or give more text"
        )
    dataset = grain.MapDataset.source(blocks).seed(seed).shuffle().repeat()
    # No prefetch threads: a block is a slice of memory, and the state stays a plain count.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)).batch(batch))


def prepare_tokenizer(workdir: Path, spec: str, split: str, kind: str, vocab_size: int) -> Tokenizer:
    """Learns a tokenizer from a split, once per work directory and request."""
    request = zlib.crc32(f"{spec} {split} {kind} {vocab_size}".encode())
    folder = workdir / f"tokenizer-{request:08x}"
    if not folder.exists():
        tokenizer = train_tokenizer(kind, "\n".join(load_documents(spec, split)), vocab_size)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True)
        tokenizer.save(unfinished)
        unfinished.rename(folder)
    return load_tokenizer(folder)


def tokenize(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Documents as one array of ids, each with its end."""
    return np.concatenate([np.asarray(tokenizer.encode_document(text), np.int32) for text in documents])
