"""Attention over all pairs of query and key, no pair of which reaches memory; with dropout (Pallas: Triton, GPU).

The same function as `softmax.causal_attend` or `linear.quadratic`: with w = exp(scale · q·k) or w = φ(q)·φ(k), the
output is Σ drop(w) v / D, where D = Σ w, or its normalizer. Backwards the weights are computed again, and those that
were dropped are known again: from a hash of their place.

Arrays are (b, n, g, r, size) here, keys and values with r = 1; a program sees (rows, size) of each.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, PRNGKeyArray

from t2r.batch import pad_length
from t2r.dropout import hashed, seeds_of, threshold
from t2r.kernels.blocks import dot, on_each_device, past
from t2r.normalizer import Normalizer

BLOCK, WARPS, STAGES = 64, 4, 2
LOWEST = -1e30


def attention(
    q: Float[Array, "b n g r k"],
    k: Float[Array, "b n g k"],
    v: Float[Array, "b n g d"],
    *,
    scale: float = 1.0,
    normalizer: Normalizer | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
    interpret: bool = False,
    block: int = BLOCK,
) -> Float[Array, "b n g r d"]:
    """Causal attention; softmax if there is no normalizer."""
    length = v.shape[1]
    rate = dropout if key is not None else 0.0
    seeds = jnp.zeros(2, jnp.uint32) if key is None else jnp.stack(seeds_of(key))
    whole, groups = -(-length // block) * block, v.shape[2]

    def run(q: Array, k: Array, v: Array, seeds: Array, *, first: tuple) -> Array:
        rule = _Rule(scale, normalizer, rate, length, groups, q.shape[2:4], block, interpret)
        chance = jnp.concatenate([seeds, jnp.stack([jnp.uint32(number) for number in first])])
        q, k, v = (pad_length(x.astype(v.dtype), whole) for x in (q, k[:, :, :, None], v[:, :, :, None]))
        return _attention(q, k, v, chance, rule)[:, :length]

    return on_each_device(run, q, k, v, seeds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: Array, k: Array, v: Array, seeds: Array, rule: "_Rule") -> Array:
    return _forward(q, k, v, seeds, rule)[0]


def _forward(q: Array, k: Array, v: Array, seeds: Array, rule: "_Rule") -> tuple[Array, tuple]:
    shapes = _like(q, v.shape[-1], v.dtype), _like(q, 1, jnp.float32)
    out, total = rule.call(_outputs, (q,), (k, v), seeds, shapes)
    return out, (q, k, v, seeds, out, total)


def _backward(rule: "_Rule", kept: tuple, d_out: Array) -> tuple:
    q, k, v, seeds, out, total = kept
    d_out = d_out.astype(out.dtype)
    shapes = _like(q, q.shape[-1], q.dtype), _like(q, 1, jnp.float32)
    dq, mean = rule.call(_query_gradients, (q, out, total, d_out), (k, v), seeds, shapes)
    shapes = _like(q, k.shape[-1], k.dtype), _like(q, v.shape[-1], v.dtype)
    dk, dv = rule.call(_key_gradients, (k, v), (q, total, mean, d_out), seeds, shapes)
    return dq, dk.sum(3, keepdims=True), dv.sum(3, keepdims=True), None  # a group's queries share keys and values


_attention.defvjp(_forward, _backward)


def _like(q: Array, size: int, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*q.shape[:-1], size), dtype)


# The kernels: a program has one block of rows of the first arrays, and walks through blocks of the others.


def _outputs(rule: "_Rule", q, k, v, seeds, out, total) -> None:
    here, a = rule.here(), q[...]

    def step(there, found):
        top, below, above = found
        scores = rule.scores(a, k[there.rows], here, there)
        if rule.normalizer is None:
            highest = jnp.maximum(top, scores.max(1, keepdims=True))
            shrink, weights = jnp.exp(top - highest), jnp.exp(scores - highest)
            top, below, above = highest, below * shrink, above * shrink
        else:
            weights = scores
        below += weights.sum(1, keepdims=True)
        above += dot(rule.drop(weights, here, there, seeds).astype(v.dtype), v[there.rows])
        return top, below, above

    rows = a.shape[0]
    found = jnp.full((rows, 1), LOWEST), jnp.zeros((rows, 1)), jnp.zeros((rows, v.shape[-1]))
    top, below, above = rule.before(here, step, found)
    if rule.normalizer is None:
        out[...], total[...] = (above / below).astype(out.dtype), top + jnp.log(below)
    else:
        out[...], total[...] = (above / rule.normalizer(below)).astype(out.dtype), below


def _query_gradients(rule: "_Rule", q, out, total, d_out, k, v, seeds, dq, mean) -> None:
    here, a, upstream, below = rule.here(), q[...], d_out[...], total[...]
    average = (upstream.astype(jnp.float32) * out[...].astype(jnp.float32)).sum(1, keepdims=True)

    def step(there, found):
        b = k[there.rows]
        weights = rule.weights(rule.scores(a, b, here, there), below)
        gradient = rule.drop(dot(upstream, v[there.rows], 1, 1), here, there, seeds)
        return found + dot(rule.score_gradient(weights, gradient, average, below, here, there).astype(b.dtype), b)

    dq[...] = (rule.scale * rule.before(here, step, jnp.zeros(a.shape, jnp.float32))).astype(dq.dtype)
    mean[...] = average


def _key_gradients(rule: "_Rule", k, v, q, total, mean, d_out, seeds, dk, dv) -> None:
    here, b, c = rule.here(), k[...], v[...]

    def step(there, found):
        dk, dv = found
        a, upstream, below = q[there.rows], d_out[there.rows], total[there.rows]
        weights = rule.weights(rule.scores(a, b, there, here), below)
        dv += dot(rule.drop(weights, there, here, seeds).astype(c.dtype), upstream, 0, 0)
        gradient = rule.drop(dot(upstream, c, 1, 1), there, here, seeds)
        gradient = rule.score_gradient(weights, gradient, mean[there.rows], below, there, here)
        return dk + dot(gradient.astype(a.dtype), a, 0, 0), dv

    zero = jnp.zeros(b.shape, jnp.float32), jnp.zeros(c.shape, jnp.float32)
    of_k, of_v = rule.after(here, step, zero)
    dk[...], dv[...] = (rule.scale * of_k).astype(dk.dtype), of_v.astype(dv.dtype)


class _Block(NamedTuple):
    """A block of rows of one head: which of the heads, which rows, and how to cut them out."""

    text: Array
    group: Array
    head: Array  # within the group
    number: Array
    first: Array
    rows: tuple


class _Rule(NamedTuple):
    """How scores become weights, and how kernels are laid over a batch."""

    scale: float
    normalizer: Normalizer | None  # None: softmax
    rate: float
    length: int
    groups: int  # of all devices
    heads: tuple[int, int]  # groups and heads in each, here
    size: int
    interpret: bool

    def scores(self, a: Array, b: Array, queries: _Block, keys: _Block) -> Array:
        found = dot(a, b, 1, 1) * self.scale
        nothing = LOWEST if self.normalizer is None else 0.0
        return jnp.where(past(found.shape, queries.first, keys.first), found, nothing)

    def weights(self, scores: Array, total: Array) -> Array:
        """Normalised, from what the forward pass has left: log D of softmax, Σ w of others."""
        return jnp.exp(scores - total) if self.normalizer is None else scores / self.normalizer(total)

    def score_gradient(self, weights: Array, gradient: Array, mean: Array, total: Array, queries, keys) -> Array:
        """Of the scores before scaling, from that of normalised weights; `mean` is Σ weight · gradient of a query."""
        if self.normalizer is None:
            return weights * (gradient - mean)
        if self.normalizer.clamp:
            mean = jnp.where(total > self.normalizer.value, mean, 0.0)
        found = (gradient - mean) / self.normalizer(total)
        return jnp.where(past(found.shape, queries.first, keys.first), found, 0.0)

    def drop(self, weights: Array, queries: _Block, keys: _Block, seeds) -> Array:
        if not self.rate:
            return weights
        row, column = (jax.lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (0, 1))
        first_text, first_group = seeds[2].astype(jnp.int32), seeds[3].astype(jnp.int32)
        group = (first_text + queries.text) * self.groups + first_group + queries.group
        place = (group * self.length + queries.first + row) * self.heads[1] + queries.head
        bits = hashed((place * self.length + keys.first + column).astype(jnp.uint32), seeds[0], seeds[1])
        return jnp.where(bits >= threshold(self.rate), weights * (1 / (1 - self.rate)), 0.0)  # divisions are slow

    def here(self) -> _Block:
        """The block that is this program's."""
        text, number, group, head = (pl.program_id(axis) for axis in range(4))
        return self._block((text, group, head), number)

    def _block(self, head: tuple[Array, Array, Array], number: Array) -> _Block:
        first = number * self.size
        return _Block(*head, number, first, (pl.ds(first, self.size), slice(None)))

    def before(self, here: _Block, step: Callable, found):
        """Walks through the blocks of keys up to a block of queries."""
        return jax.lax.fori_loop(0, here.number + 1, self._at(here, step), found)

    def after(self, here: _Block, step: Callable, found):
        """Walks through the blocks of queries from a block of keys on."""
        return jax.lax.fori_loop(here.number, -(-self.length // self.size), self._at(here, step), found)

    def _at(self, here: _Block, step: Callable) -> Callable:
        return lambda number, found: step(self._block(here[:3], number), found)

    def call(self, kernel: Callable, cut: tuple, whole: tuple, seeds: Array, outputs: tuple) -> Sequence[Array]:
        """Runs a kernel that sees one block of `cut`, all of `whole`, and writes one block of `outputs`."""
        batch, length = outputs[0].shape[:2]
        specs = [self._spec(x.shape, self.size) for x in cut] + [self._spec(x.shape, length) for x in whole]
        return pl.pallas_call(
            functools.partial(kernel, self),
            grid=(batch, length // self.size, *self.heads),
            in_specs=[*specs, pl.BlockSpec((4,), lambda b, n, g, r: (0,))],
            out_specs=[self._spec(x.shape, self.size) for x in outputs],
            out_shape=list(outputs),
            interpret=self.interpret,
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        )(*cut, *whole, seeds)

    def _spec(self, shape: tuple[int, ...], rows: int) -> pl.BlockSpec:
        is_cut = rows != shape[1] or shape[1] == self.size

        def place(b, n, g, r):
            return b, n if is_cut else 0, g, r if shape[3] > 1 else 0, 0

        return pl.BlockSpec((None, rows, None, None, shape[4]), place)
