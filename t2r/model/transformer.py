"""The transformer: one configurable layer (`Block`), and the models built from it, `LanguageModel` and `Seq2Seq`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from t2r.attention import softmax
from t2r.attention.module import (
    AttentionShape,
    LinearAttention,
    MergedLinearAttention,
    SoftmaxAttention,
    State,
    WindowedAttention,
)
from t2r.attention.softmax import BeamCache, KVCache
from t2r.dropout import dropout, relu_and_dropout
from t2r.errors import InputError
from t2r.kernels.layer_dropout import run_or_skip
from t2r.layout import HIDDEN, STATE, constrain
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.embedding import PlainEmbedding, make_embedding, sinusoids

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,  # the tanh approximation
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "swish": jax.nn.silu,
}

# Each use of a layer's random key folds in its own number, so that no two uses draw the same bits.
_ATTENTION_DROPOUT, _FEEDFORWARD_DROPOUT, _LAYER_DROPOUT, _CROSS_ATTENTION, _CROSS_DROPOUT = range(5)
# Folded into the model's key for the encoder; decoder layer i folds in i + 1, so this is above any number of layers.
_ENCODER = 2**16


class DecodeState(NamedTuple):
    """What decoding a batch of sequences carries from step to step."""

    layers: tuple[State, ...]  # each decoder layer's state, of the kind that its attention has
    position: Int[Array, "b"]  # the number of tokens of each sequence so far
    source: tuple[State, ...] | None = None  # translation: each layer's state over the source, which never changes


class _SavesOnlyInput:
    """A norm that saves only its input for the backward pass, not three float32 arrays of the same size.

    XLA does this itself within one computation, but not across the boundaries of loops and conditionals.
    """

    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        return jax.checkpoint(super().__call__, prevent_cse=False)(x)


class LayerNorm(_SavesOnlyInput, nnx.LayerNorm):
    pass


class RMSNorm(_SavesOnlyInput, nnx.RMSNorm):
    pass


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """Layer or RMS norm over the residual stream."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.width, epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), rngs=rngs)


def make_attention(shape: AttentionShape, spec: AttentionSpec, *, rngs: nnx.Rngs) -> nnx.Module:
    """The attention module that a spec describes."""
    if spec.kind == "softmax":
        return SoftmaxAttention(shape, rngs=rngs)
    if spec.kind == "merged":
        return MergedLinearAttention(shape, spec.features, rngs=rngs)
    if spec.kind == "windowed":
        options = dict(window=spec.window, sinks=spec.sinks, rngs=rngs)
        return WindowedAttention(shape, spec.feature_map, spec.features, **options)
    return LinearAttention(shape, spec.feature_map, spec.features, rngs=rngs)


class FeedForward(nnx.Module):
    """down(activation(up(x))), or with `gated` down(activation(gate(x)) · up(x))."""

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
    """A transformer layer: causal or bidirectional attention, optionally cross attention, then feed-forward.

    Each is a residual branch. `norm_placement` is where it is normalised: before (x + f(norm(x))), after
    (norm(x + f(x))), both (x + norm(f(norm(x)))), or output (x + norm(f(x))). In `parallel` layers attention and
    feed-forward have the same input. `cross` is the attention of a translation model's decoder over the source.
    """

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
        on_attention: Callable[[str, Array, Array], None] | None = None,
    ) -> tuple[Float[Array, "b n width"], State | None]:
        """The layer's output, and its state after these tokens.

        `source` is this layer's state over the source. `on_attention(name, input, output)` is called for each
        attention, with the name "attention" or "cross".
        """
        attention_key, feedforward_key = (None, None) if key is None else jax.random.split(key)
        report = on_attention or (lambda name, inputs, outputs: None)

        def self_attention(x: Array) -> tuple[Array, State | None]:
            if self.causal:
                out, new_state = self.attention(x, state=state, mask=mask, positions=positions, key=attention_key)
            else:
                memory = self.attention.build_state(x, mask=mask, positions=positions, key=attention_key)
                out, new_state = self.attention.query_state(x, memory, positions=positions, key=attention_key), None
            report("attention", x, out)
            return out, new_state

        def cross_attention(x: Array) -> tuple[Array, None]:
            # In beam search several sequences share a source. They become more queries to its one state:
            # (sources · beams, n, width) → (sources, beams · n, width).
            sources = jax.tree.leaves(source)[0].shape[0]
            queries = x.reshape(sources, -1, x.shape[-1])
            out = self.cross.query_state(queries, source, key=_cross_key(key)).reshape(x.shape)
            report("cross", x, out)
            return out, None

        def feedforward(x: Array) -> tuple[Array, None]:
            return self.feedforward(x, feedforward_key), None

        layer_input = x
        x, state = self._add_branch(x, x, "attention", self_attention, key, _ATTENTION_DROPOUT)
        if source is not None:
            x, _ = self._add_branch(x, x, "cross", cross_attention, key, _CROSS_DROPOUT)
        feedforward_input = layer_input if self.parallel else x
        x, _ = self._add_branch(x, feedforward_input, "feedforward", feedforward, key, _FEEDFORWARD_DROPOUT)
        return constrain(x, HIDDEN), state

    def _add_branch(
        self,
        x: Array,
        branch_input: Array,
        name: str,
        branch: Callable[[Array], tuple[Array, Any]],
        key: PRNGKeyArray | None,
        fold: int,
    ) -> tuple[Array, Any]:
        """x + dropout(branch(branch_input)), normalised as `norm_placement` says; and the branch's second output."""
        norm, placement = getattr(self, f"{name}_norm"), self.norm_placement
        with jax.named_scope(name):  # the name under which profiles show the branch
            out, state = branch(norm(branch_input) if placement in ("before", "both") else branch_input)
        if placement == "output":
            out = norm(out)
        if placement == "both":
            out = getattr(self, f"{name}_out_norm")(out)
        x = x + dropout(out, self.dropout, key, fold)
        return norm(x) if placement == "after" else x, state

    def source_state(self, source: Float[Array, "b m width"], *, mask=None, key: PRNGKeyArray | None = None) -> State:
        """The state of this layer's cross attention over an encoded source: S and z, or keys and values.

        In training, `key` must be the one that the layer is then called with: random features of the source's keys
        and of the queries to them must be the same draw.
        """
        return self.cross.build_state(source, mask=mask, key=_cross_key(key))


def _cross_key(key: PRNGKeyArray | None) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, _CROSS_ATTENTION)


def _layer_key(key: PRNGKeyArray | None, layer: int | Array) -> PRNGKeyArray | None:
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
    """All layers on whole sequences, without a decoding state. `sources` has each layer's state over the source.

    With `scan_layers`, the shortest repeating pattern of layers (one layer if all have the same structure) is compiled
    once, and scanned over the stacked parameters.
    """
    checkpoint = jax.checkpoint if config.remat else lambda function: function

    def run(block: Block, x: Array, source: State | None, key: PRNGKeyArray | None) -> Array:
        if not config.layer_dropout or key is None:
            return block(x, source=source, key=key, **inputs)[0]
        graph, arrays = nnx.split(block)

        def layer(x: Array, others: tuple) -> Array:
            arrays, source, key, inputs = others
            return nnx.merge(graph, arrays)(x, source=source, key=key, **inputs)[0]

        keep = jax.random.bernoulli(jax.random.fold_in(key, _LAYER_DROPOUT), 1 - config.layer_dropout)
        return run_or_skip(layer, keep, x, (arrays, source, key, inputs))

    split = [nnx.split(block) for block in blocks] if config.scan_layers else []
    period = _period([graph for graph, _ in split]) if config.scan_layers else len(blocks)
    if period == len(blocks):
        for layer, block in enumerate(blocks):
            source = None if sources is None else sources[layer]
            x = checkpoint(functools.partial(run, block, source=source, key=_layer_key(key, layer)))(x)
        return x

    @checkpoint
    def one_period(x: Array, layers: tuple) -> tuple[Array, None]:
        first_layer, arrays, period_sources = layers
        for i in range(period):
            block = nnx.merge(split[i][0], arrays[i])
            source = None if period_sources is None else period_sources[i]
            x = run(block, x, source, _layer_key(key, first_layer + i))
        return x, None

    def stack(trees: Sequence[Any]) -> list[Any]:  # one tree for each layer of the period, stacked over periods
        return [jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees[i::period]) for i in range(period)]

    arrays = stack([arrays for _, arrays in split])
    stacked_sources = None if sources is None else stack(sources)
    return jax.lax.scan(one_period, x, (jnp.arange(0, len(blocks), period), arrays, stacked_sources))[0]


def _period(structures: Sequence[Any]) -> int:
    """The length of the shortest pattern whose repetition is the whole list."""
    count = len(structures)
    return next(
        size
        for size in range(1, count + 1)
        if count % size == 0 and all(structures[i] == structures[i % size] for i in range(count))
    )


def learned_positions(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param | None:
    """A trained vector for each position, if the config has learned positions."""
    if config.positions != "learned":
        return None
    init = nnx.initializers.normal(config.width**-0.5)
    return nnx.Param(init(rngs.params(), (config.max_positions, config.width)))


def embed(model: "LanguageModel | Encoder", embedding: nnx.Module, tokens: Array, positions: Array) -> Array:
    """The first layer's input: token embeddings plus positions."""
    config = model.config
    x = embedding.embed(tokens)
    scale = config.embedding_multiplier * (config.width**0.5 if config.scale_embedding else 1.0)
    x = x if scale == 1 else x * scale
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
        cross_specs = config.cross_attention or [None] * config.layers
        self.blocks = nnx.List(
            Block(config, spec, cross, rngs=rngs) for spec, cross in zip(config.attention, cross_specs)
        )
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
        """The last hidden layer of each token, and the state after all tokens (None if called without a state).

        `mask` is False at padding, which may be anywhere in a sequence: it has no position and never enters the state.
        A translation model takes its source's states from `state`, or from `source` if there is no `state`.
        """
        is_real = jnp.ones(tokens.shape, jnp.int32) if mask is None else mask.astype(jnp.int32)
        start = 0 if state is None else state.position[:, None]
        positions = start + jnp.cumsum(is_real, 1) - 1
        source = source if state is None else state.source
        x = dropout(self.embed(tokens, positions), self.config.dropout, key, 0)
        if state is None:
            x = run_layers(self.blocks, self.config, x, sources=source, mask=mask, positions=positions, key=key)
            return x if self.final_norm is None else self.final_norm(x), None
        states = []
        for layer, block in enumerate(self.blocks):
            x, layer_state = block(
                x,
                state=state.layers[layer],
                source=None if source is None else source[layer],
                mask=mask,
                positions=positions,
                key=_layer_key(key, layer),
            )
            states.append(layer_state)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, DecodeState(tuple(states), state.position + is_real.sum(1), state.source)

    def embed(self, tokens: Int[Array, "b n"], positions: Int[Array, "b n"]) -> Float[Array, "b n width"]:
        """The first layer's input: token embeddings plus positions."""
        return embed(self, self.embedding, tokens, positions)

    def log_probs(self, hidden: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Log-probabilities of the next token, in float32."""
        return self.embedding.log_probs(hidden)

    def logits(self, hidden: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
        """Scores whose softmax is the next token's distribution; with a plain embedding they are not normalised."""
        return self.embedding.logits(hidden)

    def greedy_token(self, hidden: Float[Array, "*b width"]) -> Int[Array, "*b"]:
        """The most probable next token."""
        return self.embedding.greedy_token(hidden)

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
        """The loss of each target given the tokens up to its position, in float32; label-smoothed by `smoothing`."""
        hidden, _ = self(tokens, source=source, mask=mask, key=key)
        return self.embedding.loss(hidden, targets, key, smoothing)

    def init_state(self, batch: int, capacity: int, source: tuple[State, ...] | None = None) -> DecodeState:
        """The state before the first token; the caches of softmax layers have space for `capacity` tokens."""
        layers = tuple(constrain_state(block.attention.init_state(batch, capacity)) for block in self.blocks)
        return DecodeState(layers, jnp.zeros(batch, jnp.int32), source)

    def reorder(self, state: DecodeState, parents: Int[Array, "sequences"], beams: int) -> DecodeState:
        """The state with sequence parents[i] at i, the sources unchanged. Each `beams` sequences are of one source,
        and their parents are among them."""

        def move(layer: State) -> State:
            if isinstance(layer, BeamCache):
                return layer.reordered(parents)
            return jax.tree.map(lambda x: x[parents] if x.ndim else x, layer)

        return DecodeState(tuple(map(move, state.layers)), state.position[parents], state.source)


class Encoder(nnx.Module):
    """A bidirectional encoder of the source. It stays softmax: it runs once per sentence, not once per token."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = None if config.shared_embedding else PlainEmbedding(config, source=True, rngs=rngs)
        self.positions = learned_positions(config, rngs)
        self.embedding_norm = make_norm(config, rngs=rngs) if config.embedding_norm else None
        self.blocks = nnx.List(Block(config, causal=False, rngs=rngs) for _ in range(config.encoder_layers))
        self.final_norm = make_norm(config, rngs=rngs) if config.final_norm else None

    def __call__(self, tokens: Array, mask: Array, shared: nnx.Module, key: PRNGKeyArray | None = None) -> Array:
        """The last hidden layer of each source token; `shared` is the target's embedding, used if they share one."""
        positions = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
        embedding = shared if self.embedding is None else self.embedding
        x = embed(self, embedding, tokens, positions)
        x = dropout(x, self.config.dropout, key, 0)
        x = run_layers(self.blocks, self.config, x, mask=mask, positions=positions, key=key)
        return x if self.final_norm is None else self.final_norm(x)


class Seq2Seq(LanguageModel):
    """A translation model: an encoder of the source, and a language model of the target that attends to it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)

    def encode(
        self, source: Int[Array, "b m"], mask: Bool[Array, "b m"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "b m width"]:
        """The encoder's last hidden layer."""
        encoder_key = None if key is None else jax.random.fold_in(key, _ENCODER)
        return self.encoder(source, mask, self.embedding, encoder_key)

    def source_states(
        self, source: Int[Array, "b m"], mask: Bool[Array, "b m"], key: PRNGKeyArray | None = None
    ) -> tuple[State, ...]:
        """Each decoder layer's state over the source, built once per sentence: S and z, or keys and values."""
        hidden = self.encode(source, mask, key)
        return tuple(
            constrain_state(block.source_state(hidden, mask=mask, key=_layer_key(key, layer)))
            for layer, block in enumerate(self.blocks)
        )


def make_model(config: ModelConfig, *, rngs: nnx.Rngs) -> LanguageModel:
    """The model that a config describes, with random parameters."""
    return (Seq2Seq if config.encoder_layers else LanguageModel)(config, rngs=rngs)


def constrain_state(state: State) -> State:
    """The state of a layer, sharded by batch and by heads if a mesh is set."""
    arrays = state._asdict().items()
    return state._replace(**{name: constrain(x, STATE[name]) for name, x in arrays if x is not None})


def check_length(config: ModelConfig, length: int) -> None:
    """Raises an error if a model has no positions for sequences of this length."""
    if config.max_positions and length > config.max_positions:
        raise InputError(
            f"{length} tokens are too many for this model's {config.positions} positions (max_positions="
            f"{config.max_positions}): use shorter sequences or generate fewer tokens"
        )


def grow(state: DecodeState, extra: int) -> DecodeState:
    """The state with space for `extra` more tokens in the caches of softmax layers; linear layers need none."""

    def grow_layer(layer: State) -> State:
        if not isinstance(layer, KVCache):
            return layer
        return softmax.resized(layer, max(int(layer.index) + extra, layer.capacity))

    return state._replace(layers=tuple(grow_layer(layer) for layer in state.layers))
