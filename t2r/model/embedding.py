"""Token embeddings and the output layers tied to them, plain and adaptive; sinusoidal positions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.dropout import dropout
from t2r.errors import InputError
from t2r.layout import constrain
from t2r.model.config import ModelConfig
from t2r.model.cross_entropy import LogitInputs, cross_entropy, teacher_cross_entropy
from t2r.model.largest import largest


class TeacherOutputs(NamedTuple):
    """A teacher's last hidden layer `x`, the embedding that turns it into logits, and its weight in the loss."""

    embedding: Any
    x: Float[Array, "b n width"]
    weight: float
    top_k: int = 0  # how many of its likeliest tokens count; 0: all


class OutputLayer(nnx.Module):
    """What decoding asks of an output layer, whatever its tables: from its `logits` and `log_probs`."""

    def greedy_token(self, x: Float[Array, "*b width"]) -> Int[Array, "*b"]:
        """The most probable token."""
        return jnp.argmax(self.logits(x), -1).astype(jnp.int32)

    def likeliest(
        self, x: Float[Array, "b width"], count: int, always: int
    ) -> tuple[Float[Array, "b count"], Int[Array, "b count"], Float[Array, "b"]]:
        """The log-probabilities of the `count` likeliest tokens (of all, if there are fewer), largest first; these
        tokens; and the log-probability of the token `always`."""
        log_probs = self.log_probs(x)
        return *largest(log_probs, min(count, log_probs.shape[-1])), log_probs[:, always]


class PlainEmbedding(OutputLayer):
    """An embedding table; the logits are x tableᵀ, or x outputᵀ if `tied_output` is False.

    With `source` it embeds the source language, and has no output layer.
    """

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
        # The table is gathered along its width before the lookup: otherwise the vectors are resharded after it.
        return constrain(self.table[...], ("vocabulary", None))[tokens].astype(self.dtype)

    def output_table(self) -> Float[Array, "vocab width"]:
        """The table whose product with a hidden vector is its logits."""
        return (self.table if self.tied else self.output)[...]

    def log_probs(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Log-probabilities of the whole vocabulary, in float32."""
        return jax.nn.log_softmax(self.logits(x))

    def likeliest(self, x: Float[Array, "b width"], count: int, always: int) -> tuple[Array, Array, Array]:
        logits = self.logits(x)
        values, tokens = largest(logits, min(count, logits.shape[-1]))
        # logsumexp, whose maximum is known; only the logits that are returned are normalised.
        total = values[:, 0] + jnp.log(jnp.exp(logits - values[:, :1]).sum(-1))
        return values - total[:, None], tokens, logits[:, always] - total

    def logits(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """x tableᵀ + bias, in float32."""
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
        mask: Bool[Array, "b n"] | None = None,
        teacher: TeacherOutputs | None = None,
    ) -> Float[Array, "b n"]:
        """Cross-entropy with each target, label-smoothed, mixed with a teacher's distribution: see `cross_entropy`.

        0 where `mask` is False. The `key` is for the adaptive embedding's dropout and is not used here.
        """
        teacher_inputs = teacher and teacher.embedding._logit_inputs(teacher.x)
        weight, top_k = (teacher.weight, teacher.top_k) if teacher else (0.0, 0)
        student = self._logit_inputs(x)
        return cross_entropy(student, targets, mask, smoothing, teacher_inputs, weight, teacher_top_k=top_k)

    def _logit_inputs(self, x: Float[Array, "b n width"]) -> LogitInputs:
        table = constrain(self.output_table(), ("vocabulary", None))
        return LogitInputs(x, table, None if self.bias is None else self.bias[...])


class AdaptiveEmbedding(OutputLayer):
    """Adaptive input embeddings and adaptive softmax (Baevski & Auli, 2019), with tied tables and tied projections.

    The vocabulary, sorted by falling frequency, is cut into bands. Each band has narrower embeddings than the one
    before, and a projection to the model's width. The head's softmax covers the tokens of band 0 and one class for
    each further band b: p(token) = p(class of b) · p(token | b). Band 0 is scored without its projection, as in
    fairseq, which the paper used.
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
            in_band = (tokens >= low) & (tokens < high)
            table = constrain(table[...], ("vocabulary", None))
            embedded = table[jnp.where(in_band, tokens - low, 0)].astype(self.dtype)
            x += jnp.where(in_band[..., None], embedded @ projection[...].astype(self.dtype), 0)
        return x

    def _head(self) -> Float[Array, "first_band_and_classes width"]:
        """The head's output table: the tokens of band 0, then the classes of the further bands."""
        return jnp.concatenate([self.tables[0][...], self.classes[...].T])

    def _hidden(self, band: int, x: Float[Array, "*b width"], key: PRNGKeyArray | None) -> Float[Array, "*b narrow"]:
        """x projected to the width of a further band's table, with dropout."""
        return dropout(x @ self.projections[band][...].T.astype(x.dtype), self.dropout, key, band)

    def log_probs(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Log-probabilities of the whole vocabulary, in float32."""

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
        """The log-probabilities: logits of different bands are not comparable before they are normalised."""
        return self.log_probs(x)

    def loss(
        self,
        x: Float[Array, "b n width"],
        targets: Int[Array, "b n"],
        key: PRNGKeyArray | None = None,
        smoothing: float = 0.0,
        *,
        mask: Bool[Array, "b n"] | None = None,
        teacher: TeacherOutputs | None = None,
    ) -> Float[Array, "b n"]:
        """Cross-entropy with each target, mixed with a teacher's distribution; 0 where `mask` is False."""
        if smoothing:
            raise InputError(
                f"label_smoothing={smoothing} does not work with adaptive_cutoffs, which score no token outside its "
                f"own band: set label_smoothing=0"
            )
        total = 0.0
        if teacher is None or teacher.weight < 1:
            total = self._target_loss(x, targets, key)
        if teacher is not None:
            teacher_loss = teacher_cross_entropy(
                self.log_probs, x, teacher.embedding.log_probs, teacher.x, teacher.top_k
            )
            total = (1 - teacher.weight) * total + teacher.weight * teacher_loss
        return total if mask is None else jnp.where(mask, total, 0)

    def _target_loss(self, x: Array, targets: Array, key: PRNGKeyArray | None) -> Float[Array, "b n"]:
        """-log p(target); a band's table is multiplied only with the tokens whose target is in the band."""
        first = self.bounds[1]
        target_band = jnp.searchsorted(jnp.array(self.bounds[1:-1]), targets, side="right")
        head = LogitInputs(x, self._head())
        head_target = jnp.where(target_band == 0, targets, first + target_band - 1)
        total = cross_entropy(head, head_target)
        for band in range(1, len(self.tables)):
            in_band, table = target_band == band, constrain(self.tables[band][...], ("vocabulary", None))
            band_target = jnp.where(in_band, targets - self.bounds[band], 0)
            inputs = LogitInputs(self._hidden(band, x, key), table)
            total += cross_entropy(inputs, band_target, in_band, rare=True, kernels=self.kernels)
        return total


def make_embedding(config: ModelConfig, *, rngs: nnx.Rngs) -> PlainEmbedding | AdaptiveEmbedding:
    """The embedding of the target vocabulary, adaptive if the config has cutoffs."""
    return (AdaptiveEmbedding if config.adaptive_cutoffs else PlainEmbedding)(config, rngs=rngs)


def sinusoids(positions: Int[Array, "b n"], width: int, *, is_open: bool = False) -> Float[Array, "b n width"]:
    """[sin(position · f_i), cos(position · f_i)] at the frequencies f_i = 10,000^(−i/(width/2 − 1)), sines first.

    The last frequency is 1/10,000, as in fairseq, the paper's toolkit. With `is_open` the exponent is −i/(width/2) and
    1/10,000 is not reached, as in Marian.
    """
    half = width // 2
    frequency = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / (half if is_open else max(half - 1, 1)))
    angle = positions[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
