"""Logits or log-probabilities for given token ids, for comparison with other libraries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from t2r.errors import InputError, raise_all
from t2r.model.transformer import LanguageModel, check_length


def logits_of(
    model: LanguageModel, arrays: dict[str, np.ndarray], *, normalised: bool = False
) -> Float[np.ndarray, "b n vocab"]:
    """The logits after each of `input_ids`; in a translation model, after each of `decoder_input_ids`, with `input_ids`
    as sources (and `attention_mask`, if there is one). If `normalised`, log-probabilities."""
    config = model.config
    if config.adaptive_cutoffs and not normalised:
        raise InputError(
            "an adaptive softmax has no logits over the whole vocabulary: compare log-probabilities (--log_probs)"
        )
    sizes = {"input_ids": config.source_vocab_size or config.vocab_size}
    if config.encoder_layers:
        sizes["decoder_input_ids"] = config.vocab_size
    problems = [f"no array {name!r}; the file has {', '.join(arrays)}" for name in sizes if name not in arrays]
    for name in sizes.keys() & arrays.keys():
        ids = arrays[name]
        if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            problems.append(f"{name} must be integers of shape (batch, length), not {ids.dtype} of {ids.shape}")
        elif not 0 <= ids.min() <= ids.max() < sizes[name]:
            problems.append(f"{name} has ids from {ids.min()} to {ids.max()}: the vocabulary ends at {sizes[name] - 1}")
    raise_all("ids:", problems)
    ids = [arrays[name].astype(np.int32) for name in sizes]
    check_length(config, max(sequences.shape[1] for sequences in ids))
    mask = arrays["attention_mask"].astype(bool) if "attention_mask" in arrays else np.ones(ids[0].shape, bool)
    graph, state = nnx.split(model)
    return np.asarray(_logits(graph, state, ids, mask, normalised))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _logits(graph: nnx.GraphDef, state: nnx.State, ids: list[Array], mask: Array, normalised: bool) -> Array:
    model = nnx.merge(graph, state)
    if len(ids) == 1:
        hidden, _ = model(ids[0], mask=mask)
    else:
        hidden, _ = model(ids[1], source=model.source_states(ids[0], mask))
    outputs = model.log_probs(hidden) if normalised else model.logits(hidden)
    return outputs.astype(jnp.float32)
