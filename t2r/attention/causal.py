"""How quadratic attention over the past is cut, so that little of what causality forbids is computed."""

import itertools


def query_blocks(length: int, least: int = 128, most: int = 4) -> list[tuple[int, int]]:
    """Bounds of a few blocks of queries; each sees keys up to its end, so that 4 blocks need 5/8 of all pairs."""
    count = min(most, max(length // least, 1))
    bounds = [round(place * length / count) for place in range(count + 1)]
    return list(itertools.pairwise(bounds))
