"""One training step: gradients of its parts are accumulated, then the parameters are updated once.

Pure functions, and `make_step`, which compiles them for a mesh.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from t2r.batch import Batch
from t2r.conversion.transfer import converted_attention_names, transfer_losses
from t2r.layout import shardings
from t2r.model.loss import Teacher, total_loss
from t2r.model.parameters import Arrays, with_arrays
from t2r.model.transformer import LanguageModel
from t2r.training.sharding import batch_sharding, replicated

TEACHER = "teacher."  # prefix of the teacher's arrays in TrainState.frozen
# On one GPU, each part of a step becomes one CUDA graph with its loops and conditionals inside; otherwise the GPU waits
# for the host at each of them (results/train_speed.md). This is XLA's default list with WHILE and CONDITIONAL added.
COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
}


class TrainState(NamedTuple):
    """All arrays of a training run; also what a checkpoint holds."""

    step: Int[Array, ""]
    trained: Arrays
    frozen: Arrays
    optimizer: optax.OptState
    key: Array  # data of the run's random key; constant, since each step folds its number in


class Total(NamedTuple):
    """Sums over the parts of a step so far."""

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
    """The state before the first step. A teacher's arrays are stored with the frozen parameters."""
    parameters = {name: array for name, array in arrays.items() if name in trained}
    frozen = {name: array for name, array in arrays.items() if name not in trained}
    frozen |= {TEACHER + name: array for name, array in (teacher or {}).items()}
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), parameters, frozen, optimizer.init(parameters), key)


def teacher_arrays(frozen: Arrays) -> Arrays:
    """The teacher's arrays among the frozen ones, without the prefix in their names."""
    return {name.removeprefix(TEACHER): array for name, array in frozen.items() if name.startswith(TEACHER)}


class Objective(NamedTuple):
    """What a step minimises: the loss of the model on a batch; or, with `transfer`, the distance of each converted
    attention's output from that of the softmax attention it replaces (`t2r.conversion.transfer`).

    Models may be abstract: their arrays are taken from the state. `learning` has the names of the parameters that it
    changes; None: all that the run trains.
    """

    model: LanguageModel
    smoothing: float = 0.0
    teacher: Teacher | None = None
    transfer: bool = False
    learning: frozenset[str] | None = None

    def split(self, trained: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is given for each parameter, such as its array: (of those that learn, of the others)."""
        learning = set(trained) if self.learning is None else self.learning
        chosen = {name: array for name, array in trained.items() if name in learning}
        return chosen, {name: array for name, array in trained.items() if name not in learning}

    @property
    def names(self) -> list[str]:
        """Names of the losses: ["loss"], or with `transfer` one name for each converted attention."""
        return converted_attention_names(self.model) if self.transfer else ["loss"]


def losses_of(
    objective: Objective, trained: Arrays, frozen: Arrays, batch: Batch, key: PRNGKeyArray
) -> tuple[Float[Array, ""], tuple[dict[str, Array], Int[Array, ""]]]:
    """(the scalar to differentiate: the mean of the losses, (losses by name, number of tokens)).

    Each loss is a sum over tokens.
    """
    model = with_arrays(objective.model, {**trained, **frozen})
    teacher = objective.teacher
    if teacher is not None:
        teacher = teacher._replace(model=with_arrays(teacher.model, teacher_arrays(frozen)))
    if objective.transfer:
        losses, tokens = transfer_losses(model, teacher.model, batch)
    else:
        loss, tokens = total_loss(model, batch, key=key, smoothing=objective.smoothing, teacher=teacher)
        losses = {"loss": loss}
    return _mean(losses), (losses, tokens)


def zero_total(objective: Objective, trained: Arrays) -> Total:
    """The zero accumulator."""
    losses = {name: jnp.zeros(()) for name in objective.names}
    return Total(losses, jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, objective.split(trained)[0]))


def forward(objective: Objective, state: TrainState, batch: Batch, part: Array) -> tuple[dict[str, Array], Array]:
    """Losses and number of tokens of one part, without gradients."""
    return losses_of(objective, state.trained, state.frozen, batch, _part_key(state, part))[1]


def add_part(objective: Objective, total: Total, state: TrainState, batch: Batch, part: Array) -> Total:
    """Adds the losses, tokens and gradients of one part to the total."""
    gradient_of = jax.value_and_grad(functools.partial(losses_of, objective), has_aux=True)
    learning, others = objective.split(state.trained)
    fixed = {**others, **state.frozen}
    (_, (losses, tokens)), gradient = gradient_of(learning, fixed, batch, _part_key(state, part))
    return jax.tree.map(jnp.add, total, Total(losses, tokens, gradient))


def finish(
    objective: Objective, optimizer: optax.GradientTransformation, state: TrainState, total: Total
) -> tuple[TrainState, dict[str, Array]]:
    """Updates the parameters with the mean gradient over all tokens: (new state, metrics of the step)."""
    gradient = jax.tree.map(lambda x: x / total.tokens, total.gradient)
    learning, others = objective.split(state.trained)
    updates, opt_state = optimizer.update(gradient, state.optimizer, learning)
    # In the order of the state, so that its structure stays what was compiled.
    updated = {**others, **optax.apply_updates(learning, updates)}
    trained = {name: updated[name] for name in state.trained}
    metrics = {name: loss / total.tokens for name, loss in total.losses.items()}
    if objective.transfer:
        metrics = {"distance": _mean(metrics), **{f"distance.{name}": value for name, value in metrics.items()}}
    metrics |= {"gradient_norm": optax.global_norm(gradient), "tokens": total.tokens}
    return state._replace(step=state.step + 1, trained=trained, optimizer=opt_state), metrics


def _mean(losses: dict[str, Array]) -> Array:
    return sum(losses.values()) / len(losses)


def _part_key(state: TrainState, part: Array) -> PRNGKeyArray:
    """The random key of a part: the run's key, with the step and the part's number folded in."""
    key = jax.random.wrap_key_data(state.key)
    return jax.random.fold_in(jax.random.fold_in(key, state.step), part)


class Step(NamedTuple):
    """The jitted programs of a step on a mesh. Parts may have different shapes; each shape is compiled once."""

    mesh: Mesh
    zero_total: Callable[[Arrays], Total]
    add_part: Callable[[Total, TrainState, Batch, np.uint32], Total]
    finish: Callable[[TrainState, Total], tuple[TrainState, dict[str, Array]]]
    forward: Callable[[TrainState, Batch, np.uint32], tuple[dict[str, Array], Array]]

    def __call__(self, state: TrainState, parts: Sequence[Batch]) -> tuple[TrainState, dict[str, Array]]:
        """Runs one step: (new state, {loss, gradient_norm, tokens}). The old state is donated."""
        with jax.set_mesh(self.mesh):
            total = self.zero_total(state.trained)
            for number, batch in enumerate(self._placed(parts)):
                total = self.add_part(total, state, batch, np.uint32(number))
            return self.finish(state, total)

    def forward_pass(self, state: TrainState, parts: Sequence[Batch]) -> list[tuple[dict[str, Array], Array]]:
        """Losses and number of tokens of each part, without gradients; for benchmarks."""
        with jax.set_mesh(self.mesh):
            batches = enumerate(self._placed(parts))
            return [self.forward(state, batch, np.uint32(number)) for number, batch in batches]

    def lower(self, state: TrainState, batch: Batch, *platforms: str) -> dict[str, jax.stages.Lowered]:
        """The lowered programs of a step for parts of this shape, for any platforms. Arguments may be abstract."""
        options = dict(lowering_platforms=platforms) if platforms else {}
        with jax.set_mesh(self.mesh):
            total = jax.eval_shape(self.zero_total, state.trained)
            return {
                "add_part": self.add_part.trace(total, state, batch, np.uint32(0)).lower(**options),
                "finish": self.finish.trace(state, total).lower(**options),
            }

    def _placed(self, parts: Sequence[Batch]) -> Iterator[Batch]:
        sharding = batch_sharding(self.mesh)
        return (jax.device_put(batch, sharding) for batch in parts)


def make_step(objective: Objective, optimizer: optax.GradientTransformation, mesh: Mesh, like: TrainState) -> Step:
    """The step for states with the structure and shapes of `like`, sharded over the mesh by `t2r.layout`."""
    everywhere, sequences, layout = replicated(mesh), batch_sharding(mesh), shardings(like, mesh)
    totals = Total(everywhere, everywhere, objective.split(layout.trained)[0])

    def jit(function: Callable, inputs: tuple, outputs: Any, **options: Any) -> Callable:
        return jax.jit(function, in_shardings=inputs, out_shardings=outputs, **options)

    bind, cuda_graph = functools.partial, dict(compiler_options=COMPILER_OPTIONS)
    return Step(
        mesh,
        jit(bind(zero_total, objective), (layout.trained,), totals),
        jit(bind(add_part, objective), (totals, layout, sequences, None), totals, donate_argnums=0, **cuda_graph),
        jit(bind(finish, objective, optimizer), (layout, totals), (layout, everywhere), donate_argnums=0),
        jit(bind(forward, objective), (layout, sequences, None), everywhere, **cuda_graph),
    )
