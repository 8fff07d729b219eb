"""Pairs → batches of a fixed number of tokens, in a few shapes, so that each shape is compiled once."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from t2r.errors import InputError
from t2r.model.loss import Batch, pad_rows


class Encoded(NamedTuple):
    """A pair as token ids: the source with its end, the target between ends."""

    source: list[int]
    target: list[int]

    @property
    def length(self) -> int:
        """Tokens of the longer side; the target's first is only what decoding starts from."""
        return max(len(self.source), len(self.target) - 1)


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


def stack(pairs: Sequence[Encoded], rows: int, width: int) -> Batch:
    """`rows` rows of `width` tokens; missing pairs are rows of padding."""
    sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
    return Batch(pad_rows(targets, rows, width + 1), pad_rows(sources, rows, width))


class Buckets:
    """Pairs in batches of about `tokens` padded tokens a side, each of pairs of like length; all pairs each epoch."""

    def __init__(self, pairs: Sequence[Encoded], *, tokens: int, count: int = 8, multiple: int = 1, seed: int = 0):
        if not pairs:
            raise InputError("no pairs to make batches of")
        self._pairs, self._seed = pairs, seed
        lengths = np.array([pair.length for pair in pairs])
        self.bounds = choose_bounds(lengths, count)
        # Rows divide among `multiple` devices.
        self.rows = [max(tokens // bound // multiple, 1) * multiple for bound in self.bounds]
        of = np.searchsorted(self.bounds, lengths)
        self._members = [np.flatnonzero(of == bucket) for bucket in range(len(self.bounds))]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return sum(-(-len(members) // rows) for members, rows in zip(self._members, self.rows))

    @property
    def padding(self) -> float:
        """The share of all places in an epoch's batches, both sides, that hold no token."""
        places = sum(-(-len(m) // rows) * rows * 2 * b for m, rows, b in zip(self._members, self.rows, self.bounds))
        return 1 - sum(len(pair.source) + len(pair.target) - 1 for pair in self._pairs) / places

    @functools.lru_cache(maxsize=2)  # noqa: B019 - lives as long as the run
    def epoch(self, number: int) -> list[tuple[int, np.ndarray]]:
        """An epoch's batches, (bucket, pairs), in an order that depends on the seed and the number alone."""
        chance = np.random.default_rng([self._seed, number])
        batches = []
        for bucket, (members, rows) in enumerate(zip(self._members, self.rows)):
            order = chance.permutation(members)
            batches += [(bucket, order[first : first + rows]) for first in range(0, len(order), rows)]
        return [batches[i] for i in chance.permutation(len(batches))]

    def batch(self, index: int) -> Batch:
        """Batch `index`, counted over all epochs."""
        epoch, place = divmod(index, len(self))
        bucket, chosen = self.epoch(epoch)[place]
        return stack([self._pairs[i] for i in chosen], self.rows[bucket], self.bounds[bucket])

    def training_batches(self, parts: int) -> grain.DatasetIterator:
        """An endless iterator of lists of `parts` batches; its get_state and set_state make it resumable."""
        endless = grain.MapDataset.range(2**40).map(self.batch)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(endless.to_iter_dataset(options).batch(parts, batch_fn=list))
