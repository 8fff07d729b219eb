"""One step of training, from jitted functions of plain values."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from t2r.model.layout import shardings
from t2r.model.loss import Batch, total_loss
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


class Total(NamedTuple):
    """What the parts of a step add up to."""

    loss: Float[Array, ""]
    tokens: Int[Array, ""]
    gradient: Arrays


def init_state(arrays: Arrays, trained: set[str], optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step."""
    parameters = {name: array for name, array in arrays.items() if name in trained}
    frozen = {name: array for name, array in arrays.items() if name not in trained}
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), parameters, frozen, optimizer.init(parameters), key)


def make_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    like: TrainState,
    *,
    smoothing: float = 0.0,
) -> Callable[[TrainState, Sequence[Batch]], tuple[TrainState, dict[str, Array]]]:
    """step(state, parts) → (state, {loss, gradient_norm, tokens}), the mean over all tokens; the state is donated.

    Parts may have different shapes: gradients are added up over them, and each shape is compiled once. `like` has the
    state's structure and shapes; the arrays lie on the mesh as `t2r.model.layout` says.
    """
    everywhere, by_rows, layout = replicated(mesh), batch_sharding(mesh), shardings(like, mesh)
    total_layout = Total(everywhere, everywhere, layout.trained)

    def loss_of(trained: Arrays, frozen: Arrays, batch: Batch, key: PRNGKeyArray) -> tuple[Array, Array]:
        return total_loss(with_arrays(model, {**trained, **frozen}), batch, key=key, smoothing=smoothing)

    def add_part(total: Total, state: TrainState, batch: Batch, number: Array) -> Total:
        key = jax.random.wrap_key_data(state.key)
        key = jax.random.fold_in(jax.random.fold_in(key, state.step), number)
        (loss, tokens), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.trained, state.frozen, batch, key)
        return jax.tree.map(jnp.add, total, Total(loss, tokens, gradient))

    def finish(state: TrainState, total: Total) -> tuple[TrainState, dict[str, Array]]:
        gradient = jax.tree.map(lambda x: x / total.tokens, total.gradient)
        updates, opt_state = optimizer.update(gradient, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        metrics = {"loss": total.loss / total.tokens, "gradient_norm": optax.global_norm(gradient)}
        state = state._replace(step=state.step + 1, trained=trained, optimizer=opt_state)
        return state, metrics | {"tokens": total.tokens}

    def zero(trained: Arrays) -> Total:
        return Total(jnp.zeros(()), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, trained))

    add_part = jax.jit(
        add_part, in_shardings=(total_layout, layout, by_rows, None), out_shardings=total_layout, donate_argnums=0
    )
    finish = jax.jit(finish, in_shardings=(layout, total_layout), out_shardings=(layout, everywhere), donate_argnums=0)
    zero = jax.jit(zero, in_shardings=(layout.trained,), out_shardings=total_layout)

    def step(state: TrainState, parts: Sequence[Batch]) -> tuple[TrainState, dict[str, Array]]:
        with jax.set_mesh(mesh):
            total = zero(state.trained)
            for number, batch in enumerate(parts):
                total = add_part(total, state, jax.device_put(batch, by_rows), np.uint32(number))
            return finish(state, total)

    return step
