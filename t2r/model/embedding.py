"""From tokens to vectors and back: plain and adaptive embeddings, their output layers, positions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from t2r.errors import InputError
from t2r.model.config import ModelConfig
from t2r.model.layout import constrain

# Tokens whose logits over a whole vocabulary are held at once when a loss is computed.
LOSS_CHUNK = 2048


class PlainEmbedding(nnx.Module):
    """One table; its transpose, or one of its own, makes the logits. A `source` has a table and no logits."""

    def __init__(self, config: ModelConfig, *, source: bool = False, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.width**-0.5)
        size = config.source_vocab_size if source else config.vocab_size
        self.table = nnx.Param(init(rngs.params(), (size, config.width)))
        if not (config.tied_output or source):
            self.output = nnx.Param(init(rngs.params(), (size, config.width)))
        self.dtype = jnp.dtype(config.dtype)
        self.tied = config.tied_output

    def embed(self, tokens: Int[Array, "b n"]) -> Float[Array, "b n width"]:
        # Rows are looked up in whole tables: from one divided by width they would have to be moved afterwards.
        return constrain(self.table[...], ("vocabulary", None))[tokens].astype(self.dtype)

    def log_probs(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Logarithms of the probabilities of all tokens, in float32."""
        table = (self.table if self.tied else self.output)[...].astype(x.dtype)
        return jax.nn.log_softmax(jnp.einsum("...e,ve->...v", x, table, preferred_element_type=jnp.float32))

    def loss(
        self,
        x: Float[Array, "t width"],
        targets: Int[Array, "t"],
        key: PRNGKeyArray | None = None,
        smoothing: float = 0.0,
    ) -> Array:
        """Negative log-likelihood of each target, of which `smoothing` is spread evenly over the vocabulary."""
        log_probs = self.log_probs(x)
        loss = -jnp.take_along_axis(log_probs, targets[:, None], -1)[:, 0]
        return (1 - smoothing) * loss - smoothing * log_probs.mean(-1) if smoothing else loss


class AdaptiveEmbedding(nnx.Module):
    """Baevski & Auli (2019): frequent tokens get wide embeddings, rarer bands narrower ones, all projected to width.

    The adaptive softmax shares both (tied embeddings, tied projections): the head scores the first band's tokens
    and one class per further band; a band's own softmax splits its class. Band 0 is scored without its projection,
    as in the paper's toolkit. Tokens must be numbered by falling frequency.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        bounds = (0, *config.adaptive_cutoffs, config.vocab_size)
        self.bounds = bounds
        self.dropout = config.adaptive_dropout
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

    def _head(self, x: Array) -> Array:
        weights = jnp.concatenate([self.tables[0][...], self.classes[...].T]).astype(x.dtype)
        return jax.nn.log_softmax(jnp.einsum("...e,ve->...v", x, weights, preferred_element_type=jnp.float32))

    def _band(self, band: int, x: Array, key: PRNGKeyArray | None) -> Array:
        hidden = x @ self.projections[band][...].T.astype(x.dtype)
        hidden = dropout(hidden, self.dropout, key, band)
        table = self.tables[band][...].astype(x.dtype)
        return jax.nn.log_softmax(jnp.einsum("...e,ve->...v", hidden, table, preferred_element_type=jnp.float32))

    def log_probs(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Logarithms of the probabilities of all tokens, in float32."""
        head, first = self._head(x), self.bounds[1]
        bands = [head[..., :first]]
        for band in range(1, len(self.tables)):
            bands.append(head[..., first + band - 1, None] + self._band(band, x, None))
        return jnp.concatenate(bands, -1)

    def loss(
        self,
        x: Float[Array, "t width"],
        targets: Int[Array, "t"],
        key: PRNGKeyArray | None = None,
        smoothing: float = 0.0,
    ) -> Array:
        """Negative log-likelihood of each target, without building the whole vocabulary's row."""
        if smoothing:
            raise InputError(f"label_smoothing={smoothing} needs the whole vocabulary: not with adaptive_cutoffs")
        head, first = self._head(x), self.bounds[1]
        band_of = jnp.searchsorted(jnp.array(self.bounds[1:-1]), targets, side="right")
        entry = jnp.where(band_of == 0, targets, first + band_of - 1)
        total = jnp.take_along_axis(head, entry[:, None], -1)[:, 0]
        for band in range(1, len(self.tables)):
            inside = band_of == band
            row = jnp.where(inside, targets - self.bounds[band], 0)
            score = jnp.take_along_axis(self._band(band, x, key), row[:, None], -1)[:, 0]
            total += jnp.where(inside, score, 0)
        return -total


def make_embedding(config: ModelConfig, *, rngs: nnx.Rngs) -> PlainEmbedding | AdaptiveEmbedding:
    """The embedding a config asks for."""
    return (AdaptiveEmbedding if config.adaptive_cutoffs else PlainEmbedding)(config, rngs=rngs)


def loss_in_chunks(
    embedding, x: Float[Array, "b n width"], targets: Int[Array, "b n"], key=None, smoothing: float = 0.0
) -> Array:
    """`embedding.loss` of every position (b, n), with only LOSS_CHUNK rows of logits alive at a time."""
    flat, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    count = -(-len(wanted) // LOSS_CHUNK)
    if count == 1:
        return embedding.loss(flat, wanted, key, smoothing).reshape(targets.shape)
    extra = count * LOSS_CHUNK - len(wanted)
    flat = jnp.pad(flat, ((0, extra), (0, 0))).reshape(count, LOSS_CHUNK, -1)
    wanted = jnp.pad(wanted, (0, extra)).reshape(count, LOSS_CHUNK)
    keys = None if key is None else jax.random.split(key, count)
    # Recomputed in the backward pass: logits are large and cheap, activations are kept.
    chunk_loss = jax.checkpoint(lambda inputs: embedding.loss(*inputs, smoothing))
    losses = jax.lax.map(chunk_loss, (flat, wanted, keys))
    return losses.reshape(-1)[: targets.size].reshape(targets.shape)


def sinusoids(positions: Int[Array, "b n"], width: int) -> Float[Array, "b n width"]:
    """sin and cos of the positions at geometric frequencies, from 1 to 1/10,000, sines first."""
    half = width // 2
    frequency = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / max(half - 1, 1))
    angle = positions[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


def dropout(x: Array, rate: float, key: PRNGKeyArray | None, fold: int) -> Array:
    """Zeroes entries at `rate` in training, which is when there is a key; `fold` tells places apart that share one."""
    if not rate or key is None:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(key, fold), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
