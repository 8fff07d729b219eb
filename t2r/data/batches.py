"""Tokens → batches: blocks of contiguous tokens, or documents, shuffled anew each epoch, from an iterator that can be
saved."""

from collections.abc import Callable
from typing import NamedTuple

import grain
import numpy as np

from t2r.batch import Batch, pad_rows
from t2r.errors import InputError


class LazyBatch(NamedTuple):
    """A batch that is not read yet: which examples are its rows (-1: a row of padding), and how to read some of them.

    All processes of a run go through the same parts, so that one saved place is the place of all; each reads the rows
    that its devices need.
    """

    rows: np.ndarray
    read: Callable[[np.ndarray], Batch]

    def whole(self) -> Batch:
        """All its rows."""
        return self.read(self.rows)


class Blocks:
    """Blocks of `length` tokens and their successors, ignoring document boundaries; a last partial one is left out."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)

    def read(self, numbers: np.ndarray) -> Batch:
        """Some of them."""
        return Batch(np.stack([self[number] for number in numbers]))


class Documents:
    """Rows of at most `length` tokens and their successors that each hold one document, after `start`, or, of one that
    is longer, the next piece."""

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, length: int, start: int):
        self._tokens, self._length, self._start = tokens, length, start
        begins = np.concatenate([[0], ends[:-1]])
        pieces = -(-(ends - begins) // length)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._first = np.repeat(begins, pieces) + within * length
        self._last = np.minimum(self._first + length, np.repeat(ends, pieces))
        self._opens = within == 0

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> np.ndarray:
        first, last = self._first[index], self._last[index]
        before = self._start if self._opens[index] else self._tokens[first - 1]
        return np.append(before, self._tokens[first:last]).astype(np.int32)

    def read(self, numbers: np.ndarray) -> Batch:
        """Some of them, ended by padding."""
        return Batch(pad_rows([self[number] for number in numbers], len(numbers), self._length + 1))


def training_batches(rows: Blocks | Documents, *, batch: int, seed: int, parts: int = 1) -> grain.DatasetIterator:
    """An endless iterator of lists of `parts` batches, together `batch` rows; get_state and set_state resume it."""
    if len(rows) < batch:
        raise InputError(
            f"the training data makes {len(rows)} rows of data.length, fewer than data.batch={batch}: lower one of "
            "them or give more text"
        )
    read, numbers = rows.read, grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()
    # No prefetch threads: these are numbers only, and the state stays a plain count.
    in_order = numbers.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return iter(
        in_order.batch(batch // parts).batch(parts, batch_fn=lambda found: [LazyBatch(rows, read) for rows in found])
    )
