"""Training batches for language models: blocks of contiguous tokens, or single documents, reshuffled every epoch.

The iterator's state can be saved and restored.
"""

from collections.abc import Callable
from typing import NamedTuple, SupportsIndex

import grain
import numpy as np

from t2r.batch import PADDING, Batch, pad_sequences
from t2r.errors import InputError


class LazyBatch(NamedTuple):
    """A batch that is not loaded yet: the indices of its examples (-1: a sequence of padding), and how to load them.

    All processes of a run iterate over the same batches, so one saved iterator state serves all of them. Each process
    loads only the examples that its devices need.
    """

    rows: np.ndarray
    read: Callable[[np.ndarray], Batch]

    def whole(self) -> Batch:
        """Loads all of its examples."""
        return self.read(self.rows)


class Blocks:
    """Consecutive blocks of `length` inputs and their next tokens, so `length` + 1 tokens each.

    Blocks cross document boundaries. A last, shorter block is dropped.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)

    def read(self, indices: np.ndarray) -> Batch:
        """The batch of the blocks with these indices."""
        return Batch(np.stack([self[index] for index in indices]))


class Documents:
    """Sequences of at most `length` inputs and their next tokens, each from one document.

    `tokens` holds all documents, `ends` the index after each one's last token. A document is preceded by the token
    `start`; a longer one is cut into pieces, each of which is preceded by the last token of the piece before it.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, length: int, start: int):
        self._tokens, self._length, self._start = tokens, length, start
        begins = np.concatenate([[0], ends[:-1]])
        pieces = -(-(ends - begins) // length)  # of each document
        piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # its index in the document
        self._first = np.repeat(begins, pieces) + piece * length
        self._last = np.minimum(self._first + length, np.repeat(ends, pieces))
        self._opens = piece == 0

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        first, last = self._first[index], self._last[index]
        previous = self._start if self._opens[index] else self._tokens[first - 1]
        return np.append(previous, self._tokens[first:last]).astype(np.int32)

    def read(self, indices: np.ndarray) -> Batch:
        """The batch of the pieces with these indices, padded at the end."""
        return Batch(pad_sequences([self[index] for index in indices], len(indices), self._length + 1))


class Repeating:
    """The same sequences, in a share of which the beginning repeats to the end, so that recall stays trained.

    Which sequences repeat, and how long their beginnings are, follows from their indices alone.
    """

    def __init__(self, sequences: Blocks | Documents, share: float, seed: int):
        self._sequences, self._share, self._seed = sequences, share, seed

    def __len__(self) -> int:
        return len(self._sequences)

    def read(self, indices: np.ndarray) -> Batch:
        """The batch of the sequences with these indices."""
        tokens = self._sequences.read(indices).tokens
        for index, row in zip(indices, tokens):
            random = np.random.default_rng((self._seed, index))
            text = row[1 : np.count_nonzero(row != PADDING)]  # without the first token, which may be a document's start
            if random.random() < self._share and len(text) >= 4:
                # From an eighth to a half of the sequence: a part is repeated from seven times to once.
                period = random.integers(max(len(text) // 8, 2), len(text) // 2, endpoint=True)
                text[:] = np.resize(text[:period], len(text))
        return Batch(tokens)


def training_batches(
    examples: Blocks | Documents | Repeating, *, batch: int, seed: int, parts: int = 1
) -> grain.DatasetIterator:
    """An endless iterator over lists of `parts` micro-batches that have `batch` sequences in total.

    `get_state` and `set_state` save and restore its position.
    """
    if len(examples) < batch:
        raise InputError(
            f"the training data makes {len(examples)} sequences of data.length, fewer than data.batch={batch}: lower "
            "one of them or add more text"
        )
    read, indices = examples.read, grain.MapDataset.range(len(examples)).seed(seed).shuffle().repeat()
    # No prefetch threads: the elements are only indices, and the iterator state stays a plain count.
    stream = indices.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return iter(
        stream.batch(batch // parts).batch(parts, batch_fn=lambda batches: [LazyBatch(rows, read) for rows in batches])
    )
