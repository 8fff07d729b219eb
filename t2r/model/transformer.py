"""The transformer: one block for all families, and the two models made of it: LanguageModel and Seq2Seq."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention import softmax
from t2r.attention.module import AttentionShape, LinearAttention, MergedLinearAttention, SoftmaxAttention, State
from t2r.attention.softmax import KVCache
from t2r.dropout import dropout, relu_and_dropout
from t2r.errors import InputError
from t2r.kernels.layer_dropout import run_or_skip
from t2r.layout import HIDDEN, KV_CACHE, LINEAR_STATE, constrain
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.embedding import PlainEmbedding, make_embedding, sinusoids

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,  # by tanh
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "swish": jax.nn.silu,
}


class DecodeState(NamedTuple):
    """What a model remembers of a batch of texts: each layer's state, how many tokens each text has, and in
    translation each layer's state of the source, which decoding reads and never changes."""

    layers: tuple[State, ...]
    position: Int[Array, "b"]
    source: tuple[State, ...] | None = None


class _KeepsInput:
    """A norm of which the backward pass keeps the input alone, and not three float32 arrays as large as it.

    In one long program the compiler would see to that itself; it does not across the borders of loops and conditions.
    """

    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        return jax.checkpoint(super().__call__, prevent_cse=False)(x)


class LayerNorm(_KeepsInput, nnx.LayerNorm):
    pass


class RMSNorm(_KeepsInput, nnx.RMSNorm):
    pass


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """Layer or RMS norm over the residual stream."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.width, epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), rngs=rngs)


def make_attention(shape: AttentionShape, spec: AttentionSpec, *, rngs: nnx.Rngs) -> nnx.Module:
    """The attention module a spec asks for."""
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
        if self.activation == "relu" and self.gate is None:
            return self.down(relu_and_dropout(self.up(x), self.dropout, key))
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        return self.down(dropout(hidden, self.dropout, key))


class Block(nnx.Module):
    """Attention, in a translation model's decoder attention over the source, and feed-forward, each on a residual
    branch, with the norm before it, after it, or both; in `parallel` layers both read the same input."""

    def __init__(
        self,
        config: ModelConfig,
        spec: AttentionSpec = AttentionSpec(),
        cross: AttentionSpec | None = None,
        *,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = make_attention(config.shape_of(spec), spec, rngs=rngs)
        if cross is not None:
            self.cross_norm = make_norm(config, rngs=rngs)
            self.cross = make_attention(config.cross_shape, cross, rngs=rngs)
        self.feedforward_norm = make_norm(config, rngs=rngs)
        self.feedforward = FeedForward(config, rngs=rngs)
        if config.norm_placement == "both":
            self.attention_out_norm = make_norm(config, rngs=rngs)
            self.feedforward_out_norm = make_norm(config, rngs=rngs)
        self.causal, self.parallel = causal, config.parallel
        self.norm_placement = config.norm_placement
        self.dropout = config.dropout

    def __call__(
        self,
        x: Float[Array, "b n width"],
        *,
        state: State | None = None,
        source: State | None = None,
        mask: Bool[Array, "b n"] | None = None,
        positions: Int[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
        listen: Callable[[str, Array, Array], None] | None = None,
    ) -> tuple[Float[Array, "b n width"], State | None]:
        """The layer; `listen` is told the name of each attention, what it hears and what it says."""
        attention_key, feedforward_key = (None, None) if key is None else jax.random.split(key)
        tell = listen or (lambda name, heard, said: None)

        def attend(x: Array) -> tuple[Array, State | None]:
            if self.causal:
                out, after = self.attention(x, state=state, mask=mask, positions=positions, key=attention_key)
            else:
                memory = self.attention.build_state(x, mask=mask, positions=positions, key=attention_key)
                out, after = self.attention.query_state(x, memory, positions=positions, key=attention_key), None
            tell("attention", x, out)
            return out, after

        def attend_to_source(x: Array) -> tuple[Array, None]:
            # Several texts may be translations of one source (beams): they are so many more queries to it.
            queries = x.reshape(jax.tree.leaves(source)[0].shape[0], -1, x.shape[-1])
            out = self.cross.query_state(queries, source, key=_cross_key(key)).reshape(x.shape)
            tell("cross", x, out)
            return out, None

        def feed(x: Array) -> tuple[Array, None]:
            return self.feedforward(x, feedforward_key), None

        before = x
        x, state = self._branch(x, x, "attention", attend, key, 0)
        if source is not None:
            x, _ = self._branch(x, x, "cross", attend_to_source, key, 4)
        x, _ = self._branch(x, before if self.parallel else x, "feedforward", feed, key, 1)
        return constrain(x, HIDDEN), state

    def _branch(
        self, x: Array, read: Array, name: str, function: Callable[[Array], tuple[Array, Any]], key, fold: int
    ) -> tuple[Array, Any]:
        """x + function(what is read), normalised where the model does it, and whatever else the function returns."""
        norm = getattr(self, f"{name}_norm")
        with jax.named_scope(name):  # profiles say where time goes
            out, other = function(read if self.norm_placement == "after" else norm(read))
        if self.norm_placement == "both":
            out = getattr(self, f"{name}_out_norm")(out)
        x = x + dropout(out, self.dropout, key, fold)
        return norm(x) if self.norm_placement == "after" else x, other

    def source_state(self, source: Float[Array, "b m width"], *, mask=None, key: PRNGKeyArray | None = None) -> State:
        """What this layer keeps of an encoded source; in training, with the key of the call that will read it."""
        return self.cross.build_state(source, mask=mask, key=_cross_key(key))


def _cross_key(key: PRNGKeyArray | None) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, 3)


def _layer_key(key: PRNGKeyArray | None, layer: int) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, layer + 1)


def run_layers(
    blocks: Sequence[Block],
    config: ModelConfig,
    x: Float[Array, "b n width"],
    *,
    sources: Sequence[State] | None = None,
    key: PRNGKeyArray | None = None,
    **inputs: Any,
) -> Float[Array, "b n width"]:
    """All layers on whole sequences. With `scan_layers`, layers that are built alike are one loop, compiled once."""
    recompute = jax.checkpoint if config.remat else lambda function: function

    def run(block: Block, x: Array, source: State | None, key: PRNGKeyArray | None) -> Array:
        if not config.layer_dropout or key is None:
            return block(x, source=source, key=key, **inputs)[0]
        graph, arrays = nnx.split(block)

        def layer(x: Array, others: tuple) -> Array:
            arrays, source, key, inputs = others
            return nnx.merge(graph, arrays)(x, source=source, key=key, **inputs)[0]

        keep = jax.random.bernoulli(jax.random.fold_in(key, 2), 1 - config.layer_dropout)
        return run_or_skip(layer, keep, x, (arrays, source, key, inputs))

    split = [nnx.split(block) for block in blocks] if config.scan_layers else []
    period = _period([graph for graph, _ in split]) if config.scan_layers else len(blocks)
    if period == len(blocks):
        for layer, block in enumerate(blocks):
            source = None if sources is None else sources[layer]
            x = recompute(functools.partial(run, block, source=source, key=_layer_key(key, layer)))(x)
        return x

    @recompute
    def one_period(x: Array, layers: tuple) -> tuple[Array, None]:
        first, arrays, seen = layers
        for place in range(period):
            block = nnx.merge(split[place][0], arrays[place])
            source = None if seen is None else seen[place]
            x = run(block, x, source, _layer_key(key, first + place))
        return x, None

    def stacked(values: Sequence[Any]) -> list[Any]:  # for each place in the period, its layers as one array
        return [jax.tree.map(lambda *leaves: jnp.stack(leaves), *values[place::period]) for place in range(period)]

    arrays = stacked([arrays for _, arrays in split])
    seen = None if sources is None else stacked(sources)
    return jax.lax.scan(one_period, x, (jnp.arange(0, len(blocks), period), arrays, seen))[0]


def _period(kinds: Sequence[Any]) -> int:
    """The length of the shortest pattern that, repeated, makes up the sequence."""
    count = len(kinds)
    return next(
        size
        for size in range(1, count + 1)
        if count % size == 0 and all(kinds[i] == kinds[i % size] for i in range(count))
    )


def learned_positions(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param | None:
    """A vector for each position, if the config asks for them."""
    if config.positions != "learned":
        return None
    init = nnx.initializers.normal(config.width**-0.5)
    return nnx.Param(init(rngs.params(), (config.max_positions, config.width)))


def embed(model: "LanguageModel | Encoder", embedding: nnx.Module, tokens: Array, positions: Array) -> Array:
    """Tokens and where they stand, as the first layer's input."""
    config = model.config
    x = embedding.embed(tokens)
    x = x * config.width**0.5 if config.scale_embedding else x
    if config.positions.startswith("sinusoidal"):
        is_open = config.positions == "sinusoidal_open"
        x += sinusoids(positions + config.position_offset, config.width, is_open=is_open)
    elif model.positions is not None:
        x += model.positions[...][positions]
    x = x.astype(jnp.dtype(config.dtype))
    return constrain(x if model.embedding_norm is None else model.embedding_norm(x), HIDDEN)


class LanguageModel(nnx.Module):
    """A decoder-only language model. A `key` means training: dropout, and fresh random features."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = make_embedding(config, rngs=rngs)
        self.positions = learned_positions(config, rngs)
        self.embedding_norm = make_norm(config, rngs=rngs) if config.embedding_norm else None
        cross = config.cross_attention or [None] * config.layers
        self.blocks = nnx.List(Block(config, spec, over, rngs=rngs) for spec, over in zip(config.attention, cross))
        self.final_norm = make_norm(config, rngs=rngs) if config.final_norm else None

    def __call__(
        self,
        tokens: Int[Array, "b n"],
        *,
        state: DecodeState | None = None,
        source: tuple[State, ...] | None = None,
        mask: Bool[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n width"], DecodeState | None]:
        """The last hidden layer of each token, and the state after them (None if none was given).

        `mask` is False at padding, which may stand anywhere: it takes no position and leaves no trace in the state.
        A translation model sees its source through the state, or without one through `source`.
        """
        real = jnp.ones(tokens.shape, jnp.int32) if mask is None else mask.astype(jnp.int32)
        start = 0 if state is None else state.position[:, None]
        positions = start + jnp.cumsum(real, 1) - 1
        source = source if state is None else state.source
        x = dropout(self.embed(tokens, positions), self.config.dropout, key, 0)
        if state is None:
            x = run_layers(self.blocks, self.config, x, sources=source, mask=mask, positions=positions, key=key)
            return x if self.final_norm is None else self.final_norm(x), None
        states = []
        for layer, block in enumerate(self.blocks):
            past, seen = state.layers[layer], None if source is None else source[layer]
            x, past = block(x, state=past, source=seen, mask=mask, positions=positions, key=_layer_key(key, layer))
            states.append(past)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, DecodeState(tuple(states), state.position + real.sum(1), state.source)

    def embed(self, tokens: Int[Array, "b n"], positions: Int[Array, "b n"]) -> Float[Array, "b n width"]:
        """The first layer's input."""
        return embed(self, self.embedding, tokens, positions)

    def log_probs(self, hidden: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Logarithms of the next token's probabilities."""
        return self.embedding.log_probs(hidden)

    def logits(self, hidden: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """What these probabilities are the softmax of, computed as cheaply as possible."""
        return self.embedding.logits(hidden)

    def greedy_token(self, hidden: Float[Array, "*b width"]) -> Int[Array, "*b"]:
        """The next token of greedy search."""
        return jnp.argmax(self.logits(hidden), -1).astype(jnp.int32)

    def losses(
        self,
        tokens: Int[Array, "b n"],
        targets: Int[Array, "b n"],
        *,
        source: tuple[State, ...] | None = None,
        mask: Bool[Array, "b n"] | None = None,
        key: PRNGKeyArray | None = None,
        smoothing: float = 0.0,
    ) -> Float[Array, "b n"]:
        """Negative log-likelihood of each target given the tokens up to its place, in float32."""
        hidden, _ = self(tokens, source=source, mask=mask, key=key)
        return self.embedding.loss(hidden, targets, key, smoothing)

    def init_state(self, batch: int, capacity: int, source: tuple[State, ...] | None = None) -> DecodeState:
        """The state before the first token; `capacity` tokens fit into the caches of softmax layers."""
        layers = tuple(constrain_state(block.attention.init_state(batch, capacity)) for block in self.blocks)
        return DecodeState(layers, jnp.zeros(batch, jnp.int32), source)


class Encoder(nnx.Module):
    """Reads a source in both directions. Its attention stays softmax: it works once per sentence, not per token."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = None if config.shared_embedding else PlainEmbedding(config, source=True, rngs=rngs)
        self.positions = learned_positions(config, rngs)
        self.embedding_norm = make_norm(config, rngs=rngs) if config.embedding_norm else None
        self.blocks = nnx.List(Block(config, causal=False, rngs=rngs) for _ in range(config.encoder_layers))
        self.final_norm = make_norm(config, rngs=rngs) if config.final_norm else None

    def __call__(self, tokens: Array, mask: Array, shared: nnx.Module, key: PRNGKeyArray | None = None) -> Array:
        """The last hidden layer of each token; `shared` is the target's embedding, for models that have but one."""
        positions = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
        embedding = shared if self.embedding is None else self.embedding
        x = embed(self, embedding, tokens, positions)
        x = dropout(x, self.config.dropout, key, 0)
        x = run_layers(self.blocks, self.config, x, mask=mask, positions=positions, key=key)
        return x if self.final_norm is None else self.final_norm(x)


class Seq2Seq(LanguageModel):
    """A translation model: a language model of the target that also sees a source."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)

    def encode(
        self, source: Int[Array, "b m"], mask: Bool[Array, "b m"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "b m width"]:
        """The encoder's last hidden layer."""
        return self.encoder(source, mask, self.embedding, None if key is None else jax.random.fold_in(key, 2**16))

    def source_states(
        self, source: Int[Array, "b m"], mask: Bool[Array, "b m"], key: PRNGKeyArray | None = None
    ) -> tuple[State, ...]:
        """Each decoder layer's state of the source, built once per sentence: S and z, or keys and values."""
        hidden = self.encode(source, mask, key)
        return tuple(
            constrain_state(block.source_state(hidden, mask=mask, key=_layer_key(key, layer)))
            for layer, block in enumerate(self.blocks)
        )


def make_model(config: ModelConfig, *, rngs: nnx.Rngs) -> LanguageModel:
    """The model a config describes, with random parameters."""
    return (Seq2Seq if config.encoder_layers else LanguageModel)(config, rngs=rngs)


def constrain_state(state: State) -> State:
    """The state of a layer, divided among devices where a mesh is set: by texts and by heads."""
    names = KV_CACHE if isinstance(state, KVCache) else LINEAR_STATE
    fields = {name: constrain(getattr(state, name), names[name]) for name in names if getattr(state, name) is not None}
    return state._replace(**fields)


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

    return state._replace(layers=tuple(more(layer) for layer in state.layers))
