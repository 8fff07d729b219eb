"""What each attention of a decoder reads while the model runs on a batch: what all measurements of attention need."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from t2r.batch import PADDING, Batch, inputs_and_targets
from t2r.model.transformer import LanguageModel


class Inputs(NamedTuple):
    """The inputs of one attention. Cross attention takes its keys from `source`, causal attention from `x`, too."""

    name: str  # such as `3.attention` or `3.cross`
    attention: nnx.Module
    x: Float[Array, "b n width"]
    real: Bool[Array, "b n"]  # False at padding
    positions: Int[Array, "b n"]
    source: Float[Array, "b m width"] | None = None
    real_source: Bool[Array, "b m"] | None = None

    def weights(self) -> Float[Array, "b h n m"]:
        """The weight of each key for each query."""
        if self.source is None:
            return self.attention.weights(self.x, self.positions)
        return self.attention.cross_weights(self.x, self.source, self.real_source)


def attention_inputs(model: LanguageModel, batch: Batch) -> list[Inputs]:
    """The inputs of each attention of the decoder, in the order in which they are used."""
    tokens, targets = inputs_and_targets(batch)
    return inputs_on(model, tokens, targets != PADDING, batch.source)


def inputs_on(
    model: LanguageModel, tokens: Int[Array, "b n"], real: Bool[Array, "b n"], source: Int[Array, "b m"] | None = None
) -> list[Inputs]:
    """As `attention_inputs`, for tokens that need no targets."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    encoded, real_source = None, None
    if source is not None:
        real_source = source != PADDING
        encoded = model.encode(jnp.maximum(source, 0), real_source)
    seen = []

    def look(layer: int, name: str, x: Array, outputs: Array) -> None:
        beside = (encoded, real_source) if name == "cross" else (None, None)
        seen.append(Inputs(f"{layer}.{name}", getattr(model.blocks[layer], name), x, real, positions, *beside))

    x = model.embed(tokens, positions)
    for layer, block in enumerate(model.blocks):
        state = None if encoded is None else block.source_state(encoded, mask=real_source)
        x, _ = block(x, source=state, positions=positions, on_attention=functools.partial(look, layer))
    return seen
