"""Attention transfer: each converted attention learns alone to say what the one it replaces says to the same input.

What flows on from layer to layer is the teacher's, so that all of them learn at once, and none from another's errors;
afterwards they are finetuned together. After Zhang et al. (2024), "LoLCATs", who train φ alone.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2r.attention.module import is_linear
from t2r.batch import PADDING, Batch, inputs_and_targets
from t2r.errors import InputError
from t2r.model.parameters import linear_attention_names
from t2r.model.transformer import LanguageModel


def converted(model: LanguageModel) -> list[str]:
    """The attention that learns."""
    found = linear_attention_names(model)
    if not found:
        raise InputError("attention transfer is for converted layers, and the model has none")
    return found


def transfer_losses(
    model: LanguageModel, teacher: LanguageModel, batch: Batch
) -> tuple[dict[str, Float[Array, ""]], Int[Array, ""]]:
    """How far each converted attention is from the teacher's, for each token, added up, and how many tokens there are.

    A distance is that of the outputs, squared, over the square of the teacher's: 0 is alike, 1 as good as nothing.
    """
    tokens, targets = inputs_and_targets(batch)
    counts = targets != PADDING
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, encoded, inside, found = teacher.embed(tokens, positions), None, None, {}
    if batch.source is not None:
        inside = batch.source != PADDING
        encoded = teacher.encode(jnp.maximum(batch.source, 0), inside)

    def compare(layer: int, name: str, heard: Array, said: Array) -> None:
        attention = getattr(model.blocks[layer], name)
        if not is_linear(attention):
            return
        if name == "cross":
            answer = attention.query_state(heard, attention.build_state(encoded, mask=inside))
        else:
            answer, _ = attention(heard, positions=positions)
        found[f"{layer}.{name}"] = counts.sum() * _distance(answer, said, counts)

    for layer, block in enumerate(teacher.blocks):
        seen = None if encoded is None else block.source_state(encoded, mask=inside)
        x, _ = block(x, source=seen, positions=positions, listen=functools.partial(compare, layer))
    return found, counts.sum()


def _distance(answer: Float[Array, "b n e"], said: Float[Array, "b n e"], counts: Bool[Array, "b n"]) -> Array:
    answer, said = (jnp.where(counts[..., None], x.astype(jnp.float32), 0) for x in (answer, said))
    return jnp.square(answer - said).sum() / jnp.square(said).sum()
