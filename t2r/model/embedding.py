"""From tokens to vectors and back: plain and adaptive embeddings, their output layers, positions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.dropout import dropout
from t2r.errors import InputError
from t2r.layout import constrain
from t2r.model.config import ModelConfig
from t2r.model.cross_entropy import LogitInputs, cross_entropy, distances


class TeacherOutputs(NamedTuple):
    """A teacher's last vectors, what makes words of them, and their share of the loss."""

    embedding: Any
    x: Float[Array, "b n width"]
    share: float


class PlainEmbedding(nnx.Module):
    """One table; its transpose, or one of its own, makes the logits. A `source` has a table and no logits."""

    def __init__(self, config: ModelConfig, *, source: bool = False, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.width**-0.5)
        size = config.source_vocab_size if source else config.vocab_size
        self.table = nnx.Param(init(rngs.params(), (size, config.width)))
        if not (config.tied_output or source):
            self.output = nnx.Param(init(rngs.params(), (size, config.width)))
        has_bias = config.output_bias and not source
        self.bias = nnx.Param(jnp.zeros(size)) if has_bias else None
        self.dtype = jnp.dtype(config.dtype)
        self.tied = config.tied_output

    def embed(self, tokens: Int[Array, "b n"]) -> Float[Array, "b n width"]:
        # Rows are looked up in whole tables: from one divided by width they would have to be moved afterwards.
        return constrain(self.table[...], ("vocabulary", None))[tokens].astype(self.dtype)

    def output_table(self) -> Array:
        return (self.table if self.tied else self.output)[...]

    def log_probs(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Logarithms of the probabilities of all tokens, in float32."""
        return jax.nn.log_softmax(self.logits(x))

    def logits(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """What probabilities are the softmax of, in float32."""
        table = self.output_table().astype(x.dtype)
        logits = jnp.einsum("...e,ve->...v", x, table, preferred_element_type=jnp.float32)
        return logits if self.bias is None else logits + self.bias[...]

    def loss(
        self,
        x: Float[Array, "b n width"],
        targets: Int[Array, "b n"],
        key: PRNGKeyArray | None = None,
        smoothing: float = 0.0,
        *,
        inside: Bool[Array, "b n"] | None = None,
        lesson: TeacherOutputs | None = None,
    ) -> Float[Array, "b n"]:
        """Negative log-likelihood of each target, of which `smoothing` is spread evenly over the vocabulary.

        With a lesson, part of it is of the teacher's probabilities; with `inside`, only where that is True.
        """
        teacher = lesson and lesson.embedding._logit_inputs(lesson.x)
        taught = lesson.share if lesson else 0.0
        return cross_entropy(self._logit_inputs(x), targets, inside, smoothing, teacher, taught)

    def _logit_inputs(self, x: Float[Array, "b n width"]) -> LogitInputs:
        table = constrain(self.output_table(), ("vocabulary", None))
        return LogitInputs(x, table, None if self.bias is None else self.bias[...])


class AdaptiveEmbedding(nnx.Module):
    """Baevski & Auli (2019): frequent tokens get wide embeddings, rarer bands narrower ones, all projected to width.

    The adaptive softmax shares both (tied embeddings, tied projections): the head scores the first band's tokens
    and one class per further band; a band's own softmax splits its class. Band 0 is scored without its projection,
    as in the paper's toolkit. Tokens must be numbered by falling frequency.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        bounds = (0, *config.adaptive_cutoffs, config.vocab_size)
        self.bounds = bounds
        self.dropout, self.kernels = config.adaptive_dropout, config.kernels
        self.dtype = jnp.dtype(config.dtype)
        sizes = [config.width // config.adaptive_factor**band for band in range(len(bounds) - 1)]
        normal, xavier = nnx.initializers.normal, nnx.initializers.xavier_uniform()
        self.tables = nnx.List(
            nnx.Param(normal(size**-0.5)(rngs.params(), (high - low, size)))
            for low, high, size in zip(bounds, bounds[1:], sizes)
        )
        self.projections = nnx.List(nnx.Param(xavier(rngs.params(), (size, config.width))) for size in sizes)
        self.classes = nnx.Param(xavier(rngs.params(), (config.width, len(sizes) - 1)))

    def embed(self, tokens: Int[Array, "b n"]) -> Float[Array, "b n width"]:
        x = 0.0
        for low, high, table, projection in zip(self.bounds, self.bounds[1:], self.tables, self.projections):
            inside = (tokens >= low) & (tokens < high)
            table = constrain(table[...], ("vocabulary", None))
            rows = table[jnp.where(inside, tokens - low, 0)].astype(self.dtype)
            x += jnp.where(inside[..., None], rows @ projection[...].astype(self.dtype), 0)
        return x

    def _head(self) -> Array:
        """What scores the first band's tokens, and the classes of the others."""
        return jnp.concatenate([self.tables[0][...], self.classes[...].T])

    def _hidden(self, band: int, x: Array, key: PRNGKeyArray | None) -> Array:
        """What a further band's table is multiplied by."""
        return dropout(x @ self.projections[band][...].T.astype(x.dtype), self.dropout, key, band)

    def log_probs(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Logarithms of the probabilities of all tokens, in float32."""

        def log_softmax(x: Array, table: Array) -> Array:
            logits = jnp.einsum("...e,ve->...v", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
            return jax.nn.log_softmax(logits)

        head, first = log_softmax(x, self._head()), self.bounds[1]
        bands = [head[..., :first]]
        for band in range(1, len(self.tables)):
            within = log_softmax(self._hidden(band, x, None), self.tables[band][...])
            bands.append(head[..., first + band - 1, None] + within)
        return jnp.concatenate(bands, -1)

    def logits(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """What probabilities are the softmax of: bands are only comparable as probabilities."""
        return self.log_probs(x)

    def loss(
        self,
        x: Float[Array, "b n width"],
        targets: Int[Array, "b n"],
        key: PRNGKeyArray | None = None,
        smoothing: float = 0.0,
        *,
        inside: Bool[Array, "b n"] | None = None,
        lesson: TeacherOutputs | None = None,
    ) -> Float[Array, "b n"]:
        """Negative log-likelihood of each target; a band is scored for its own tokens only. Else as the plain one's."""
        if smoothing:
            raise InputError(f"label_smoothing={smoothing} needs the whole vocabulary: not with adaptive_cutoffs")
        total = 0.0
        if lesson is None or lesson.share < 1:
            total = self._loss(x, targets, key)
        if lesson is not None:
            apart = distances(self.log_probs, x, lesson.embedding.log_probs, lesson.x)
            total = (1 - lesson.share) * total + lesson.share * apart
        return total if inside is None else jnp.where(inside, total, 0)

    def _loss(self, x: Array, targets: Array, key: PRNGKeyArray | None) -> Float[Array, "b n"]:
        first = self.bounds[1]
        band_of = jnp.searchsorted(jnp.array(self.bounds[1:-1]), targets, side="right")
        total = cross_entropy(LogitInputs(x, self._head()), jnp.where(band_of == 0, targets, first + band_of - 1))
        for band in range(1, len(self.tables)):
            inside, table = band_of == band, constrain(self.tables[band][...], ("vocabulary", None))
            place = jnp.where(inside, targets - self.bounds[band], 0)
            scored = LogitInputs(self._hidden(band, x, key), table)
            total += cross_entropy(scored, place, inside, rare=True, kernels=self.kernels)
        return total


def make_embedding(config: ModelConfig, *, rngs: nnx.Rngs) -> PlainEmbedding | AdaptiveEmbedding:
    """The embedding a config asks for."""
    return (AdaptiveEmbedding if config.adaptive_cutoffs else PlainEmbedding)(config, rngs=rngs)


def sinusoids(positions: Int[Array, "b n"], width: int, *, is_open: bool = False) -> Float[Array, "b n width"]:
    """sin and cos of the positions at geometric frequencies, from 1 to 1/10,000, sines first.

    That end is among them, as in the paper's toolkit, or with `is_open` the next one would be, as in Marian.
    """
    half = width // 2
    frequency = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / (half if is_open else max(half - 1, 1)))
    angle = positions[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
