"""Cross-entropy over a large vocabulary, in chunks of tokens: the logits of all tokens never exist at once.

The gradient is written by hand. The one JAX derives would multiply float32 logits by float32 copies of the tables. It
would also compute the logits of masked tokens: of padding, or of tokens outside a band of the adaptive softmax.

Axes in shapes and einsums: t tokens, v vocabulary, e width of the vectors.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from t2r.kernels import load as load_kernels
from t2r.kernels.support import has_rare_token_kernels
from t2r.layout import RULES, uninitialized

# Logits held at once: half a gibibyte in float32.
MAX_CHUNK_LOGITS = 2**27
# Gradients of logits saved for the backward pass: two gibibytes in bfloat16. If there are more, they are recomputed.
MAX_SAVED_LOGITS = 2**30
# Sizes are padded to a multiple of this. On others matrix units are several times slower, or arrays are copied first.
ALIGNMENT = 128


class LogitInputs(NamedTuple):
    """The operands of the logits x tableᵀ + bias."""

    x: Float[Array, "*b e"]
    table: Float[Array, "v e"]
    bias: Float[Array, "v"] | None = None


class LossOptions(NamedTuple):
    """The options of `cross_entropy`, which are known at compile time."""

    smoothing: float = 0.0
    teacher_weight: float = 0.0
    teacher_top_k: int = 0
    rare: bool = False
    kernels: str = "off"


def cross_entropy(
    student: LogitInputs,
    targets: Int[Array, "b n"],
    mask: Bool[Array, "b n"] | None = None,
    smoothing: float = 0.0,
    teacher: LogitInputs | None = None,
    teacher_weight: float = 0.0,
    *,
    teacher_top_k: int = 0,
    rare: bool = False,
    kernels: str = "off",
) -> Float[Array, "b n"]:
    """-Σ_v p(v) log q(v) for each token, where q = softmax(x tableᵀ + bias) is the student's distribution.

    p = (1 − w) · [(1 − s) · onehot(target) + s / vocabulary] + w · p_teacher, with s = `smoothing` and
    w = `teacher_weight`; p_teacher is the teacher's distribution over its `teacher_top_k` likeliest tokens (0: all).
    Where `mask` is False the loss is 0, and is not computed if that can be avoided.
    With `rare`, the mask is expected to be True for few tokens: no memory is reserved for the gradients of all
    logits, and `kernels` may be used (see `t2r.kernels.rare_tokens`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    axis_sizes = {} if mesh is None or mesh.empty else dict(mesh.shape)
    shards = math.prod(axis_sizes.get(axis, 1) for axis in RULES["batch"])
    batch_divides = len(targets) % shards == 0
    # Each device may skip its own masked tokens. Devices that share sequences or a vocabulary must loop over the same
    # chunks, so they compute all tokens.
    whole_vocabulary = all(axis_sizes.get(axis, 1) == 1 for axis in RULES["vocabulary"])
    skip_masked = mask is not None and batch_divides and whole_vocabulary
    mask = jnp.ones(targets.shape, bool) if mask is None else mask
    options = LossOptions(smoothing, teacher_weight, teacher_top_k, rare, kernels)
    loss = functools.partial(_local_cross_entropy, skip_masked=skip_masked, options=options)
    if shards > 1 and batch_divides:
        by_batch, replicated = PartitionSpec(RULES["batch"]), PartitionSpec()
        logit_specs = LogitInputs(by_batch, replicated, replicated)
        specs = (logit_specs, by_batch, by_batch, logit_specs if teacher else replicated)
        axes = {"in_specs": specs, "out_specs": by_batch, "axis_names": set(RULES["batch"])}
        loss = jax.shard_map(loss, **axes, check_vma=False)
    return loss(student, targets, mask, teacher)


def _local_cross_entropy(
    student: LogitInputs,
    targets: Array,
    mask: Array,
    teacher: LogitInputs | None,
    *,
    skip_masked: bool,
    options: LossOptions,
) -> Array:
    """`cross_entropy` on one device. With `skip_masked`, unmasked tokens are sorted to the front, and only they count.

    Sorting makes the tokens to compute a contiguous range, whose length the loop over chunks may read at run time.
    """
    flat_mask = mask.reshape(-1)
    order = jnp.argsort(~flat_mask, stable=True) if skip_masked else slice(None)

    def flatten(inputs: LogitInputs | None) -> LogitInputs | None:
        return inputs and inputs._replace(x=inputs.x.reshape(-1, inputs.x.shape[-1])[order])

    flat, flat_targets = flatten(student), targets.reshape(-1)[order]
    count = flat_mask.sum() if skip_masked else None
    is_plain = student.bias is None and teacher is None and not options.smoothing
    kernel_applies = skip_masked and options.rare and is_plain and has_rare_token_kernels(options.kernels, flat.x)
    if kernel_applies and (kernel := load_kernels("rare_tokens")) is not None:
        losses = kernel.losses(flat.x, flat.table, flat_targets, count)
    else:
        losses = _token_losses(flat, flat_targets, count, flatten(teacher), options)
    if skip_masked:
        return jnp.zeros_like(losses).at[order].set(losses, unique_indices=True).reshape(targets.shape)
    return jnp.where(flat_mask, losses, 0).reshape(targets.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_losses(
    student: LogitInputs,
    targets: Int[Array, "t"],
    count: Int[Array, ""] | None,
    teacher: LogitInputs | None,
    options: LossOptions,
) -> Float[Array, "t"]:
    """The losses of the first `count` tokens, 0 for the rest; None: of all tokens."""
    return _forward(student, targets, count, teacher, options)[0]


def _forward(
    student: LogitInputs,
    targets: Array,
    count: Array | None,
    teacher: LogitInputs | None,
    options: LossOptions,
    *,
    save_errors: bool = False,
) -> tuple[Array, tuple]:
    """The losses and the residuals: the inputs, log Σ exp(logits), and with `save_errors` the gradients of logits."""
    chunks = _Chunks.of(student, targets, teacher)
    logit_sums = _logit_sums(student, chunks.tokens) if options.smoothing else None

    def chunk(index: Array, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
        logits, chunk_targets, teacher_probs = chunks.compute(index, options.teacher_top_k)
        # loss = log Σ exp(logits) − Σ p·logits
        log_total = jax.nn.logsumexp(logits, -1, where=_in_vocabulary(logits, len(student.table)))
        target_logit = jnp.take_along_axis(logits, chunk_targets[:, None], -1)[:, 0]
        mean_logit = (1 - options.smoothing) * target_logit
        if options.smoothing:
            mean_logit += options.smoothing * chunks.read(logit_sums, index) / len(student.table)
        if teacher_probs is not None:
            mean_logit = (1 - options.teacher_weight) * mean_logit
            mean_logit += options.teacher_weight * (teacher_probs * logits).sum(-1)
        results = [log_total - mean_logit, log_total]
        if save_errors:
            error = _logit_gradient(logits, log_total, chunk_targets, teacher_probs, student.table, options)
            results.append(error.astype(student.x.dtype))
        return tuple(chunks.write(output, result, index) for output, result in zip(outputs, results))

    used, outputs = chunks.chunk_count(count), [jnp.zeros(chunks.tokens, jnp.float32)] * 2
    if save_errors:  # gibibytes: chunks that are not computed are zeroed below, so that none is written twice
        outputs.append(uninitialized((chunks.tokens, len(chunks.student.table)), student.x.dtype))
    losses, *residuals = jax.lax.fori_loop(0, used, chunk, tuple(outputs))
    if save_errors and count is not None:
        residuals[1] = jax.lax.fori_loop(used, chunks.chunk_count(None), chunks.write_zeros, residuals[1])
    return _zero_after(losses[: len(targets)], count), (student, targets, count, teacher, *residuals)


def _logit_sums(student: LogitInputs, tokens: int) -> Float[Array, "t"]:
    """Each token's logits summed over the vocabulary, as x · Σ_v table[v] + Σ_v bias[v]; padded to `tokens`."""
    table_sum = student.table.astype(student.x.dtype).sum(0, dtype=jnp.float32)
    sums = (student.x.astype(jnp.float32) * table_sum).sum(-1)
    return _pad(sums + (0 if student.bias is None else student.bias.sum()), tokens)


def _forward_with_residuals(
    student: LogitInputs, targets: Array, count: Array | None, teacher: LogitInputs | None, options: LossOptions
) -> tuple[Array, tuple]:
    fits = len(targets) * len(student.table) <= MAX_SAVED_LOGITS
    return _forward(student, targets, count, teacher, options, save_errors=fits and not options.rare)


def _logit_gradient(
    logits: Float[Array, "t v"],
    log_total: Float[Array, "t"],
    targets: Int[Array, "t"],
    teacher_probs: Float[Array, "t v"] | None,
    table: Array,
    options: LossOptions,
) -> Float[Array, "t v"]:
    """∂loss/∂logits = q − p, zero in the columns that pad the vocabulary."""
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    p = jnp.where(is_target, 1 - options.smoothing, 0) + options.smoothing / len(table)
    if teacher_probs is not None:
        p = (1 - options.teacher_weight) * p + options.teacher_weight * teacher_probs
    return jnp.where(_in_vocabulary(logits, len(table)), jnp.exp(logits - log_total[:, None]) - p, 0)


def _backward(options: LossOptions, residuals: tuple, gradient: Float[Array, "t"]) -> tuple:
    student, targets, count, teacher, log_totals, *saved_errors = residuals
    chunks, dtype = _Chunks.of(student, targets, teacher), student.x.dtype
    gradient = _pad(_zero_after(gradient, count), chunks.tokens)
    if saved_errors:  # one product over all tokens is faster than a loop; those after `count` contribute zero
        inputs, error = chunks.student, saved_errors[0]
        dx = _product("tv,ve->te", error, inputs.table) * gradient[:, None]
        dtable = _product("tv,te->ve", error, (inputs.x * gradient[:, None]).astype(dtype))
        dbias = None if inputs.bias is None else _product("tv,t->v", error, gradient.astype(dtype))
        return _trim_like(LogitInputs(dx, dtable, dbias), student), None, None, None

    def chunk(index: Array, sums: LogitInputs) -> LogitInputs:
        logits, chunk_targets, teacher_probs = chunks.compute(index, options.teacher_top_k)
        log_total = chunks.read(log_totals, index)
        error = _logit_gradient(logits, log_total, chunk_targets, teacher_probs, student.table, options)
        error *= chunks.read(gradient, index)[:, None]
        dbias = None if sums.bias is None else sums.bias + error.sum(0)
        error = error.astype(dtype)
        dx = _product("tv,ve->te", error, chunks.student.table).astype(dtype)
        dtable = _product("tv,te->ve", error, chunks.read(chunks.student.x, index))
        return LogitInputs(chunks.write(sums.x, dx, index), sums.table + dtable, dbias)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), chunks.student)
    zeros = zeros._replace(x=jnp.zeros(chunks.student.x.shape, dtype))
    return _trim_like(jax.lax.fori_loop(0, chunks.chunk_count(count), chunk, zeros), student), None, None, None


def _trim_like(gradients: LogitInputs, student: LogitInputs) -> LogitInputs:
    """Gradients without the padding of tokens and vocabulary, in the types of what they are gradients of."""
    return jax.tree.map(lambda new, old: new[: len(old)].astype(old.dtype), gradients, student)


_token_losses.defvjp(_forward_with_residuals, _backward)


class _Chunks(NamedTuple):
    """The inputs of the loss, with tokens padded to whole chunks and the vocabulary to a multiple of ALIGNMENT."""

    student: LogitInputs
    targets: Int[Array, "t"]
    teacher: LogitInputs | None
    size: int  # tokens per chunk
    vocab_size: int  # without padding

    @classmethod
    def of(cls, student: LogitInputs, targets: Array, teacher: LogitInputs | None) -> "_Chunks":
        size, tokens = _chunk_size(len(targets), len(student.table))

        def pad(inputs: LogitInputs) -> LogitInputs:
            bias = None if inputs.bias is None else _pad_vocabulary(inputs.bias, jnp.float32)
            return LogitInputs(_pad(inputs.x, tokens), _pad_vocabulary(inputs.table, inputs.x.dtype), bias)

        return cls(pad(student), _pad(targets, tokens), teacher and pad(teacher), size, len(student.table))

    @property
    def tokens(self) -> int:
        """The number of tokens, padding included."""
        return len(self.targets)

    def chunk_count(self, tokens: Array | None) -> Array | int:
        """How many chunks hold the first `tokens` tokens; None: all."""
        return self.tokens // self.size if tokens is None else -(-tokens // self.size)

    def read(self, x: Array, index: Array) -> Array:
        """Chunk `index` of an array whose first axis is tokens."""
        return jax.lax.dynamic_slice_in_dim(x, index * self.size, self.size)

    def write(self, x: Array, chunk: Array, index: Array) -> Array:
        """The array with chunk `index` replaced."""
        return jax.lax.dynamic_update_slice_in_dim(x, chunk, index * self.size, 0)

    def write_zeros(self, index: Array, x: Array) -> Array:
        return self.write(x, jnp.zeros((self.size, *x.shape[1:]), x.dtype), index)

    def compute(
        self, index: Array, top_k: int
    ) -> tuple[Float[Array, "t v"], Int[Array, "t"], Float[Array, "t v"] | None]:
        """A chunk's logits, targets and teacher probabilities."""
        teacher_probs = None
        if self.teacher is not None:
            logits = self._logits(self.teacher, index)
            teacher_probs = _softmax_of_top_k(logits, top_k, _in_vocabulary(logits, self.vocab_size))
        return self._logits(self.student, index), self.read(self.targets, index), teacher_probs

    def _logits(self, inputs: LogitInputs, index: Array) -> Float[Array, "t v"]:
        logits = _product("te,ve->tv", self.read(inputs.x, index), inputs.table)
        return logits if inputs.bias is None else logits + inputs.bias


def teacher_cross_entropy(
    log_probs: Callable[[Array], Array],
    hidden: Float[Array, "b n e"],
    teacher_log_probs: Callable[[Array], Array],
    teacher_hidden: Float[Array, "b n f"],
    top_k: int = 0,
) -> Float[Array, "b n"]:
    """-Σ_v p(v) log q(v) for each token, where p is the teacher's distribution and q the student's.

    With `top_k`, p is over its `top_k` likeliest tokens.

    For distributions that are no single softmax, such as the adaptive one: each is given as a function from hidden
    vectors to log-probabilities. These exist for a chunk of positions at a time; the backward pass recomputes them.
    """
    batch, length, _ = hidden.shape
    vocab_size = jax.eval_shape(log_probs, hidden[:, :1]).shape[-1]
    size = min(max(MAX_CHUNK_LOGITS // (batch * vocab_size), 1), length)
    count = -(-length // size)

    def split(x: Array) -> Array:  # (b, n, …) → (chunks, b, size, …)
        x = jnp.pad(x, [(0, 0), (0, count * size - length), (0, 0)])
        return jnp.moveaxis(x.reshape(batch, count, size, -1), 1, 0)

    @jax.checkpoint
    def chunk(hidden_pair: tuple[Array, Array]) -> Array:
        student, teacher = hidden_pair
        return -(_softmax_of_top_k(teacher_log_probs(teacher), top_k) * log_probs(student)).sum(-1)

    losses = jax.lax.map(chunk, (split(hidden), split(teacher_hidden)))  # (chunks, b, size)
    return jnp.moveaxis(losses, 0, 1).reshape(batch, count * size)[:, :length]


def _chunk_size(tokens: int, vocab_size: int) -> tuple[int, int]:
    """The number of tokens per chunk, and of all tokens with the padding of the last chunk."""
    chunks = -(-tokens // max(MAX_CHUNK_LOGITS // vocab_size, 1))
    size = tokens if chunks == 1 else _aligned(-(-tokens // chunks))
    return size, size * chunks


def _zero_after(x: Float[Array, "t"], count: Array | None) -> Float[Array, "t"]:
    """x with zeros from token `count` on; None: x."""
    return x if count is None else jnp.where(jnp.arange(len(x)) < count, x, 0)


def _pad_vocabulary(x: Array, dtype: Any) -> Array:
    """A table (v, e) or bias (v,) with zeros up to an aligned vocabulary size."""
    return _pad(x.astype(dtype), _aligned(len(x)))


def _aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _in_vocabulary(logits: Float[Array, "t v"], vocab_size: int) -> Bool[Array, "t v"]:
    """False in the columns that pad the vocabulary."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab_size


def _softmax_of_top_k(
    logits: Float[Array, "*b v"], k: int, where: Bool[Array, "*b v"] | None = None
) -> Float[Array, "*b v"]:
    """The softmax over the k largest logits (and any that equal the least of these), zero for others; k = 0: of all."""
    if k:
        logits = logits if where is None else jnp.where(where, logits, -jnp.inf)
        where = logits >= jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]
    return jax.nn.softmax(logits, where=where)


def _product(formula: str, a: Array, b: Array) -> Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _pad(x: Array, length: int) -> Array:
    """x with zeros appended along the first axis, up to `length`."""
    return jnp.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1))
