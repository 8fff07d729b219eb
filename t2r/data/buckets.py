"""Pairs → batches of a fixed number of tokens, in a few shapes, so that each shape is compiled once."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from t2r.batch import Batch, pad_rows
from t2r.data.batches import LazyBatch
from t2r.errors import InputError


class Encoded(NamedTuple):
    """A pair as token ids: the source with its end, the target between ends."""

    source: Sequence[int]
    target: Sequence[int]


class EncodedPairs:
    """Many of them, in one array of ids: sources and targets in turn, and where each ends. Both may lie on disk."""

    def __init__(self, ids: np.ndarray, ends: np.ndarray):
        self._ids, self._ends = ids, ends
        sizes = np.diff(ends, prepend=0).reshape(-1, 2)
        self.tokens = sizes - [0, 1]  # of source and target; the target's first is only what decoding starts from
        self.lengths = self.tokens.max(1)  # of the longer side

    @classmethod
    def of(cls, pairs: Sequence[Encoded]) -> "EncodedPairs":
        sides = [side for pair in pairs for side in pair]
        return cls(np.array([i for side in sides for i in side], np.int32), np.cumsum([len(side) for side in sides]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Encoded:
        begin = self._ends[2 * index - 1] if index else 0
        middle, end = self._ends[2 * index : 2 * index + 2]
        return Encoded(self._ids[begin:middle], self._ids[middle:end])


def choose_bounds(lengths: Sequence[int], count: int) -> list[int]:
    """At most `count` lengths to pad to, such that all padding together is as little as it can be."""
    sizes, numbers = np.unique(np.asarray(lengths), return_counts=True)
    below = np.concatenate([[0], np.cumsum(numbers)])  # pairs shorter than sizes[i]
    best, choices = sizes * below[1:], []  # tokens of all pairs up to sizes[i], in one bucket
    for _ in range(min(count, len(sizes)) - 1):
        # cost[i, j]: buckets as before up to sizes[j - 1], one more from sizes[j] to sizes[i]
        before = np.concatenate([[0], best[:-1]])
        cost = before[None, :] + sizes[:, None] * (below[1:, None] - below[None, :-1])
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
    """Pairs in batches of about `tokens` padded tokens a side, each of pairs of like length; all pairs each epoch.

    Left out are pairs of more than `longest` tokens, those with an empty side, and those of which one side has more
    than `ratio` times the tokens of the other; each side's end counts as one.
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
        kept = np.flatnonzero(fits)
        if not len(kept):
            raise InputError(f"data.length={longest}: of {len(pairs):,} pairs none is that short")
        self.left_out = len(pairs) - len(kept)
        self.tokens = pairs.tokens[kept].sum(0)  # of sources and targets
        self.bounds = choose_bounds(pairs.lengths[kept], count)
        # Rows divide among `multiple` devices.
        self.rows = [max(tokens // bound // multiple, 1) * multiple for bound in self.bounds]
        of = np.searchsorted(self.bounds, pairs.lengths[kept])
        self._members = [kept[of == bucket] for bucket in range(len(self.bounds))]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return sum(-(-len(members) // rows) for members, rows in zip(self._members, self.rows))

    @property
    def padding(self) -> float:
        """The share of all places in an epoch's batches, both sides, that hold no token."""
        places = sum(-(-len(m) // rows) * rows * 2 * b for m, rows, b in zip(self._members, self.rows, self.bounds))
        return 1 - self.tokens.sum() / places

    @functools.lru_cache(maxsize=2)  # noqa: B019 - lives as long as the run
    def epoch(self, number: int) -> list[tuple[int, np.ndarray]]:
        """An epoch's batches, (bucket, pairs), in an order that depends on the seed and the number alone."""
        chance = np.random.default_rng([self._seed, number])
        batches = []
        for bucket, (members, rows) in enumerate(zip(self._members, self.rows)):
            order = chance.permutation(members)
            batches += [(bucket, order[first : first + rows]) for first in range(0, len(order), rows)]
        return [batches[i] for i in chance.permutation(len(batches))]

    def batch(self, index: int) -> LazyBatch:
        """Batch `index`, counted over all epochs; missing pairs of a last one are rows of padding."""
        epoch, place = divmod(index, len(self))
        bucket, chosen = self.epoch(epoch)[place]
        rows = np.pad(chosen, (0, self.rows[bucket] - len(chosen)), constant_values=-1)
        return LazyBatch(rows, functools.partial(self._read, self.bounds[bucket]))

    def _read(self, width: int, rows: np.ndarray) -> Batch:
        pairs = [Encoded([], []) if number < 0 else self._pairs[number] for number in rows]
        sources, targets = zip(*pairs)
        return Batch(pad_rows(targets, len(rows), width + 1), pad_rows(sources, len(rows), width))

    def training_batches(self, parts: int) -> grain.DatasetIterator:
        """An endless iterator of lists of `parts` batches; its get_state and set_state make it resumable."""
        endless = grain.MapDataset.range(2**40).map(self.batch)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(endless.to_iter_dataset(options).batch(parts, batch_fn=list))
