"""Tokens → batches: blocks of contiguous tokens, shuffled anew each epoch, from an iterator that can be saved."""

from collections.abc import Callable
from typing import NamedTuple

import grain
import numpy as np

from t2r.errors import InputError
from t2r.model.loss import Batch


class Part(NamedTuple):
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
    numbers = grain.MapDataset.range(len(blocks)).seed(seed).shuffle().repeat()
    # No prefetch threads: these are numbers only, and the state stays a plain count.
    in_order = numbers.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return iter(
        in_order.batch(batch // parts).batch(parts, batch_fn=lambda found: [Part(rows, blocks.read) for rows in found])
    )
