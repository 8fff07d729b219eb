"""Matrices stored by output row, in the activations' type or in 8 bits: the form in which decoding reads them fastest.

A decoding step multiplies each matrix with one vector per sequence. On CPUs the compiler multiplies W (outputs, inputs)
with few vectors up to three times as fast as the transposed matrix that `nnx.Linear` stores, and 8-bit integers about
four times as fast as float32 (results/NOTES.md). `for_decoding` replaces a model's matrices; the rest of the
model, its states included, stays as it is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int8

from t2r.integers import quantise
from t2r.model.embedding import OutputLayer, PlainEmbedding
from t2r.model.largest import BLOCK, largest_of_columns
from t2r.model.transformer import LanguageModel

WEIGHTS = ("float32", "int8")
LEAST_VECTORS = 4  # that the compiler multiplies by its fast 8-bit routine; fewer are padded
FEW_VECTORS = 64  # of which W xᵀ is faster than x Wᵀ
NEVER = -1e30  # the logit of rows that are only padding


class Rows(nnx.Module):
    """A matrix W by output row. In 8 bits, row i is scale_i times integers from −127 to 127."""

    def __init__(self, matrix: Float[Array, "outputs inputs"], weights: str, dtype: Any):
        self.dtype, self.scale = jnp.dtype(dtype), nnx.data(None)
        if weights == "int8":
            matrix, scale = quantise(matrix)
            self.scale = nnx.Param(scale)
        else:
            matrix = matrix.astype(self.dtype)
        self.matrix = nnx.Param(matrix)

    def times(self, x: Float[Array, "b inputs"]) -> Float[Array, "outputs b"]:
        """W xᵀ; in 8 bits the result is float32."""
        if self.scale is None:
            x = x.astype(self.dtype)
            product = jnp.einsum("oi,bi->ob", self.matrix[...], x, preferred_element_type=jnp.float32)
            count = x.shape[0]
            are_few = isinstance(count, int) and count <= FEW_VECTORS  # in an exported program it may be a symbol
            # Without the barrier the compiler computes x Wᵀ where that is what is used in the end.
            return jax.lax.optimization_barrier(product) if are_few else product
        matrix, scale = self.matrix[...], self.scale[...]
        return jax.lax.platform_dependent(matrix, scale, x, cpu=_integer_product, default=_dequantised_product)

    def rows(self, index: Any = slice(None), dtype: Any = None) -> Float[Array, "*b inputs"]:
        """Rows of W, as numbers of the activations' type or another one."""
        rows = self.matrix[...][index]
        if self.scale is not None:
            rows = rows * self.scale[...][index][..., None]
        return rows.astype(dtype or self.dtype)


def _integer_product(matrix: Int8[Array, "o i"], scale: Array, x: Float[Array, "b i"]) -> Float[Array, "o b"]:
    """Activations are quantised too, each vector with its own scale; the sums of products are exact."""
    integers, x_scale = quantise(x)
    count = len(x)
    integers = jnp.pad(integers, ((0, max(LEAST_VECTORS - count, 0)), (0, 0)))
    sums = jnp.einsum("oi,bi->ob", matrix, integers, preferred_element_type=jnp.int32)[:, :count]
    return sums.astype(jnp.float32) * scale[:, None] * x_scale


def _dequantised_product(matrix: Int8[Array, "o i"], scale: Array, x: Float[Array, "b i"]) -> Float[Array, "o b"]:
    product = jnp.einsum("bi,oi->bo", x, matrix.astype(x.dtype), preferred_element_type=jnp.float32)
    return (product * scale).T  # the transpose is a matter of layout: each vector's outputs are neighbours


def _argmax(logits: Float[Array, "rows b"]) -> Int[Array, "b"]:
    """On GPUs two kernels, where a search in blocks has nine."""
    return jnp.argmax(logits.T, -1).astype(jnp.int32)


def _argmax_in_blocks(logits: Float[Array, "rows b"]) -> Int[Array, "b"]:
    return largest_of_columns(logits, 1)[1][:, 0]


class RowLinear(nnx.Module):
    """`nnx.Linear` or `nnx.LinearGeneral` (which contracts the last axes) with its matrix by output row."""

    def __init__(self, layer: nnx.Linear | nnx.LinearGeneral, weights: str):
        sizes = layer.in_features if isinstance(layer.in_features, tuple) else (layer.in_features,)
        self.inputs, self.outputs = sizes, layer.kernel.shape[len(sizes) :]
        self.dtype = jnp.dtype(layer.dtype)
        self.matrix = Rows(layer.kernel[...].reshape(math.prod(sizes), -1).T, weights, self.dtype)
        self.bias = None if layer.bias is None else nnx.Param(layer.bias[...].astype(self.dtype))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        batch = x.shape[: x.ndim - len(self.inputs)]
        y = self.matrix.times(x.reshape(math.prod(batch), -1)).astype(self.dtype).T.reshape(*batch, *self.outputs)
        return y if self.bias is None else y + self.bias[...]

    @property
    def kernel(self) -> Float[Array, "..."]:
        """The matrix as `nnx.Linear` has it: inputs first. Of 8 bits in float32, which rounds to the same integers."""
        dtype = self.dtype if self.matrix.scale is None else jnp.float32
        return self.matrix.rows(dtype=dtype).T.reshape(*self.inputs, *self.outputs)


class RowEmbedding(OutputLayer):
    """`PlainEmbedding` with its tables by row; the output table is padded to whole blocks of rows."""

    def __init__(self, embedding: PlainEmbedding, weights: str):
        self.dtype, (self.vocabulary, _) = embedding.dtype, embedding.table.shape
        output = embedding.output_table()
        padding = -len(output) % BLOCK
        self.bias = nnx.data(None)
        if embedding.bias is not None:
            self.bias = nnx.Param(jnp.pad(embedding.bias[...].astype(jnp.float32), (0, padding)))
        self.output = Rows(jnp.pad(output, ((0, padding), (0, 0))), weights, self.dtype)
        self.table = self.output if embedding.tied else Rows(embedding.table[...], weights, self.dtype)

    def embed(self, tokens: Int[Array, "b n"]) -> Float[Array, "b n width"]:
        return self.table.rows(tokens)

    def _row_logits(self, x: Float[Array, "b width"]) -> Float[Array, "rows b"]:
        logits = self.output.times(x)
        logits = logits if self.bias is None else logits + self.bias[...][:, None]
        if self.vocabulary == len(logits):
            return logits
        # Not by their bias: where a vector is infinite, rows of zeros have no number.
        return jnp.where((jnp.arange(len(logits)) < self.vocabulary)[:, None], logits, NEVER)

    def logits(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """x tableᵀ + bias, in float32."""
        logits = self._row_logits(x.reshape(-1, x.shape[-1]))[: self.vocabulary]
        return logits.T.reshape(*x.shape[:-1], self.vocabulary)

    def log_probs(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Log-probabilities of the whole vocabulary, in float32."""
        return jax.nn.log_softmax(self.logits(x))

    def greedy_token(self, x: Float[Array, "b width"]) -> Int[Array, "b"]:
        return jax.lax.platform_dependent(self._row_logits(x), cuda=_argmax, default=_argmax_in_blocks)

    def likeliest(self, x: Float[Array, "b width"], count: int, always: int) -> tuple[Array, Array, Array]:
        logits = self._row_logits(x)
        values, tokens = largest_of_columns(logits, min(count, self.vocabulary))
        blocks = logits.reshape(-1, BLOCK, len(x))  # summed in blocks: many small sums are shared by all cores
        total = values[:, 0] + jnp.log(jnp.exp(blocks - values[:, 0]).sum(1).sum(0))
        return values - total[:, None], tokens, logits[always] - total

    def loss(
        self, x: Float[Array, "b n width"], targets: Int[Array, "b n"], *_: Any, mask: Array | None = None, **__: Any
    ) -> Float[Array, "b n"]:
        """Cross-entropy with each target, for evaluation; 0 where `mask` is False."""

        def sequence_loss(pair: tuple[Array, Array]) -> Float[Array, "n"]:
            return -jnp.take_along_axis(self.log_probs(pair[0]), pair[1][:, None], 1)[:, 0]

        losses = jax.lax.map(sequence_loss, (x, targets))  # one after the other: all their logits are much memory
        return losses if mask is None else jnp.where(mask, losses, 0)


def for_decoding(model: LanguageModel, weights: str = "float32") -> LanguageModel:
    """The model with its matrices by row, in 8 bits if `weights` is "int8". It shares all other arrays with `model`.

    In float32 a model changes only on CPUs: elsewhere the compiler chooses the layout, and there are kernels.
    """
    if is_for_decoding(model) or (weights == "float32" and jax.default_backend() != "cpu"):
        return model
    model = nnx.merge(*nnx.split(model))  # other modules, the same arrays
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if isinstance(child, nnx.Linear | nnx.LinearGeneral):
                setattr(module, name, RowLinear(child, weights))
            elif type(child) is PlainEmbedding:
                setattr(module, name, RowEmbedding(child, weights))
    model.weights = weights  # `kernels.decoding.support` asks for it
    return model


def is_for_decoding(model: LanguageModel) -> bool:
    """Whether `for_decoding` has made this model."""
    return any(isinstance(module, RowLinear) for _, module in nnx.iter_modules(model))
