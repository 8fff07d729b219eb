"""Where a model looks: the weight that each token gives to each earlier one, in every head of every layer."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from t2r.errors import InputError
from t2r.model.transformer import LanguageModel, check_length


def attention_maps(model: LanguageModel, tokens: Sequence[int]) -> Float[np.ndarray, "layers h n n"]:
    """The attention weights of a language model on one text: [layer, head, query, key].

    Each row of softmax sums to 1. A row of T2R sums to less where its normaliser is at its least value.
    """
    if model.config.encoder_layers:
        raise InputError("attention maps are those of language models: this is a translation model")
    if not len(tokens):
        raise InputError("attention maps need a text of at least one token")
    check_length(model.config, len(tokens))
    return np.asarray(_maps(*nnx.split(model), jnp.asarray([tokens], jnp.int32))[:, 0])


@functools.partial(jax.jit, static_argnums=0)
def _maps(graph: nnx.GraphDef, arrays: nnx.State, tokens: Int[Array, "b n"]) -> Float[Array, "layers b h n n"]:
    model, maps = nnx.merge(graph, arrays), []
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def look(layer: int, name: str, inputs: Array, outputs: Array) -> None:
        maps.append(model.blocks[layer].attention.weights(inputs, positions))

    x = model.embed(tokens, positions)
    for layer, block in enumerate(model.blocks):
        x, _ = block(x, positions=positions, on_attention=functools.partial(look, layer))
    return jnp.stack(maps)
