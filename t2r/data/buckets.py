"""Sentence pairs → batches of about equal numbers of tokens, in a few shapes, so that few programs are compiled."""

import functools
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import grain
import numpy as np

from t2r.batch import Batch, pad_sequences
from t2r.data.batches import LazyBatch
from t2r.errors import InputError

_ENDLESS = 2**40  # batches: more than any run takes


class Encoded(NamedTuple):
    """A sentence pair as token ids: the source with its end token, the target with its start and stop tokens."""

    source: Sequence[int]
    target: Sequence[int]


class EncodedPairs:
    """Many encoded pairs in one array: `ids` holds source, target, source, target …; `ends` the index after each.

    Both arrays may be memory-mapped.
    """

    def __init__(self, ids: np.ndarray, ends: np.ndarray):
        self._ids, self._ends = ids, ends
        sizes = np.diff(ends, prepend=0).reshape(-1, 2)
        self.tokens = sizes - [0, 1]  # (pairs, 2): of source and target; the target's start token is not predicted
        self.lengths = self.tokens.max(1)  # tokens of the longer side

    @classmethod
    def of(cls, pairs: Sequence[Encoded]) -> "EncodedPairs":
        sides = [side for pair in pairs for side in pair]
        return cls(np.array([i for side in sides for i in side], np.int32), np.cumsum([len(side) for side in sides]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: SupportsIndex) -> Encoded:
        begin = self._ends[2 * index - 1] if index else 0
        middle, end = self._ends[2 * index : 2 * index + 2]
        return Encoded(self._ids[begin:middle], self._ids[middle:end])


def choose_bounds(lengths: Sequence[int] | np.ndarray, count: int) -> list[int]:
    """At most `count` lengths to pad to, chosen to minimise the total padding by dynamic programming."""
    sizes, counts = np.unique(np.asarray(lengths), return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])  # below[i]: pairs shorter than sizes[i]
    best, choices = sizes * below[1:], []  # best[i]: padded tokens of all pairs up to sizes[i]; at first in one bucket
    for _ in range(min(count, len(sizes)) - 1):
        # cost[i, j]: the best buckets so far up to sizes[j - 1], and one more for sizes[j] to sizes[i]
        previous = np.concatenate([[0], best[:-1]])
        cost = previous[None, :] + sizes[:, None] * (below[1:, None] - below[None, :-1])
        cost = np.where(np.tri(len(sizes), dtype=bool), cost, np.iinfo(np.int64).max)
        choices.append(cost.argmin(1))
        best = cost.min(1)
    bounds, last = [], len(sizes) - 1
    for choice in reversed(choices):
        bounds.append(int(sizes[last]))
        last = choice[last] - 1
        if last < 0:
            return bounds[::-1]
    return [int(sizes[last]), *bounds[::-1]]


class Buckets:
    """Batches of pairs of similar length, with about `tokens` padded tokens per side; every epoch holds every pair.

    `count` is the number of buckets. The number of sequences in a batch is a multiple of `multiple`, the number of
    devices they are sharded over. Pairs are left out if a side has more than `longest` tokens, if a side is empty, or
    if one side has more than `ratio` times the tokens of the other (0: any ratio). The end token counts as a token.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        *,
        tokens: int,
        longest: int | None = None,
        ratio: float = 0.0,
        count: int = 8,
        multiple: int = 1,
        seed: int = 0,
    ):
        self._pairs, self._seed = pairs, seed
        fits = (pairs.lengths <= (longest or np.inf)) & (pairs.tokens.min(1) > 1)
        if ratio:
            fits &= pairs.lengths <= ratio * pairs.tokens.min(1)
        usable = np.flatnonzero(fits)
        if not len(usable):
            raise InputError(
                f"data.length={longest}: of {len(pairs):,} pairs none is that short, with two sides of similar length: "
                "raise data.length or check the data"
            )
        self.left_out = len(pairs) - len(usable)
        self.tokens = pairs.tokens[usable].sum(0)  # (2,): of all sources, of all targets
        self.bounds = choose_bounds(pairs.lengths[usable], count)  # the padded length of each bucket
        # Sequences per batch, of each bucket.
        self.rows = [max(tokens // bound // multiple, 1) * multiple for bound in self.bounds]
        bucket_of = np.searchsorted(self.bounds, pairs.lengths[usable])
        self._members = [usable[bucket_of == bucket] for bucket in range(len(self.bounds))]

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return sum(-(-len(members) // rows) for members, rows in zip(self._members, self.rows))

    @property
    def padding(self) -> float:
        """The fraction of an epoch's padded tokens, both sides together, that is padding."""
        total = sum(-(-len(m) // rows) * rows * 2 * b for m, rows, b in zip(self._members, self.rows, self.bounds))
        return 1 - self.tokens.sum() / total

    @functools.lru_cache(maxsize=2)  # noqa: B019 - the object lives as long as the run
    def epoch(self, number: int) -> list[tuple[int, np.ndarray]]:
        """The batches of epoch `number` as (bucket, indices of pairs), in an order set by the seed and the epoch."""
        rng = np.random.default_rng([self._seed, number])
        batches = []
        for bucket, (members, rows) in enumerate(zip(self._members, self.rows)):
            order = rng.permutation(members)
            batches += [(bucket, order[first : first + rows]) for first in range(0, len(order), rows)]
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, index: int) -> LazyBatch:
        """Batch `index`, counted over all epochs; a bucket's last batch is filled up with sequences of padding."""
        epoch, position = divmod(index, len(self))
        bucket, chosen = self.epoch(epoch)[position]
        rows = np.pad(chosen, (0, self.rows[bucket] - len(chosen)), constant_values=-1)
        return LazyBatch(rows, functools.partial(self._read, self.bounds[bucket]))

    def _read(self, width: int, rows: np.ndarray) -> Batch:
        pairs = [Encoded([], []) if index < 0 else self._pairs[index] for index in rows]
        sources, targets = zip(*pairs)
        return Batch(pad_sequences(targets, len(rows), width + 1), pad_sequences(sources, len(rows), width))

    def training_batches(self, parts: int) -> grain.DatasetIterator:
        """An endless iterator over lists of `parts` batches; `get_state` and `set_state` make it resumable."""
        endless = grain.MapDataset.range(_ENDLESS).map(self.batch)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(endless.to_iter_dataset(options).batch(parts, batch_fn=list))
