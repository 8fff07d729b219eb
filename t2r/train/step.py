"""One step of training, from jitted functions of plain values."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from t2r.layout import shardings
from t2r.model.loss import Batch, Teacher, total_loss
from t2r.model.parameters import Arrays, with_arrays
from t2r.model.transfer import converted, transfer_losses
from t2r.model.transformer import LanguageModel
from t2r.train.sharding import batch_sharding, replicated

TEACHER = "teacher."
# On one GPU a part of a step is one CUDA graph, its loops and conditions in it: else the GPU waits for the host at each
# of them (results/train_speed.md). These are XLA's own choice of commands and two more. Elsewhere there are no graphs.
OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
}


class TrainState(NamedTuple):
    """All that changes while training, and what it is computed with."""

    step: Int[Array, ""]
    trained: Arrays
    frozen: Arrays
    optimizer: optax.OptState
    key: Array  # the data of a random key, never changed: each step folds its number in


class Total(NamedTuple):
    """What the parts of a step add up to."""

    losses: dict[str, Float[Array, ""]]
    tokens: Int[Array, ""]
    gradient: Arrays


def init_state(
    arrays: Arrays,
    trained: set[str],
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    teacher: Arrays | None = None,
) -> TrainState:
    """The state before the first step; a teacher's arrays are among the frozen."""
    parameters = {name: array for name, array in arrays.items() if name in trained}
    frozen = {name: array for name, array in arrays.items() if name not in trained}
    frozen |= {TEACHER + name: array for name, array in (teacher or {}).items()}
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), parameters, frozen, optimizer.init(parameters), key)


def teacher_arrays(frozen: Arrays) -> Arrays:
    """The teacher's own, by their own names."""
    return {name.removeprefix(TEACHER): array for name, array in frozen.items() if name.startswith(TEACHER)}


class Step:
    """step(state, parts) → (state, {loss, gradient_norm, tokens}), the mean over all tokens; the state is donated.

    With `transfer` each layer learns from the teacher alone, see `model.transfer`; instead of the loss there is the
    distance, and that of each attention.

    Parts may have different shapes: gradients are added up over them, and each shape is compiled once. `like` has the
    state's structure and shapes; the arrays lie on the mesh as `t2r.layout` says. A `teacher` may be abstract: its
    arrays are in the state, see `init_state`.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        like: TrainState,
        *,
        smoothing: float = 0.0,
        teacher: Teacher | None = None,
        transfer: bool = False,
    ):
        names = converted(model) if transfer else ["loss"]

        def loss_of(trained: Arrays, frozen: Arrays, batch: Batch, key: PRNGKeyArray) -> tuple[Array, tuple]:
            learned = with_arrays(model, {**trained, **frozen})
            known = teacher and teacher._replace(model=with_arrays(teacher.model, teacher_arrays(frozen)))
            if transfer:
                found, tokens = transfer_losses(learned, known.model, batch)
            else:
                loss, tokens = total_loss(learned, batch, key=key, smoothing=smoothing, teacher=known)
                found = {"loss": loss}
            return mean(found), (found, tokens)

        def mean(losses: dict[str, Array]) -> Array:
            return sum(losses.values()) / len(losses)

        def zero(trained: Arrays) -> Total:
            losses = {name: jnp.zeros(()) for name in names}
            return Total(losses, jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, trained))

        def key_of(state: TrainState, number: Array) -> PRNGKeyArray:
            key = jax.random.wrap_key_data(state.key)
            return jax.random.fold_in(jax.random.fold_in(key, state.step), number)

        def forward(state: TrainState, batch: Batch, number: Array) -> tuple[dict[str, Array], Array]:
            return loss_of(state.trained, state.frozen, batch, key_of(state, number))[1]

        def add_part(total: Total, state: TrainState, batch: Batch, number: Array) -> Total:
            gradient_of = jax.value_and_grad(loss_of, has_aux=True)
            given = (state.trained, state.frozen, batch, key_of(state, number))
            (_, (losses, tokens)), gradient = gradient_of(*given)
            return jax.tree.map(jnp.add, total, Total(losses, tokens, gradient))

        def finish(state: TrainState, total: Total) -> tuple[TrainState, dict[str, Array]]:
            gradient = jax.tree.map(lambda x: x / total.tokens, total.gradient)
            updates, opt_state = optimizer.update(gradient, state.optimizer, state.trained)
            trained = optax.apply_updates(state.trained, updates)
            metrics = {name: loss / total.tokens for name, loss in total.losses.items()}
            if transfer:
                each = {f"distance.{place}": distance for place, distance in metrics.items()}
                metrics = {"distance": mean(metrics), **each}
            metrics["gradient_norm"] = optax.global_norm(gradient)
            state = state._replace(step=state.step + 1, trained=trained, optimizer=opt_state)
            return state, metrics | {"tokens": total.tokens}

        everywhere, by_rows, layout = replicated(mesh), batch_sharding(mesh), shardings(like, mesh)
        totals = Total(everywhere, everywhere, layout.trained)
        self._mesh, self._by_rows = mesh, by_rows
        self._forward = jax.jit(
            forward, in_shardings=(layout, by_rows, None), out_shardings=everywhere, compiler_options=OPTIONS
        )
        self._zero = jax.jit(zero, in_shardings=(layout.trained,), out_shardings=totals)
        self._add_part = jax.jit(
            add_part,
            in_shardings=(totals, layout, by_rows, None),
            out_shardings=totals,
            donate_argnums=0,
            compiler_options=OPTIONS,
        )
        self._finish = jax.jit(
            finish, in_shardings=(layout, totals), out_shardings=(layout, everywhere), donate_argnums=0
        )

    def __call__(self, state: TrainState, parts: Sequence[Batch]) -> tuple[TrainState, dict[str, Array]]:
        with jax.set_mesh(self._mesh):
            total = self._zero(state.trained)
            for number, batch in enumerate(parts):
                total = self._add_part(total, state, jax.device_put(batch, self._by_rows), np.uint32(number))
            return self._finish(state, total)

    def forward(self, state: TrainState, parts: Sequence[Batch]) -> list[tuple[dict[str, Array], Array]]:
        """Of each part the losses and tokens that the step adds up, without gradients: for benchmarks."""
        with jax.set_mesh(self._mesh):
            return [
                self._forward(state, jax.device_put(batch, self._by_rows), np.uint32(number))
                for number, batch in enumerate(parts)
            ]

    def lower(self, state: TrainState, batch: Batch, *platforms: str) -> dict[str, jax.stages.Lowered]:
        """The programs of a step for a part of this shape, not compiled yet; from shapes alone, for any platform."""
        options = dict(lowering_platforms=platforms) if platforms else {}
        with jax.set_mesh(self._mesh):
            total = jax.eval_shape(self._zero, state.trained)
            return {
                "add_part": self._add_part.trace(total, state, batch, np.uint32(0)).lower(**options),
                "finish": self._finish.trace(state, total).lower(**options),
            }
