"""The decoding step and the function that makes the initial state, lowered to StableHLO.

Arguments and results are arrays and dicts from name to array, so callers need no class of this package. Weights are
arguments too: the program is small and works with any weights of the same shapes.
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
    """Sizes that are fixed when a model is exported."""

    batch: int | None = None  # sequences per call; None: any number
    capacity: int | None = None  # tokens in the caches of softmax layers


class Function(NamedTuple):
    """A lowered function, with the shapes and types of its named arguments and results (arrays or dicts of arrays)."""

    exported: export.Exported
    arguments: dict[str, Any]
    results: dict[str, Any]


def lower(config: ModelConfig, sizes: Sizes) -> dict[str, Function]:
    """`step`, and the function that makes the initial state: `start`, or `encode` in a translation model.

    Weights have the type of the activations.
    """
    check_capacity(config, sizes.capacity)
    batch, length = export.symbolic_shape("b, m")
    batch = sizes.batch or batch
    weights = {name: _like(array, config.dtype) for name, array in arrays_of(abstract_model(config)).items()}
    token = ShapeDtypeStruct((batch,), jnp.int32)
    if config.encoder_layers:
        name, first, inputs = "encode", encode, {"source": ShapeDtypeStruct((batch, length), jnp.int32)}
    else:
        name, first, inputs = "start", start, {"token": token}
    first = functools.partial(first, config, sizes.capacity)
    arguments = {"weights": weights, **inputs}
    state = jax.eval_shape(first, *arguments.values())
    arrays = {name: _like(leaf) for name, leaf in named_leaves(state)}
    next_step = functools.partial(step, config, longest(config, sizes.capacity), jax.tree.structure(state))
    return {
        name: _lower(lambda *inputs: dict(named_leaves(first(*inputs))), arguments, ["state"]),
        "step": _lower(next_step, {"weights": weights, "state": arrays, "token": token}, ["logits", "state"]),
    }


def _lower(function: Callable, arguments: dict[str, Any], results: list[str]) -> Function:
    with _without_locations():
        exported = export.export(jax.jit(function), platforms=PLATFORMS)(*arguments.values())
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return Function(exported, arguments, dict(zip(results, [outputs] if len(results) == 1 else outputs)))


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Leaves the source file and line of each operation out of the program, so that it has no paths of this machine."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def start(config: ModelConfig, capacity: int | None, weights: Arrays, token: Int[Array, "b"]) -> DecodeState:
    """The initial state; `token` only gives the batch size."""
    single = _model(config, weights).init_state(1, capacity or 1)
    return jax.tree.map(lambda x: jnp.repeat(x, token.shape[0], 0) if x.ndim else x, single)


def encode(config: ModelConfig, capacity: int | None, weights: Arrays, source: Int[Array, "b m"]) -> DecodeState:
    """The initial state of translations of these sources, which are padded with PADDING at the end."""
    return start(config, capacity, weights, source[:, 0])._replace(
        source=source_states(_model(config, weights), source)
    )


def step(
    config: ModelConfig, most: int | None, structure: Any, weights: Arrays, state: Arrays, token: Int[Array, "b"]
) -> tuple[Float[Array, "b vocab"], Arrays]:
    """Reads one token of each sequence; returns the logits of the next token and the new state.

    The state is a flat dict; `structure` is its original pytree structure. Beyond `most` tokens the logits are NaN.
    """
    model = _model(config, weights)
    names = [name for name, _ in named_leaves(jax.tree.unflatten(structure, [0] * structure.num_leaves))]
    hidden, after = model(token[:, None], state=jax.tree.unflatten(structure, [state[name] for name in names]))
    # An adaptive softmax has no logits: `logits` returns its log-probabilities.
    logits = model.logits(hidden[:, 0])
    if most is not None:  # beyond it, the last cache slot or position would be reused
        logits = jnp.where((state["position"] < most)[:, None], logits, jnp.nan)
    return logits, dict(named_leaves(after))


def _model(config: ModelConfig, weights: Arrays) -> LanguageModel:
    # The model's parameters are float32. The compiler removes casts to float32 and back.
    return with_arrays(abstract_model(config), {name: a.astype(jnp.float32) for name, a in weights.items()})


def _like(array: Any, dtype: str | None = None) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(array.shape, jnp.dtype(dtype or array.dtype))


def softmax_layers(config: ModelConfig) -> list[int]:
    """The layers with softmax attention, whose state grows with each token."""
    return [layer for layer, spec in enumerate(config.attention) if spec.kind == "softmax"]


def longest(config: ModelConfig, capacity: int | None) -> int | None:
    """The most tokens of a sequence; None: there is no limit."""
    limits = [capacity] if softmax_layers(config) else []
    limits += [config.max_positions] if config.max_positions else []
    return min(limits, default=None)


def check_capacity(config: ModelConfig, capacity: int | None) -> None:
    """Raises an error if there are softmax layers and no capacity, or a capacity and no softmax layers."""
    layers = softmax_layers(config)
    if layers and capacity is None:
        raise InputError(
            f"{len(layers)} of {config.layers} layers have softmax attention ({', '.join(map(str, layers))}), whose "
            f"state grows with each token: set --capacity=N, the most tokens of a sequence, or convert these layers"
        )
    if capacity is not None and not layers:
        raise InputError(
            f"--capacity={capacity} is for layers with softmax attention; this model has none, its state does not "
            f"grow: leave it out"
        )
    check_length(config, capacity or 0)
