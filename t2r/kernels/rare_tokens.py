"""The loss of few tokens over many words, no logit of which reaches memory (Pallas: Triton, GPU).

The same function as the loop in `cross_entropy`, for the adaptive softmax's rarer bands: how many tokens a band has is
known only in the step, and with a narrow table a logit costs less to compute than to write and to read again. Backwards
logits are computed twice more: once to be summed up over words, once over tokens.
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
PARTS = 16  # of the vocabulary at most, so that few tokens keep all of a GPU busy
SUMS = 2**27  # over the words of each part that are held at once: half a gibibyte
LOWEST, HIGHEST = -1e30, 1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def losses(
    x: Float[Array, "t e"],
    table: Float[Array, "v e"],
    targets: Int[Array, "t"],
    count: Int[Array, ""],
    interpret: bool = False,
) -> Float[Array, "t"]:
    """log Σ exp(x·w) - x·w of the target, w a row of the table, for the first `count` tokens; 0 for the others."""
    return _forward(x, table, targets, count, interpret)[0]


def _forward(x: Array, table: Array, targets: Array, count: Array, interpret: bool) -> tuple[Array, tuple]:
    blocks = _Blocks.of(x, table, interpret)
    tokens, words = blocks.fill(x), blocks.fill(table.astype(x.dtype))
    parts = blocks.by_token(_log_sums, count, [tokens], words, ())
    total = jax.nn.logsumexp(parts, 0)[: len(x)]
    hit = (x.astype(jnp.float32) * words[targets].astype(jnp.float32)).sum(-1)
    return jnp.where(_is_first(x, count), total - hit, 0), (x, table, targets, count, total)


def _backward(interpret: bool, kept: tuple, gradient: Array) -> tuple:
    x, table, targets, count, total = kept
    blocks, is_first = _Blocks.of(x, table, interpret), _is_first(x, count)
    # With these, tokens that are not among the first have no gradient, whatever their logits are.
    about = jnp.where(is_first, targets, -1), jnp.where(is_first, total, HIGHEST), jnp.where(is_first, gradient, 0)
    tokens, words = [blocks.fill(y) for y in (x, *about)], blocks.fill(table.astype(x.dtype))
    parts = blocks.by_token(_token_gradients, count, tokens, words, x.shape[1:])
    dx = jnp.where(is_first[:, None], parts.sum(0)[: len(x)], 0).astype(x.dtype)
    dtable = blocks.by_word(_word_gradients, count, tokens, words)
    return dx, dtable[: len(table)].astype(table.dtype), None, None


losses.defvjp(_forward, _backward)


def _is_first(x: Array, count: Array) -> Array:
    return jnp.arange(len(x)) < count


# The kernels: a program has one block of tokens and walks through a part of the words, or has words and walks through
# all tokens that count.


def _log_sums(blocks: "_Blocks", count, x, table, out) -> None:
    part = pl.program_id(1)

    @pl.when(blocks.counts(count))
    def _() -> None:
        vectors = x[...]

        def step(number, found):
            top, below = found
            scores = dot(vectors, table[blocks.rows(number)], 1, 1)
            scores = jnp.where(blocks.words_at(number, scores.shape, 1) < blocks.words, scores, LOWEST)
            highest = jnp.maximum(top, scores.max(1))
            return highest, below * jnp.exp(top - highest) + jnp.exp(scores - highest[:, None]).sum(1)

        nothing = jnp.zeros(vectors.shape[0])
        top, below = blocks.walk(part, step, (nothing + LOWEST, nothing))
        out[...] = top + jnp.log(below)


def _token_gradients(blocks: "_Blocks", count, x, targets, total, gradient, table, out) -> None:
    part = pl.program_id(1)

    @pl.when(blocks.counts(count))
    def _() -> None:
        vectors, about = x[...], [ref[...][:, None] for ref in (targets, total, gradient)]

        def step(number, found):
            words = table[blocks.rows(number)]
            return found + dot(blocks.error(dot(vectors, words, 1, 1), number, 1, *about).astype(words.dtype), words)

        out[...] = blocks.walk(part, step, jnp.zeros(vectors.shape, jnp.float32))


def _word_gradients(blocks: "_Blocks", count, x, targets, total, gradient, table, out) -> None:
    words, here = table[...], pl.program_id(0)

    def step(number, found):
        rows = blocks.rows(number)
        vectors, about = x[rows], [ref[rows][None] for ref in (targets, total, gradient)]
        return found + dot(blocks.error(dot(words, vectors, 1, 1), here, 0, *about).astype(words.dtype), vectors)

    out[...] = jax.lax.fori_loop(0, pl.cdiv(count[0], blocks.size), step, jnp.zeros(words.shape, jnp.float32))


class _Blocks(NamedTuple):
    """How kernels are laid over tokens and words."""

    size: int  # of a block of either
    warps: int  # of a program
    words: int
    parts: int  # of them
    interpret: bool

    @classmethod
    def of(cls, x: Array, table: Array, interpret: bool) -> "_Blocks":
        # A program's block of sums and one of logits must fit in its registers. As measured on an H200.
        size, warps = (64, 4) if x.shape[1] > 128 else (128, 8)
        return cls(size, warps, len(table), max(min(SUMS // x.size, PARTS), 1), interpret)

    def fill(self, x: Array) -> Array:
        """With zeros, up to whole blocks."""
        return jnp.pad(x, [(0, -len(x) % self.size)] + [(0, 0)] * (x.ndim - 1))

    def rows(self, number: Array) -> pl.Slice:
        return pl.ds(number * self.size, self.size)

    def words_at(self, number: Array, shape: tuple[int, int], axis: int) -> Array:
        return number * self.size + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def error(self, scores: Array, number: Array, axis: int, targets: Array, total: Array, gradient: Array) -> Array:
        """The derivative by the logits of a block of words."""
        word = self.words_at(number, scores.shape, axis)
        chance = jnp.where(word < self.words, jnp.exp(scores - total), 0)
        return jnp.where(word == targets, chance - 1, chance) * gradient

    def counts(self, count) -> Array:
        """Whether there are tokens in this program's block."""
        return pl.program_id(0) * self.size < count[0]

    def walk(self, part: Array, step: Callable, found):
        """Through the blocks of words in a part."""
        blocks = -(-self.words // self.size)
        each = -(-blocks // self.parts)
        first = part * each
        return jax.lax.fori_loop(first, jnp.minimum(first + each, blocks), step, found)

    def by_token(self, kernel: Callable, count: Array, tokens: list, words: Array, shape: tuple[int, ...]) -> Array:
        """One result of this shape for each part of the vocabulary and each token."""
        inputs = [self._whole(count[None]), *map(self._cut, tokens), self._whole(words)]
        out = pl.BlockSpec((None, self.size, *shape), lambda block, part: (part, block, *[0] * len(shape)))
        grid, found = (len(tokens[0]) // self.size, self.parts), (self.parts, len(tokens[0]), *shape)
        return self._call(kernel, grid, inputs, out, found)(count[None], *tokens, words)

    def by_word(self, kernel: Callable, count: Array, tokens: list, words: Array) -> Array:
        """One vector for each word."""
        inputs = [*map(self._whole, (count[None], *tokens)), self._cut(words)]
        grid = (len(words) // self.size,)
        return self._call(kernel, grid, inputs, self._cut(words), words.shape)(count[None], *tokens, words)

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

    def _cut(self, x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((self.size, *x.shape[1:]), lambda block, *_: (block, *[0] * (x.ndim - 1)))

    def _whole(self, x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
