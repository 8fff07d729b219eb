"""The loss over a large vocabulary: logits exist for some rows at a time, forwards and backwards, and where needed.

It has a derivative of its own: the one JAX would derive multiplies float32 logits by float32 copies of the tables, and
computes logits over rare words, or of padding, for tokens that are none of them.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from t2r.kernels import load as load_kernels
from t2r.kernels.support import has_rare_token_kernels
from t2r.layout import RULES, uninitialized

# Logits that are held at once: half a gibibyte in float32.
LOGITS = 2**27
# Their gradients that are kept for the backward pass: two gibibytes in bfloat16. If there are more, they are made anew.
KEPT = 2**30
ALIGNED = 128


class LogitInputs(NamedTuple):
    """Vectors, and what words' scores are made of: x tableᵀ + bias."""

    x: Float[Array, "*b e"]
    table: Float[Array, "v e"]
    bias: Float[Array, "v"] | None = None


class LossTerms(NamedTuple):
    """What of the loss is not the target's, and how many tokens to expect."""

    smoothing: float = 0.0  # spread evenly over all words
    taught: float = 0.0  # of all: a teacher's probabilities
    rare: bool = False  # few tokens are inside: keeping room for all is not worth it
    kernels: str = "off"  # for these, see `t2r.kernels.rare_tokens`


def cross_entropy(
    scored: LogitInputs,
    targets: Int[Array, "b n"],
    inside: Bool[Array, "b n"] | None = None,
    smoothing: float = 0.0,
    teacher: LogitInputs | None = None,
    taught: float = 0.0,
    *,
    rare: bool = False,
    kernels: str = "off",
) -> Float[Array, "b n"]:
    """-Σ p log q, q the probabilities of words, and p all on the target, or as `LossTerms` says.

    With `inside`, only of the tokens where it is True; 0 for the others, which cost nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh is None or mesh.empty else dict(mesh.shape)
    ways = math.prod(sizes.get(axis, 1) for axis in RULES["batch"])
    own = len(targets) % ways == 0  # each device has its own rows
    # Devices that share rows, or the words of a vocabulary, must go through the same rows: all of them.
    some = inside is not None and own and all(sizes.get(axis, 1) == 1 for axis in RULES["vocabulary"])
    inside = jnp.ones(targets.shape, bool) if inside is None else inside
    loss = functools.partial(_of_rows, some=some, wanted=LossTerms(smoothing, taught, rare, kernels))
    if ways > 1 and own:
        rows, whole = PartitionSpec(RULES["batch"]), PartitionSpec()
        given = LogitInputs(rows, whole, whole)
        specs = (given, rows, rows, given if teacher else whole)
        axes = {"in_specs": specs, "out_specs": rows, "axis_names": set(RULES["batch"])}
        loss = jax.shard_map(loss, **axes, check_vma=False)
    return loss(scored, targets, inside, teacher)


def _of_rows(
    scored: LogitInputs, targets: Array, inside: Array, teacher: LogitInputs | None, *, some: bool, wanted: LossTerms
) -> Array:
    """The same, on one device; if only `some` tokens are inside, these first and the others not at all."""
    used = inside.reshape(-1)
    order = jnp.argsort(~used, stable=True) if some else slice(None)

    def flat(one: LogitInputs | None) -> LogitInputs | None:
        return one and one._replace(x=one.x.reshape(-1, one.x.shape[-1])[order])

    given, hits, count = flat(scored), targets.reshape(-1)[order], used.sum() if some else None
    is_plain = scored.bias is None and teacher is None and not wanted.smoothing
    few = some and wanted.rare and is_plain
    if few and has_rare_token_kernels(wanted.kernels, given.x) and (kernel := load_kernels("rare_tokens")) is not None:
        losses = kernel.losses(given.x, given.table, hits, count)
    else:
        losses = _loss(given, hits, count, flat(teacher), wanted)
    if some:
        return jnp.zeros_like(losses).at[order].set(losses, unique_indices=True).reshape(targets.shape)
    return jnp.where(used, losses, 0).reshape(targets.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(scored: LogitInputs, targets: Int[Array, "t"], count, teacher: LogitInputs | None, wanted: LossTerms):
    """The losses of the first `count` rows, 0 for the rest; None: of all, whose number is known when compiled."""
    return _forward(scored, targets, count, teacher, wanted)[0]


def _forward(
    scored: LogitInputs, targets: Array, count, teacher: LogitInputs | None, wanted: LossTerms, *, keep: bool = False
) -> tuple[Array, tuple]:
    all_rows = _Rows.of(scored, targets, teacher)
    sums = _sum_of_logits(scored, all_rows.padded) if wanted.smoothing else None

    def chunk(number: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        logits, hits, taught = all_rows.cut(number)
        total = jax.nn.logsumexp(logits, -1, where=_is_word(logits, len(scored.table)))
        hit = jnp.take_along_axis(logits, hits[:, None], -1)[:, 0]
        expected = (1 - wanted.smoothing) * hit
        if wanted.smoothing:
            expected += wanted.smoothing * all_rows.part(sums, number) / len(scored.table)
        if taught is not None:
            expected = (1 - wanted.taught) * expected + wanted.taught * (taught * logits).sum(-1)
        news = [total - expected, total]
        if keep:
            news.append(_error(logits, total, hits, taught, scored.table, wanted).astype(scored.x.dtype))
        return tuple(all_rows.put(old, new, number) for old, new in zip(found, news))

    used, nothing = all_rows.chunks(count), [jnp.zeros(all_rows.padded, jnp.float32)] * 2
    if keep:  # gibibytes, which need not be written twice
        nothing.append(uninitialized((all_rows.padded, len(all_rows.scored.table)), scored.x.dtype))
    losses, *kept = jax.lax.fori_loop(0, used, chunk, tuple(nothing))
    if keep and count is not None:
        kept[1] = jax.lax.fori_loop(used, all_rows.chunks(None), all_rows.put_zeros, kept[1])
    return _first(losses[: len(targets)], count), (scored, targets, count, teacher, *kept)


def _sum_of_logits(scored: LogitInputs, rows: int) -> Float[Array, "t"]:
    """Over all words, without the logits."""
    each = scored.table.astype(scored.x.dtype).sum(0, dtype=jnp.float32)
    found = (scored.x.astype(jnp.float32) * each).sum(-1) + (0 if scored.bias is None else scored.bias.sum())
    return _pad(found, rows)


def _forward_and_keep(scored: LogitInputs, targets: Array, count, teacher: LogitInputs | None, wanted: LossTerms):
    fits = len(targets) * len(scored.table) <= KEPT
    return _forward(scored, targets, count, teacher, wanted, keep=fits and not wanted.rare)


def _error(logits: Array, total: Array, hits: Array, taught: Array | None, table: Array, wanted: LossTerms) -> Array:
    """The loss's derivative by logits."""
    is_hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == hits[:, None]
    target = jnp.where(is_hit, 1 - wanted.smoothing, 0) + wanted.smoothing / len(table)
    if taught is not None:
        target = (1 - wanted.taught) * target + wanted.taught * taught
    return jnp.where(_is_word(logits, len(table)), jnp.exp(logits - total[:, None]) - target, 0)


def _backward(wanted: LossTerms, kept: tuple, gradient: Array) -> tuple:
    scored, targets, count, teacher, totals, *errors = kept
    all_rows, dtype = _Rows.of(scored, targets, teacher), scored.x.dtype
    gs = _pad(_first(gradient, count), all_rows.padded)
    if errors:  # zero beyond `count`, or times a gradient that is: one product of all is quicker than a loop
        rows, error = all_rows.scored, errors[0]
        dx = _product("tv,ve->te", error, rows.table) * gs[:, None]
        dtable = _product("tv,te->ve", error, (rows.x * gs[:, None]).astype(dtype))
        dbias = None if rows.bias is None else _product("tv,t->v", error, gs.astype(dtype))
        return _like(LogitInputs(dx, dtable, dbias), scored), None, None, None

    def chunk(number: Array, found: LogitInputs) -> LogitInputs:
        logits, hits, taught = all_rows.cut(number)
        error = _error(logits, all_rows.part(totals, number), hits, taught, scored.table, wanted)
        error *= all_rows.part(gs, number)[:, None]
        dbias = None if found.bias is None else found.bias + error.sum(0)
        error = error.astype(dtype)
        dx = _product("tv,ve->te", error, all_rows.scored.table).astype(dtype)
        dtable = _product("tv,te->ve", error, all_rows.part(all_rows.scored.x, number))
        return LogitInputs(all_rows.put(found.x, dx, number), found.table + dtable, dbias)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), all_rows.scored)
    nothing = nothing._replace(x=jnp.zeros(all_rows.scored.x.shape, dtype))
    return _like(jax.lax.fori_loop(0, all_rows.chunks(count), chunk, nothing), scored), None, None, None


def _like(found: LogitInputs, scored: LogitInputs) -> LogitInputs:
    return jax.tree.map(lambda new, old: new[: len(old)].astype(old.dtype), found, scored)


_loss.defvjp(_forward_and_keep, _backward)


class _Rows(NamedTuple):
    """All that is known of the rows, filled up to whole chunks of them, and to a round number of words."""

    scored: LogitInputs
    targets: Int[Array, "t"]
    teacher: LogitInputs | None
    size: int  # of a chunk
    words: int

    @classmethod
    def of(cls, scored: LogitInputs, targets: Array, teacher: LogitInputs | None) -> "_Rows":
        size, padded = _chunks(len(targets), len(scored.table))

        def fill(one: LogitInputs) -> LogitInputs:
            bias = None if one.bias is None else _words(one.bias, jnp.float32)
            return LogitInputs(_pad(one.x, padded), _words(one.table, one.x.dtype), bias)

        return cls(fill(scored), _pad(targets, padded), teacher and fill(teacher), size, len(scored.table))

    @property
    def padded(self) -> int:
        return len(self.targets)

    def chunks(self, count: Array | None) -> Array | int:
        return self.padded // self.size if count is None else -(-count // self.size)

    def part(self, x: Array, number: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, number * self.size, self.size)

    def put(self, x: Array, part: Array, number: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, number * self.size, 0)

    def put_zeros(self, number: Array, x: Array) -> Array:
        return self.put(x, jnp.zeros((self.size, *x.shape[1:]), x.dtype), number)

    def cut(self, number: Array) -> tuple[Float[Array, "t v"], Int[Array, "t"], Float[Array, "t v"] | None]:
        """A chunk's logits, targets, and what the teacher would say."""
        taught = None
        if self.teacher is not None:
            logits = self._logits(self.teacher, number)
            taught = jax.nn.softmax(logits, where=_is_word(logits, self.words))
        return self._logits(self.scored, number), self.part(self.targets, number), taught

    def _logits(self, scored: LogitInputs, number: Array) -> Float[Array, "t v"]:
        logits = _product("te,ve->tv", self.part(scored.x, number), scored.table)
        return logits if scored.bias is None else logits + scored.bias


def distances(
    log_probs: Callable[[Array], Array],
    hidden: Float[Array, "b n e"],
    teacher_log_probs: Callable[[Array], Array],
    wanted: Float[Array, "b n f"],
) -> Float[Array, "b n"]:
    """-Σ p log q over the vocabulary, p the teacher's probabilities, however they are computed.

    Probabilities exist for some places at a time, and are computed again for the backward pass.
    """
    batch, length, _ = hidden.shape
    words = jax.eval_shape(log_probs, hidden[:, :1]).shape[-1]
    size = min(max(LOGITS // (batch * words), 1), length)
    count = -(-length // size)

    def cut(x: Array) -> Array:  # (b, n, …) → (pieces, b, size, …)
        x = jnp.pad(x, [(0, 0), (0, count * size - length), (0, 0)])
        return jnp.moveaxis(x.reshape(batch, count, size, -1), 1, 0)

    @jax.checkpoint
    def piece(rows: tuple[Array, Array]) -> Array:
        ours, theirs = rows
        return -(jnp.exp(teacher_log_probs(theirs)) * log_probs(ours)).sum(-1)

    found = jax.lax.map(piece, (cut(hidden), cut(wanted)))
    return jnp.moveaxis(found, 0, 1).reshape(batch, count * size)[:, :length]


def _chunks(rows: int, words: int) -> tuple[int, int]:
    """How many rows to take at a time, and rows with those that fill up the last chunk."""
    chunks = -(-rows // max(LOGITS // words, 1))
    size = rows if chunks == 1 else _round(-(-rows // chunks))
    return size, size * chunks


def _first(x: Array, count: Array | None) -> Array:
    return x if count is None else jnp.where(jnp.arange(len(x)) < count, x, 0)


def _words(table: Array, dtype: jnp.dtype) -> Array:
    """The table with rows of zeros up to a round number."""
    return _pad(table.astype(dtype), _round(len(table)))


def _round(size: int) -> int:
    """Matrix units are several times slower on odd sizes, or arrays are copied to make them even."""
    return -(-size // ALIGNED) * ALIGNED


def _is_word(logits: Array, words: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < words


def _product(formula: str, a: Array, b: Array) -> Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _pad(x: Array, rows: int) -> Array:
    return jnp.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
