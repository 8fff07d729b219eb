"""Attention transfer: each linear attention is trained to reproduce the output of the softmax attention it replaced.

Every layer's input is the teacher's, so that all layers train at once and no layer's error reaches the next; later the
model is finetuned as a whole. After "LoLCATs" (Zhang et al., 2024), which trains φ only. The paper has no such step.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2r.attention.module import is_linear
from t2r.batch import PADDING, Batch, inputs_and_targets
from t2r.errors import InputError
from t2r.model.parameters import linear_attention_names
from t2r.model.transformer import LanguageModel


def converted_attention_names(model: LanguageModel) -> list[str]:
    """The names of the model's linear attention modules, such as `3.cross`."""
    names = linear_attention_names(model)
    if not names:
        raise InputError("attention transfer needs linear attention, but the model has none: convert it first")
    return names


def transfer_losses(
    model: LanguageModel, teacher: LanguageModel, batch: Batch
) -> tuple[dict[str, Float[Array, ""]], Int[Array, ""]]:
    """The loss of each linear attention, by name, times the number of tokens; and that number.

    The loss is Σ‖y − y_teacher‖² / Σ‖y_teacher‖², summed over all tokens, where y is an attention's output for the
    teacher's input: 0 if they are equal, 1 if y = 0.
    """
    tokens, targets = inputs_and_targets(batch)
    is_real = targets != PADDING
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, losses = teacher.embed(tokens, positions), {}
    encoded, source_mask = None, None
    if batch.source is not None:
        source_mask = batch.source != PADDING
        encoded = teacher.encode(jnp.maximum(batch.source, 0), source_mask)

    def compare(layer: int, name: str, attention_input: Array, teacher_output: Array) -> None:
        attention = getattr(model.blocks[layer], name)
        if not is_linear(attention):
            return
        if name == "cross":
            output = attention.query_state(attention_input, attention.build_state(encoded, mask=source_mask))
        else:
            output, _ = attention(attention_input, positions=positions)
        losses[f"{layer}.{name}"] = is_real.sum() * _relative_error(output, teacher_output, is_real)

    for layer, block in enumerate(teacher.blocks):
        source_state = None if encoded is None else block.source_state(encoded, mask=source_mask)
        x, _ = block(x, source=source_state, positions=positions, on_attention=functools.partial(compare, layer))
    return losses, is_real.sum()


def _relative_error(
    output: Float[Array, "b n width"], teacher_output: Float[Array, "b n width"], is_real: Bool[Array, "b n"]
) -> Float[Array, ""]:
    """Σ‖output − teacher_output‖² / Σ‖teacher_output‖² over real tokens."""
    y, y_teacher = (jnp.where(is_real[..., None], x.astype(jnp.float32), 0) for x in (output, teacher_output))
    return jnp.square(y - y_teacher).sum() / jnp.square(y_teacher).sum()
