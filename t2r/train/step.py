"""One step of training, as one jitted function of plain values."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from t2r.model.parameters import Arrays, with_arrays
from t2r.model.transformer import LanguageModel
from t2r.train.sharding import batch_sharding, replicated


class TrainState(NamedTuple):
    """All that changes while training, and what it is computed with."""

    step: Int[Array, ""]
    trained: Arrays
    frozen: Arrays
    optimizer: optax.OptState
    key: Array  # the data of a random key, never changed: each step folds its number in


def init_state(arrays: Arrays, trained: set[str], optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step."""
    parameters = {name: array for name, array in arrays.items() if name in trained}
    frozen = {name: array for name, array in arrays.items() if name not in trained}
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), parameters, frozen, optimizer.init(parameters), key)


def make_step(
    model: LanguageModel, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, Array], tuple[TrainState, dict[str, Array]]]:
    """step(state, tokens (accumulate, batch, length + 1)) → (state, {loss, gradient_norm}); the state is donated."""

    def loss_of(trained: Arrays, frozen: Arrays, tokens: Int[Array, "b n"], key: PRNGKeyArray) -> Array:
        whole = with_arrays(model, {**trained, **frozen})
        return whole.losses(tokens[:, :-1], tokens[:, 1:], key=key).mean()

    def step(state: TrainState, tokens: Int[Array, "parts b n"]) -> tuple[TrainState, dict[str, Array]]:
        step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        def add_part(total, part):
            tokens, number = part
            key = jax.random.fold_in(step_key, number)
            result = jax.value_and_grad(loss_of)(state.trained, state.frozen, tokens, key)
            return jax.tree.map(jnp.add, total, result), None

        parts = tokens.shape[0]
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.trained))
        total, _ = jax.lax.scan(add_part, zero, (tokens, jnp.arange(parts)))
        loss, gradient = jax.tree.map(lambda x: x / parts, total)
        updates, opt_state = optimizer.update(gradient, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        metrics = {"loss": loss, "gradient_norm": optax.global_norm(gradient)}
        return state._replace(step=state.step + 1, trained=trained, optimizer=opt_state), metrics

    everywhere = replicated(mesh)
    return jax.jit(
        step, in_shardings=(everywhere, batch_sharding(mesh)), out_shardings=(everywhere, everywhere), donate_argnums=0
    )
