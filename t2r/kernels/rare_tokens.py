"""Cross-entropy of a few positions over a large vocabulary; logits never reach memory (Pallas: Triton, GPU).

The same function as the loop in `cross_entropy`, for the rarer bands of the adaptive softmax. How many positions have a
target in such a band is known only when the step runs. Its embeddings are narrow, so that computing a logit costs less
than writing and reading it. The backward pass computes the logits twice: for the gradient of x, which is a sum over the
vocabulary, and for the gradient of the table, which is a sum over positions.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from t2r.kernels.blocks import dot

STAGES = 3
MOST_PARTS = 16  # that the vocabulary is cut into, so that few positions keep a whole GPU busy
MOST_PARTIAL_SUMS = 2**27  # float32 values, one set for each part: half a gibibyte
LOWEST, HIGHEST = -1e30, 1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def losses(
    x: Float[Array, "t e"],
    table: Float[Array, "v e"],
    targets: Int[Array, "t"],
    count: Int[Array, ""],
    interpret: bool = False,
) -> Float[Array, "t"]:
    """log Σ_w exp(x·w) − x·w_target, w in the table, for the first `count` positions; 0 for the others."""
    return _forward(x, table, targets, count, interpret)[0]


def _forward(x: Array, table: Array, targets: Array, count: Array, interpret: bool) -> tuple[Array, tuple]:
    blocks = _Blocks.of(x, table, interpret)
    padded_x, padded_table = blocks.pad(x), blocks.pad(table.astype(x.dtype))
    log_sums = blocks.call_by_position(_log_sums, count, [padded_x], padded_table, ())
    log_total = jax.nn.logsumexp(log_sums, 0)[: len(x)]
    target_logit = (x.astype(jnp.float32) * padded_table[targets].astype(jnp.float32)).sum(-1)
    loss = jnp.where(_is_counted(x, count), log_total - target_logit, 0)
    return loss, (x, table, targets, count, log_total)


def _backward(interpret: bool, residuals: tuple, gradient: Array) -> tuple:
    x, table, targets, count, log_total = residuals
    blocks, is_counted = _Blocks.of(x, table, interpret), _is_counted(x, count)
    # With these values, positions that are not counted get no gradient, whatever their logits are.
    targets = jnp.where(is_counted, targets, -1)
    log_total = jnp.where(is_counted, log_total, HIGHEST)
    gradient = jnp.where(is_counted, gradient, 0)
    positions = [blocks.pad(values) for values in (x, targets, log_total, gradient)]
    padded_table = blocks.pad(table.astype(x.dtype))
    dx_parts = blocks.call_by_position(_x_gradients, count, positions, padded_table, x.shape[1:])
    dx = jnp.where(is_counted[:, None], dx_parts.sum(0)[: len(x)], 0).astype(x.dtype)
    dtable = blocks.call_by_vocabulary(_table_gradients, count, positions, padded_table)
    return dx, dtable[: len(table)].astype(table.dtype), None, None


losses.defvjp(_forward, _backward)


def _is_counted(x: Array, count: Array) -> Array:
    return jnp.arange(len(x)) < count


# The kernels. A program has one block of positions and loops over a part of the vocabulary; or it has one block of the
# vocabulary and loops over all counted positions.


def _log_sums(blocks: "_Blocks", count, x, table, out) -> None:
    part = pl.program_id(1)

    @pl.when(blocks.has_positions(count))
    def _() -> None:
        vectors = x[...]

        def step(number, carry):
            top, total = carry  # the largest logit so far, and Σ exp(logit − top)
            logits = dot(vectors, table[blocks.slice(number)], 1, 1)
            logits = jnp.where(blocks.token_ids(number, logits.shape, 1) < blocks.vocabulary, logits, LOWEST)
            new_top = jnp.maximum(top, logits.max(1))
            return new_top, total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(1)

        zero = jnp.zeros(vectors.shape[0])
        top, total = blocks.loop_over_part(part, step, (zero + LOWEST, zero))
        out[...] = top + jnp.log(total)


def _x_gradients(blocks: "_Blocks", count, x, targets, log_total, gradient, table, out) -> None:
    part = pl.program_id(1)

    @pl.when(blocks.has_positions(count))
    def _() -> None:
        vectors, per_position = x[...], [ref[...][:, None] for ref in (targets, log_total, gradient)]

        def step(number, dx):
            weights = table[blocks.slice(number)]
            d_logits = blocks.logit_gradient(dot(vectors, weights, 1, 1), number, 1, *per_position)
            return dx + dot(d_logits.astype(weights.dtype), weights)

        out[...] = blocks.loop_over_part(part, step, jnp.zeros(vectors.shape, jnp.float32))


def _table_gradients(blocks: "_Blocks", count, x, targets, log_total, gradient, table, out) -> None:
    weights, vocabulary_block = table[...], pl.program_id(0)

    def step(number, dtable):
        positions = blocks.slice(number)
        vectors, per_position = x[positions], [ref[positions][None] for ref in (targets, log_total, gradient)]
        d_logits = blocks.logit_gradient(dot(weights, vectors, 1, 1), vocabulary_block, 0, *per_position)
        return dtable + dot(d_logits.astype(weights.dtype), vectors)

    out[...] = jax.lax.fori_loop(0, pl.cdiv(count[0], blocks.size), step, jnp.zeros(weights.shape, jnp.float32))


class _Blocks(NamedTuple):
    """How positions and vocabulary are cut into blocks, and kernels are launched over them."""

    size: int  # positions in a block of positions, tokens in a block of the vocabulary
    warps: int  # of a program
    vocabulary: int
    parts: int  # of the vocabulary
    interpret: bool

    @classmethod
    def of(cls, x: Array, table: Array, interpret: bool) -> "_Blocks":
        # A program's block of sums and its block of logits must fit in registers. Chosen by measurements on an H200.
        size, warps = (64, 4) if x.shape[1] > 128 else (128, 8)
        return cls(size, warps, len(table), max(min(MOST_PARTIAL_SUMS // x.size, MOST_PARTS), 1), interpret)

    def pad(self, x: Array) -> Array:
        """Appends zeros along axis 0 up to a whole number of blocks."""
        return jnp.pad(x, [(0, -len(x) % self.size)] + [(0, 0)] * (x.ndim - 1))

    def slice(self, number: Array) -> pl.Slice:
        """The elements of block `number`."""
        return pl.ds(number * self.size, self.size)

    def token_ids(self, number: Array, shape: tuple[int, int], axis: int) -> Array:
        """Token ids of block `number` of the vocabulary, along this axis of a block of logits."""
        return number * self.size + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def logit_gradient(
        self, logits: Array, number: Array, axis: int, targets: Array, log_total: Array, gradient: Array
    ) -> Array:
        """(softmax − one-hot target) · gradient, for block `number` of the vocabulary along this axis."""
        ids = self.token_ids(number, logits.shape, axis)
        probability = jnp.where(ids < self.vocabulary, jnp.exp(logits - log_total), 0)
        return jnp.where(ids == targets, probability - 1, probability) * gradient

    def has_positions(self, count) -> Array:
        """Whether this program's block has positions that count."""
        return pl.program_id(0) * self.size < count[0]

    def loop_over_part(self, part: Array, step: Callable, carry):
        """Runs step(number, carry) for each block of the vocabulary in this part."""
        blocks = -(-self.vocabulary // self.size)
        per_part = -(-blocks // self.parts)
        first = part * per_part
        return jax.lax.fori_loop(first, jnp.minimum(first + per_part, blocks), step, carry)

    def call_by_position(
        self, kernel: Callable, count: Array, positions: list, table: Array, shape: tuple[int, ...]
    ) -> Array:
        """(parts, positions, *shape): the kernel's result for each part of the vocabulary and each position."""
        inputs = [self._whole(count[None]), *map(self._one_block, positions), self._whole(table)]
        out = pl.BlockSpec((None, self.size, *shape), lambda block, part: (part, block, *[0] * len(shape)))
        length = len(positions[0])
        grid, out_shape = (length // self.size, self.parts), (self.parts, length, *shape)
        return self._call(kernel, grid, inputs, out, out_shape)(count[None], *positions, table)

    def call_by_vocabulary(self, kernel: Callable, count: Array, positions: list, table: Array) -> Array:
        """(v, e): the kernel's result for each token of the vocabulary."""
        inputs = [*map(self._whole, (count[None], *positions)), self._one_block(table)]
        grid = (len(table) // self.size,)
        call = self._call(kernel, grid, inputs, self._one_block(table), table.shape)
        return call(count[None], *positions, table)

    def _call(self, kernel: Callable, grid: tuple, inputs: list, out: pl.BlockSpec, shape: tuple) -> Callable:
        return pl.pallas_call(
            functools.partial(kernel, self),
            grid=grid,
            in_specs=inputs,
            out_specs=out,
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            interpret=self.interpret,
            compiler_params=triton.CompilerParams(num_warps=self.warps, num_stages=STAGES),
        )

    def _one_block(self, x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((self.size, *x.shape[1:]), lambda block, *_: (block, *[0] * (x.ndim - 1)))

    def _whole(self, x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
