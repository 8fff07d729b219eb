"""How quadratic attention over the past is cut, so that little of what causality forbids is computed."""

import itertools

from jaxtyping import Array, Float, PRNGKeyArray

from t2r.dropout import dropout


def query_blocks(length: int, least: int = 128, most: int = 4) -> list[tuple[int, int]]:
    """Bounds of a few blocks of queries; each sees keys up to its end, so that 4 blocks need 5/8 of all pairs."""
    count = min(most, max(length // least, 1))
    bounds = [round(place * length / count) for place in range(count + 1)]
    return list(itertools.pairwise(bounds))


def drop_weights(
    weights: Float[Array, "b g n r m"], rate: float, key: PRNGKeyArray | None, *, first: int, length: int | None
) -> Float[Array, "b g n r m"]:
    """Dropout on the weights of queries from `first` on, in a sequence of `length`: the same in whichever blocks."""
    if length is None:
        return dropout(weights, rate, key)
    batch, groups, _, per_group, _ = weights.shape
    return dropout(weights, rate, key, within=(batch, groups, length, per_group, length), first=(0, 0, first, 0, 0))
