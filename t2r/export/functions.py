"""The decoding step, and what makes its first state, as functions of plain dicts, lowered to StableHLO.

Arguments and results are arrays and dicts of arrays by name: whoever calls them needs no class of ours. Weights are
arguments too, so that the program is small and serves any weights of its shapes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct, export
from jaxtyping import Array, Float, Int

from t2r.decode.state_file import named_leaves
from t2r.errors import InputError
from t2r.model.config import ModelConfig
from t2r.model.loss import source_states
from t2r.model.parameters import Arrays, abstract_model, arrays_of, with_arrays
from t2r.model.transformer import DecodeState, LanguageModel, check_length

PLATFORMS = ("cpu", "cuda", "tpu")


class Sizes(NamedTuple):
    """What is decided when a model is exported."""

    batch: int | None = None  # texts at a time; None: any number, decided by who calls
    capacity: int | None = None  # tokens that fit into the caches of softmax layers


class Function(NamedTuple):
    """A lowered function, and what it takes and gives, by name: arrays and dicts of arrays, as shapes and types."""

    exported: export.Exported
    arguments: dict[str, Any]
    results: dict[str, Any]


def lower(config: ModelConfig, sizes: Sizes) -> dict[str, Function]:
    """`step`, and what makes the state before it: `start` in a language model, `encode` in a translation model.

    Weights are of the type of activations.
    """
    check_capacity(config, sizes.capacity)
    batch, length = export.symbolic_shape("b, m")
    batch = sizes.batch or batch
    weights = {name: _like(array, config.dtype) for name, array in arrays_of(abstract_model(config)).items()}
    token = ShapeDtypeStruct((batch,), jnp.int32)
    if config.encoder_layers:
        name, first, given = "encode", encode, {"source": ShapeDtypeStruct((batch, length), jnp.int32)}
    else:
        name, first, given = "start", start, {"token": token}
    first = functools.partial(first, config, sizes.capacity)
    given = {"weights": weights, **given}
    state = jax.eval_shape(first, *given.values())
    arrays = {name: _like(leaf) for name, leaf in named_leaves(state)}
    next_step = functools.partial(step, config, longest(config, sizes.capacity), jax.tree.structure(state))
    return {
        name: _lower(lambda *given: dict(named_leaves(first(*given))), given, ["state"]),
        "step": _lower(next_step, {"weights": weights, "state": arrays, "token": token}, ["logits", "state"]),
    }


def _lower(function: Callable, arguments: dict[str, Any], results: list[str]) -> Function:
    with _without_locations():
        exported = export.export(jax.jit(function), platforms=PLATFORMS)(*arguments.values())
    found = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return Function(exported, arguments, dict(zip(results, [found] if len(results) == 1 else found)))


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Leaves out which line of which file each operation came from: paths of one machine are nobody else's business."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def start(config: ModelConfig, capacity: int | None, weights: Arrays, token: Int[Array, "b"]) -> DecodeState:
    """The state of texts that have no tokens yet; of the first ones only the number counts."""
    one = _model(config, weights).init_state(1, capacity or 1)
    return jax.tree.map(lambda x: jnp.repeat(x, token.shape[0], 0) if x.ndim else x, one)


def encode(config: ModelConfig, capacity: int | None, weights: Arrays, source: Int[Array, "b m"]) -> DecodeState:
    """The state of translations that have no tokens yet, of these sources; PADDING ends the rows."""
    return start(config, capacity, weights, source[:, 0])._replace(
        source=source_states(_model(config, weights), source)
    )


def step(
    config: ModelConfig, most: int | None, structure: Any, weights: Arrays, state: Arrays, token: Int[Array, "b"]
) -> tuple[Float[Array, "b vocab"], Arrays]:
    """Reads a token of each text: what may follow it, and the state after it. A state of `structure` comes flat."""
    model = _model(config, weights)
    names = [name for name, _ in named_leaves(jax.tree.unflatten(structure, [0] * structure.num_leaves))]
    hidden, after = model(token[:, None], state=jax.tree.unflatten(structure, [state[name] for name in names]))
    # An adaptive softmax has no logits; log-probabilities serve for them.
    logits = model.logits(hidden[:, 0])
    if most is not None:  # beyond it the last slot of caches, or the last position, would be used again
        logits = jnp.where((state["position"] < most)[:, None], logits, jnp.nan)
    return logits, dict(named_leaves(after))


def _model(config: ModelConfig, weights: Arrays) -> LanguageModel:
    # Parameters are float32, whatever they are stored in: the compiler takes out what casts there and back.
    return with_arrays(abstract_model(config), {name: a.astype(jnp.float32) for name, a in weights.items()})


def _like(array: Any, dtype: str | None = None) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(array.shape, jnp.dtype(dtype or array.dtype))


def softmax_layers(config: ModelConfig) -> list[int]:
    """The layers whose state grows by a token a step."""
    return [layer for layer, spec in enumerate(config.attention) if spec.kind == "softmax"]


def longest(config: ModelConfig, capacity: int | None) -> int | None:
    """The most tokens a text can have; None: there is no limit."""
    limits = [capacity] if softmax_layers(config) else []
    limits += [config.max_positions] if config.positions == "learned" else []
    return min(limits, default=None)


def check_capacity(config: ModelConfig, capacity: int | None) -> None:
    """The length of caches is needed where there are caches, and only there."""
    layers = softmax_layers(config)
    if layers and capacity is None:
        raise InputError(
            f"{len(layers)} of {config.layers} layers have softmax attention ({', '.join(map(str, layers))}), whose "
            f"state grows by a token a step: say with --capacity=N how many tokens a text may have, or convert them"
        )
    if capacity is not None and not layers:
        raise InputError(
            f"--capacity={capacity} is for layers with softmax attention; this model has none, its state is the same "
            f"at any length: leave it out"
        )
    check_length(config, capacity or 0)
