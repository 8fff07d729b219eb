"""Causal attention over all pairs of query and key, with dropout; no weight reaches memory (Pallas: Triton, GPU).

The same function as `softmax.causal_attend` or `linear.quadratic`. With w = exp(scale · q·k) or w = φ(q)·φ(k), the
output is Σ drop(w) v / D, where D is Σ w for softmax, and normalizer(Σ w) for linear attention. The backward pass
computes the weights again. Whether a weight is dropped is a hash of its position, so both passes drop the same ones.

Arrays are (b, n, g, r, size), keys and values with r = 1; a program sees (tokens, size) of each.
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
from t2r.dropout import dropout_seeds, hash_bits, keep_threshold
from t2r.kernels.blocks import causal_mask, dot, on_each_device
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
    """Causal attention: linear with a normalizer, softmax without."""
    length = v.shape[1]
    rate = dropout if key is not None else 0.0
    seeds = jnp.zeros(2, jnp.uint32) if key is None else jnp.stack(dropout_seeds(key))
    padded_length, groups = -(-length // block) * block, v.shape[2]

    def run(q: Array, k: Array, v: Array, seeds: Array, *, first: tuple) -> Array:
        launcher = _Launcher(scale, normalizer, rate, length, groups, q.shape[2:4], block, interpret)
        rng = jnp.concatenate([seeds, jnp.stack([jnp.uint32(index) for index in first])])
        q, k, v = (pad_length(x.astype(v.dtype), padded_length) for x in (q, k[:, :, :, None], v[:, :, :, None]))
        return _attention(q, k, v, rng, launcher)[:, :length]

    return on_each_device(run, q, k, v, seeds)


# `rng` is four integers: two seeds, and the global indices of this device's first sequence and first group of heads.
# `log_or_sum` is what the backward pass needs of D: log Σ w for softmax, Σ w for linear attention.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: Array, k: Array, v: Array, rng: Array, launcher: "_Launcher") -> Array:
    return _forward(q, k, v, rng, launcher)[0]


def _forward(q: Array, k: Array, v: Array, rng: Array, launcher: "_Launcher") -> tuple[Array, tuple]:
    shapes = _like(q, v.shape[-1], v.dtype), _like(q, 1, jnp.float32)
    out, log_or_sum = launcher.call(_outputs, (q,), (k, v), rng, shapes)
    return out, (q, k, v, rng, out, log_or_sum)


def _backward(launcher: "_Launcher", residuals: tuple, d_out: Array) -> tuple:
    q, k, v, rng, out, log_or_sum = residuals
    d_out = d_out.astype(out.dtype)
    shapes = _like(q, q.shape[-1], q.dtype), _like(q, 1, jnp.float32)
    dq, mean = launcher.call(_query_gradients, (q, out, log_or_sum, d_out), (k, v), rng, shapes)
    shapes = _like(q, k.shape[-1], k.dtype), _like(q, v.shape[-1], v.dtype)
    dk, dv = launcher.call(_key_gradients, (k, v), (q, log_or_sum, mean, d_out), rng, shapes)
    return dq, dk.sum(3, keepdims=True), dv.sum(3, keepdims=True), None  # a group's queries share keys and values


_attention.defvjp(_forward, _backward)


def _like(q: Array, size: int, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*q.shape[:-1], size), dtype)


# The kernels. A program has one block of tokens of the arrays that come first, and loops over blocks of the others.


def _outputs(launcher: "_Launcher", q, k, v, rng, out, log_or_sum) -> None:
    query_block, queries = launcher.program_block(), q[...]

    def step(key_block, carry):
        top, denominator, numerator = carry  # top: the largest score so far, which softmax subtracts
        scores = launcher.scores(queries, k[key_block.tokens], query_block, key_block)
        if launcher.normalizer is None:
            new_top = jnp.maximum(top, scores.max(1, keepdims=True))
            shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
            top, denominator, numerator = new_top, denominator * shrink, numerator * shrink
        else:
            weights = scores
        denominator += weights.sum(1, keepdims=True)
        dropped = launcher.drop(weights, query_block, key_block, rng)
        numerator += dot(dropped.astype(v.dtype), v[key_block.tokens])
        return top, denominator, numerator

    count = queries.shape[0]
    zero = jnp.full((count, 1), LOWEST), jnp.zeros((count, 1)), jnp.zeros((count, v.shape[-1]))
    top, denominator, numerator = launcher.loop_over_keys(query_block, step, zero)
    if launcher.normalizer is None:
        out[...], log_or_sum[...] = (numerator / denominator).astype(out.dtype), top + jnp.log(denominator)
    else:
        out[...], log_or_sum[...] = (numerator / launcher.normalizer(denominator)).astype(out.dtype), denominator


def _query_gradients(launcher: "_Launcher", q, out, log_or_sum, d_out, k, v, rng, dq, mean) -> None:
    query_block, queries, upstream, total = launcher.program_block(), q[...], d_out[...], log_or_sum[...]
    average = (upstream.astype(jnp.float32) * out[...].astype(jnp.float32)).sum(1, keepdims=True)

    def step(key_block, d_queries):
        keys = k[key_block.tokens]
        weights = launcher.weights(launcher.scores(queries, keys, query_block, key_block), total)
        d_weights = launcher.drop(dot(upstream, v[key_block.tokens], 1, 1), query_block, key_block, rng)
        d_scores = launcher.score_gradient(weights, d_weights, average, total, query_block, key_block)
        return d_queries + dot(d_scores.astype(keys.dtype), keys)

    d_queries = launcher.loop_over_keys(query_block, step, jnp.zeros(queries.shape, jnp.float32))
    dq[...] = (launcher.scale * d_queries).astype(dq.dtype)
    mean[...] = average


def _key_gradients(launcher: "_Launcher", k, v, q, log_or_sum, mean, d_out, rng, dk, dv) -> None:
    key_block, keys, values = launcher.program_block(), k[...], v[...]

    def step(query_block, carry):
        d_keys, d_values = carry
        tokens = query_block.tokens
        queries, upstream, total = q[tokens], d_out[tokens], log_or_sum[tokens]
        weights = launcher.weights(launcher.scores(queries, keys, query_block, key_block), total)
        dropped = launcher.drop(weights, query_block, key_block, rng)
        d_values += dot(dropped.astype(values.dtype), upstream, 0, 0)
        d_weights = launcher.drop(dot(upstream, values, 1, 1), query_block, key_block, rng)
        d_scores = launcher.score_gradient(weights, d_weights, mean[tokens], total, query_block, key_block)
        return d_keys + dot(d_scores.astype(queries.dtype), queries, 0, 0), d_values

    zero = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    d_keys, d_values = launcher.loop_over_queries(key_block, step, zero)
    dk[...], dv[...] = (launcher.scale * d_keys).astype(dk.dtype), d_values.astype(dv.dtype)


class _Block(NamedTuple):
    """A block of consecutive tokens of one head of one sequence."""

    sequence: Array
    group: Array
    head: Array  # within the group
    number: Array  # of the block within its sequence
    first: Array  # position of its first token
    tokens: tuple  # index of the block into an array (n, size)


class _Launcher(NamedTuple):
    """How scores become weights, and how kernels are launched over a batch."""

    scale: float
    normalizer: Normalizer | None  # None: softmax
    rate: float
    length: int
    groups: int  # on all devices together
    heads: tuple[int, int]  # on this device: groups, and query heads in each
    size: int  # of a block, in tokens
    interpret: bool

    def scores(self, queries: Array, keys: Array, query_block: _Block, key_block: _Block) -> Array:
        """scale · q·k (queries, keys), masked so that the future gets no weight."""
        scores = dot(queries, keys, 1, 1) * self.scale
        masked = LOWEST if self.normalizer is None else 0.0
        return jnp.where(causal_mask(scores.shape, query_block.first, key_block.first), scores, masked)

    def weights(self, scores: Array, log_or_sum: Array) -> Array:
        """Normalised weights, from the denominator that the forward pass saved."""
        return jnp.exp(scores - log_or_sum) if self.normalizer is None else scores / self.normalizer(log_or_sum)

    def score_gradient(
        self, weights: Array, d_weights: Array, mean: Array, log_or_sum: Array, query_block: _Block, key_block: _Block
    ) -> Array:
        """The gradient of the scores before scaling, from that of the normalised weights.

        `mean` is Σ weight · gradient of each query.
        """
        if self.normalizer is None:
            return weights * (d_weights - mean)
        if self.normalizer.clamp:
            mean = jnp.where(log_or_sum > self.normalizer.value, mean, 0.0)
        d_scores = (d_weights - mean) / self.normalizer(log_or_sum)
        return jnp.where(causal_mask(d_scores.shape, query_block.first, key_block.first), d_scores, 0.0)

    def drop(self, weights: Array, query_block: _Block, key_block: _Block, rng) -> Array:
        """Dropout of weights (queries, keys), by a hash of each weight's flat index in the global (b, g, n, r, n)."""
        if not self.rate:
            return weights
        query, key = (jax.lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (0, 1))
        first_sequence, first_group = rng[2].astype(jnp.int32), rng[3].astype(jnp.int32)
        group = (first_sequence + query_block.sequence) * self.groups + first_group + query_block.group
        index = (group * self.length + query_block.first + query) * self.heads[1] + query_block.head
        bits = hash_bits((index * self.length + key_block.first + key).astype(jnp.uint32), rng[0], rng[1])
        return jnp.where(bits >= keep_threshold(self.rate), weights * (1 / (1 - self.rate)), 0.0)  # divisions are slow

    def program_block(self) -> _Block:
        """The block that this program computes."""
        sequence, number, group, head = (pl.program_id(axis) for axis in range(4))
        return self._block((sequence, group, head), number)

    def _block(self, head: tuple[Array, Array, Array], number: Array) -> _Block:
        first = number * self.size
        return _Block(*head, number, first, (pl.ds(first, self.size), slice(None)))

    def loop_over_keys(self, query_block: _Block, step: Callable, carry):
        """Runs step(key_block, carry) for the blocks of keys up to this block of queries."""
        return jax.lax.fori_loop(0, query_block.number + 1, self._with_block(query_block, step), carry)

    def loop_over_queries(self, key_block: _Block, step: Callable, carry):
        """Runs step(query_block, carry) for the blocks of queries from this block of keys on."""
        blocks = -(-self.length // self.size)
        return jax.lax.fori_loop(key_block.number, blocks, self._with_block(key_block, step), carry)

    def _with_block(self, block: _Block, step: Callable) -> Callable:
        """Turns step(block, carry) into step(number, carry), for blocks of the same head as this one."""
        return lambda number, carry: step(self._block(block[:3], number), carry)

    def call(self, kernel: Callable, blocked: tuple, whole: tuple, rng: Array, outputs: tuple) -> Sequence[Array]:
        """Runs a kernel that sees one block of `blocked`, all tokens of `whole`, and writes one block of `outputs`."""
        batch, length = outputs[0].shape[:2]
        specs = [self._spec(x.shape, self.size) for x in blocked] + [self._spec(x.shape, length) for x in whole]
        return pl.pallas_call(
            functools.partial(kernel, self),
            grid=(batch, length // self.size, *self.heads),
            in_specs=[*specs, pl.BlockSpec((4,), lambda b, n, g, r: (0,))],
            out_specs=[self._spec(x.shape, self.size) for x in outputs],
            out_shape=list(outputs),
            interpret=self.interpret,
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        )(*blocked, *whole, rng)

    def _spec(self, shape: tuple[int, ...], tokens: int) -> pl.BlockSpec:
        is_blocked = tokens != shape[1] or shape[1] == self.size

        def index(b, n, g, r):
            return b, n if is_blocked else 0, g, r if shape[3] > 1 else 0, 0

        return pl.BlockSpec((None, tokens, None, None, shape[4]), index)
