"""The transformer: one block for all families, and the language model made of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention import softmax
from t2r.attention.module import LinearAttention, MergedLinearAttention, SoftmaxAttention, State
from t2r.attention.softmax import KVCache
from t2r.errors import InputError
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.embedding import dropout, loss_in_chunks, make_embedding, sinusoids

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "swish": jax.nn.silu}


class DecodeState(NamedTuple):
    """What a language model remembers of a batch of texts: each layer's state, and how many tokens each text has."""

    layers: tuple[State, ...]
    position: Int[Array, "b"]


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """Layer or RMS norm over the residual stream."""
    kind = nnx.LayerNorm if config.norm == "layer" else nnx.RMSNorm
    return kind(config.width, epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), rngs=rngs)


def make_attention(config: ModelConfig, spec: AttentionSpec, *, rngs: nnx.Rngs) -> nnx.Module:
    """The attention module a spec asks for."""
    shape = config.attention_heads
    if spec.kind == "softmax":
        return SoftmaxAttention(shape, rngs=rngs)
    if spec.kind == "merged":
        return MergedLinearAttention(shape, spec.features, rngs=rngs)
    return LinearAttention(shape, spec.feature_map, spec.features, rngs=rngs)


class FeedForward(nnx.Module):
    """Two linear layers around an activation; with `gated`, a third that multiplies it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def dense(inputs: int, outputs: int) -> nnx.Linear:
            init = nnx.initializers.xavier_uniform()
            dtype = jnp.dtype(config.dtype)
            return nnx.Linear(inputs, outputs, use_bias=config.bias, dtype=dtype, kernel_init=init, rngs=rngs)

        self.up = dense(config.width, config.feedforward)
        self.gate = dense(config.width, config.feedforward) if config.gated else None
        self.down = dense(config.feedforward, config.width)
        self.activation, self.dropout = config.activation, config.activation_dropout

    def __call__(self, x: Array, key: PRNGKeyArray | None = None) -> Array:
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        return self.down(dropout(hidden, self.dropout, key, 0))


class Block(nnx.Module):
    """Attention and feed-forward, each on a residual branch, with the norm before or after."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, *, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = make_attention(config, spec, rngs=rngs)
        self.feedforward_norm = make_norm(config, rngs=rngs)
        self.feedforward = FeedForward(config, rngs=rngs)
        self.norm_before = config.norm_placement == "before"
        self.dropout, self.layer_dropout = config.dropout, config.layer_dropout

    def __call__(
        self,
        x: Float[Array, "b n width"],
        *,
        state: State | None = None,
        mask: Bool[Array, "b n"] | None = None,
        positions: Int[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n width"], State | None]:
        skipped = x
        attention_key, feedforward_key = (None, None) if key is None else jax.random.split(key)

        branch = self.attention_norm(x) if self.norm_before else x
        branch, state = self.attention(branch, state=state, mask=mask, positions=positions, key=attention_key)
        x = x + dropout(branch, self.dropout, key, 0)
        x = x if self.norm_before else self.attention_norm(x)

        branch = self.feedforward_norm(x) if self.norm_before else x
        x = x + dropout(self.feedforward(branch, feedforward_key), self.dropout, key, 1)
        x = x if self.norm_before else self.feedforward_norm(x)

        if self.layer_dropout and key is not None:
            keep = jax.random.bernoulli(jax.random.fold_in(key, 2), 1 - self.layer_dropout)
            x = jnp.where(keep, x, skipped)
        return x, state


class LanguageModel(nnx.Module):
    """A decoder-only language model. A `key` means training: dropout, and fresh random features."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = make_embedding(config, rngs=rngs)
        if config.positions == "learned":
            init = nnx.initializers.normal(config.width**-0.5)
            self.positions = nnx.Param(init(rngs.params(), (config.max_positions, config.width)))
        self.blocks = nnx.List(Block(config, spec, rngs=rngs) for spec in config.attention)
        self.final_norm = make_norm(config, rngs=rngs) if config.final_norm else None

    def __call__(
        self,
        tokens: Int[Array, "b n"],
        *,
        state: DecodeState | None = None,
        mask: Bool[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n width"], DecodeState | None]:
        """The last hidden layer of each token, and the state after them (None if none was given).

        `mask` is False at padding, which may stand anywhere: it takes no position and leaves no trace in the state.
        """
        real = jnp.ones(tokens.shape, jnp.int32) if mask is None else mask.astype(jnp.int32)
        start = 0 if state is None else state.position[:, None]
        positions = start + jnp.cumsum(real, 1) - 1
        x = dropout(self._embed(tokens, positions), self.config.dropout, key, 0)
        states = []
        for layer, block in enumerate(self.blocks):
            layer_key = None if key is None else jax.random.fold_in(key, layer + 1)
            past = None if state is None else state.layers[layer]
            x, past = block(x, state=past, mask=mask, positions=positions, key=layer_key)
            states.append(past)
        x = x if self.final_norm is None else self.final_norm(x)
        if state is None:
            return x, None
        return x, DecodeState(tuple(states), state.position + real.sum(1))

    def _embed(self, tokens: Array, positions: Array) -> Array:
        config = self.config
        x = self.embedding.embed(tokens)
        x = x * config.width**0.5 if config.scale_embedding else x
        if config.positions == "sinusoidal":
            x += sinusoids(positions, config.width)
        elif config.positions == "learned":
            x += self.positions[...][positions]
        return x.astype(jnp.dtype(config.dtype))

    def log_probs(self, hidden: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Logarithms of the next token's probabilities."""
        return self.embedding.log_probs(hidden)

    def losses(self, tokens: Int[Array, "b n"], targets: Int[Array, "b n"], *, mask=None, key=None) -> Array:
        """Negative log-likelihood of each target given the tokens up to its place (b, n), in float32."""
        hidden, _ = self(tokens, mask=mask, key=key)
        return loss_in_chunks(self.embedding, hidden, targets, key)

    def init_state(self, batch: int, capacity: int) -> DecodeState:
        """The state before the first token; `capacity` tokens fit into the caches of softmax layers."""
        layers = tuple(block.attention.init_state(batch, capacity) for block in self.blocks)
        return DecodeState(layers, jnp.zeros(batch, jnp.int32))


def check_length(config: ModelConfig, length: int) -> None:
    """Refuses sequences that learned positions do not reach."""
    if config.positions == "learned" and length > config.max_positions:
        raise InputError(
            f"{length} tokens are more than this model's learned positions reach (max_positions="
            f"{config.max_positions}): shorten the prompt or generate less"
        )


def grow(state: DecodeState, extra: int) -> DecodeState:
    """Makes room for `extra` more tokens in the caches of softmax layers; linear layers need none."""

    def more(layer: State) -> State:
        return softmax.grow(layer, int(layer.index) + extra) if isinstance(layer, KVCache) else layer

    return DecodeState(tuple(more(layer) for layer in state.layers), state.position)
