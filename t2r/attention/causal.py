"""Causal attention over all pairs, in blocks of queries, so that few of the masked pairs are computed."""

import itertools

from jaxtyping import Array, Float, PRNGKeyArray

from t2r.dropout import dropout


def query_blocks(length: int, min_length: int = 128, max_blocks: int = 4) -> list[tuple[int, int]]:
    """(first, last) bounds of blocks of queries. Each block needs keys up to `last`: 4 blocks take 5/8 of all pairs."""
    count = min(max_blocks, max(length // min_length, 1))
    bounds = [round(i * length / count) for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def drop_weights(
    weights: Float[Array, "b g n r m"], rate: float, key: PRNGKeyArray | None, *, first: int, length: int | None
) -> Float[Array, "b g n r m"]:
    """Dropout on the attention weights of a block of queries that begins at query `first`, n queries by m keys.

    With the `length` of the whole sequence, the result does not depend on how queries are cut into blocks.
    """
    if length is None:
        return dropout(weights, rate, key)
    batch, groups, _, per_group, _ = weights.shape
    return dropout(weights, rate, key, within=(batch, groups, length, per_group, length), first=(0, 0, first, 0, 0))
