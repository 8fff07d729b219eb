"""The largest numbers, searched in blocks, against a full search."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.model import largest as searches
from t2r.model.largest import BLOCK, largest, largest_of_columns


@pytest.fixture(params=["cpu", "cuda"])
def platform(request, monkeypatch):
    """The search of each platform, on this one."""

    def platform_dependent(*arguments, default, **others):
        return others.get(request.param, default)(*arguments)

    monkeypatch.setattr(searches.jax.lax, "platform_dependent", platform_dependent)


@pytest.mark.parametrize("count", [1, 3, 7, 20])
@pytest.mark.parametrize("size", [4 * BLOCK, 9 * BLOCK - 5, 30, 40 * BLOCK])
def test_the_largest_are_those_of_a_full_search(platform, count, size):
    """With many equal numbers, too: then the first ones."""
    rng = np.random.default_rng(count)
    for x in (rng.standard_normal((5, size)), rng.integers(0, 4, (5, size)), np.full((5, size), -np.inf)):
        x = jnp.asarray(x, jnp.float32)
        searches = [largest(x, count)] + ([] if size % BLOCK else [largest_of_columns(x.T, count)])
        for found in searches:
            for actual, expected in zip(found, jax.lax.top_k(x, count)):
                np.testing.assert_array_equal(actual, expected)
                assert actual.dtype == expected.dtype


def test_numbers_that_are_none_have_indices(platform):
    """A model that is broken must not write tokens that there are not."""
    for size in (30, 15 * BLOCK + 7):
        values, indices = largest(jnp.full((2, size), jnp.nan).at[:, 4].set(1.0), 3)
        np.testing.assert_array_equal(indices, [[0, 1, 2]] * 2)
        assert np.isnan(values).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what the CPU compiler does")
def test_the_compiler_does_not_sort_to_find_the_largest():
    """Sorting the candidates takes almost half as long as the product that they come from."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 4, (64 * BLOCK, 5)), jnp.float32)

    @jax.jit
    def search(x):
        values, index = largest_of_columns(x, 12)
        return values - values[:, :1], index  # a part of the result, too, is what made the compiler sort

    compiled = search.lower(x).compile()
    assert "TopK" in compiled.as_text() and not re.search(r"= \(f32\S* s32\S* sort\(", compiled.as_text())
    np.testing.assert_array_equal(compiled(x)[1], jax.lax.top_k(x.T, 12)[1])
