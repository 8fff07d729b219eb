"""Softmax attention against JAX's own; with a cache and in blocks against whole sequences."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import error
from t2r.attention import softmax
from t2r.attention.softmax import BeamCache, KVCache


def inputs(batch=2, n=11, g=2, r=3, d=8):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, n, g, r, d))
    k, v = (jax.random.normal(key, (batch, n, g, d)) for key in keys[1:])
    return q, k, v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 4, 11])  # 3 heads share keys: with 11 queries they are not few
def test_attend_is_jax_dot_product_attention(queries, masked):
    q, k, v = inputs()
    q = q[:, -queries:]
    mask = jnp.ones((2, 11), bool).at[0, 3:6].set(False) if masked else None
    allowed = softmax.causal_mask(11, mask)[:, -queries:]
    out = softmax.attend(q, softmax.heads_first(k), softmax.heads_first(v), allowed, 8**-0.5)
    flat_q = q.reshape(2, queries, 6, 8)
    expected = jax.nn.dot_product_attention(flat_q, k, v, mask=allowed[:, None], scale=8**-0.5)
    assert error(out.reshape(2, queries, 6, 8), expected) < 1e-5


def test_attention_over_the_cache_is_attention_over_the_whole_sequence():
    q, k, v = inputs()
    expected = softmax.attend(q, softmax.heads_first(k), softmax.heads_first(v), softmax.causal_mask(11), 0.3)
    cache, pieces = KVCache.zeros(2, 13, 2, 8, jnp.float32), []
    for low, high in [(0, 4), (4, 5), (5, 11)]:
        cache = softmax.append(cache, k[:, low:high], v[:, low:high])
        allowed = softmax.cached_mask(cache, high - low)
        pieces.append(softmax.attend(q[:, low:high], cache.k, cache.v, allowed, 0.3))
    assert error(jnp.concatenate(pieces, 1), expected) < 1e-6


def test_one_sequence_writes_its_cache_as_several_do():
    """In value and gradient: on CPUs the write is another program."""
    q, k, v = inputs(n=5)

    def outs(k, v):
        cache, pieces = KVCache.zeros(len(k), 7, 2, 8, jnp.float32), []
        for low, high in [(0, 3), (3, 4), (4, 5)]:
            cache = softmax.append(cache, k[:, low:high], v[:, low:high])
            pieces.append(softmax.attend_cache(q[: len(k), low:high], cache, 0.3))
        return jnp.concatenate(pieces, 1)

    assert error(outs(k[:1], v[:1]), outs(k, v)[:1]) < 1e-6
    gradient = jax.grad(lambda k, v: jnp.sum(outs(k, v)[0] ** 2), (0, 1))
    for one, several in zip(gradient(k[:1], v[:1]), gradient(k, v)):
        assert error(one, several[:1]) < 1e-5


@pytest.mark.parametrize("batch", [1, 2])
def test_a_loop_of_decoding_steps_copies_no_cache(batch):
    """XLA's CPU compiler would copy the cache of one sequence four times a step: see `softmax.append`."""
    q, k, v = inputs(batch, n=1)

    def step(carry, _):
        x, cache = carry
        cache = softmax.append(cache, k + x.mean(), v)
        return (softmax.attend_cache(x, cache, 0.3), cache), None

    loop = jax.jit(lambda x, cache: jax.lax.scan(step, (x, cache), length=8)[0], donate_argnums=1)
    compiled = loop.lower(q, KVCache.zeros(batch, 96, 2, 8, jnp.float32)).compile().as_text()
    shape = rf"f32\[{batch},2,96,8\]\S*"
    assert re.search(shape, compiled) and not re.search(rf"= {shape} copy\(", compiled)


@pytest.mark.parametrize("window", [0, 3])
def test_each_sequence_may_have_its_own_place_in_the_cache(window):
    """Also with padding behind the tokens, which the next ones overwrite, and which is dropped at the cache's end."""
    q, k, v = inputs()
    allowed = softmax.causal_mask(11, window=window)
    expected = softmax.attend(q, softmax.heads_first(k), softmax.heads_first(v), allowed, 0.3)
    cache = KVCache.zeros(2, 11, 2, 8, jnp.float32)._replace(index=jnp.zeros(2, jnp.int32))
    for counts in ([5, 1], [0, 4], [5, 5], [1, 1]):
        starts, counts = cache.index, jnp.array(counts)
        take = lambda x, starts=starts: jnp.stack([jnp.roll(row, -start, 0)[:5] for row, start in zip(x, starts)])  # noqa: E731
        mask = jnp.arange(5) < counts[:, None]
        cache = softmax.append(cache, take(k), take(v), mask)
        out = softmax.attend(take(q), cache.k, cache.v, softmax.cached_mask(cache, 5, window), 0.3)
        assert error(out[mask], take(expected)[mask]) < 1e-5
        cache = cache._replace(index=starts + counts)
    assert cache.index.tolist() == [11, 11]


@pytest.mark.parametrize("own_places", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_a_long_cache_is_read_in_blocks(window, own_places, monkeypatch):
    """Only those that are written, with padding among the tokens, and a last block that overlaps the one before."""
    q, k, v = inputs()
    mask = jnp.ones((2, 11), bool).at[0, 2:5].set(False).at[1, 0].set(False)
    cache = KVCache.zeros(2, 19, 2, 8, jnp.float32)
    for low, high in [(0, 6), (6, 11)]:
        cache = softmax.append(cache, k[:, low:high], v[:, low:high], mask[:, low:high])
        cache = cache._replace(index=jnp.full(2, high)) if own_places else cache
        at_once = jax.jit(lambda q, cache: softmax.attend_cache(q, cache, 0.3, window=window))(q[:, low:high], cache)
        with monkeypatch.context() as patched:
            patched.setattr(softmax, "CACHE_BLOCKS", (4, 4))
            in_blocks = jax.jit(lambda q, cache: softmax.attend_cache(q, cache, 0.3, window=window))
            assert " while(" in in_blocks.lower(q[:, low:high], cache).compile().as_text()
            assert error(in_blocks(q[:, low:high], cache)[mask[:, low:high]], at_once[mask[:, low:high]]) < 1e-5
    full = cache._replace(index=jnp.full_like(cache.index, 19), valid=jnp.ones((2, 19), bool))
    at_once = softmax.attend_cache(q, full, 0.3)
    monkeypatch.setattr(softmax, "CACHE_BLOCKS", (4, 4))
    assert error(softmax.attend_cache(q, full, 0.3), at_once) < 1e-5


def test_logits_of_a_block_are_few_however_many_queries_there_are():
    sizes = [softmax._block_size(queries) for queries in (9 * 256, 9 * 4096, 32 * 4096, 16 * 32 * 1024, 2**30)]
    assert sizes == [2048, 1024, 512, 256, 256]


def test_room_for_more_tokens_does_not_change_attention():
    q, k, v = inputs()
    cache = softmax.append(KVCache.zeros(2, 11, 2, 8, jnp.float32), k, v)
    expected = softmax.attend(q, cache.k, cache.v, softmax.cached_mask(cache, 11), 0.3)
    for steps in (20, 11):
        cache = softmax.resized(cache, steps)
        assert cache.capacity == steps and int(cache.index) == 11
        assert error(softmax.attend(q, cache.k, cache.v, softmax.cached_mask(cache, 11), 0.3), expected) < 1e-6


@pytest.mark.parametrize("window", [0, 3])
def test_beams_that_share_a_cache_are_beams_that_move(window):
    """Two sources with three beams, whose parents are random, against a cache of each beam that is reordered."""
    rng, steps = np.random.default_rng(0), 7
    moved = KVCache.zeros(6, steps, 2, 8, jnp.float32)._replace(index=jnp.zeros(6, jnp.int32))
    shared = BeamCache.like(softmax.resized(moved, 4), 3)
    for step in range(steps):
        q, k, v = (jnp.asarray(rng.standard_normal((6, 1, 2, *r, 8)), jnp.float32) for r in ((2,), (), ()))
        moved = softmax.append(moved, k, v)
        expected = softmax.attend_cache(q, moved, 0.3, window=window)
        shared = softmax.append_beams(softmax.resized(shared, 4 if step < 4 else steps), k, v)
        assert error(softmax.attend_beams(q, shared, 0.3, window), expected) < 1e-6
        parents = jnp.asarray(np.repeat([0, 3], 3) + rng.integers(0, 3, 6))
        moved, shared = jax.tree.map(lambda x: x[parents], moved), shared.reordered(parents)  # noqa: B023
    assert shared.capacity == steps and shared.k.shape == (2, 2, 3 * steps, 8)


def test_a_query_with_all_keys_masked_gives_no_nan():
    q, k, v = inputs(batch=1, n=3)
    allowed = softmax.causal_mask(3, jnp.array([[False, True, True]]))
    function = lambda k: softmax.attend(q, softmax.heads_first(k), softmax.heads_first(v), allowed, 1.0).sum()  # noqa: E731
    assert np.isfinite(function(k)) and np.isfinite(jax.grad(function)(k)).all()


@pytest.mark.parametrize("length", [1, 127, 300, 513])
def test_causal_attention_in_blocks_is_causal_attention(length):
    """With padding, at lengths that are not multiples of the block length."""
    shape = (2, length, 2, 3, 4)
    q, k, v = (jax.random.normal(jax.random.key(i), shape if i == 0 else (2, length, 2, 4)) for i in range(3))
    mask = jnp.arange(length)[None] != jnp.array([[1], [length // 2 + 1]])
    heads = softmax.heads_first
    expected = softmax.attend(q, heads(k), heads(v), softmax.causal_mask(length, mask), 0.5)
    assert error(softmax.causal_attend(q, k, v, 0.5, mask=mask), expected) < 1e-6


@pytest.mark.parametrize("length", [6, 7])
def test_cudnn_is_called_with_even_lengths(length, monkeypatch):
    """Its backward pass needs them. XLA replaces cuDNN in this test, which runs without a GPU."""
    q, k, v = (jax.random.normal(jax.random.key(seed), (2, length, 2, 4)) for seed in range(3))
    expected = softmax.causal_attend(q[:, :, :, None], k, v, 0.5)
    original, calls = jax.nn.dot_product_attention, []

    def without_cudnn(q, k, v, *, implementation, **options):
        calls.extend([implementation, q.shape[1] % 2, k.shape[1] % 2])
        return original(q, k, v, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    assert error(softmax._flash_attention(q[:, :, :, None], k, v, 0.5), expected) < 1e-6
    assert calls == ["cudnn", 0, 0]
