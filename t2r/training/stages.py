"""The stages of a training run: attention transfer, distillation, finetuning. Most runs have only the last.

`transfer` fits each converted attention to the softmax attention it replaces; it has its own optimizer, and by default
trains only what the conversion added. `distill` has a teacher's token probabilities in the loss, `finetune` the labels
alone; both train what config.trainable says, with config.optimizer and one schedule over the steps of both.
"""

from collections.abc import Set
from typing import Any, NamedTuple

import optax
from ml_collections import ConfigDict

from t2r.model.loss import Teacher
from t2r.model.parameters import trainable_names
from t2r.model.transformer import LanguageModel
from t2r.training.optimizer import make_optimizer, make_schedule
from t2r.training.step import Objective


class Stage(NamedTuple):
    """One stage: its steps, what it minimises, and how."""

    name: str
    first: int  # the number of steps before it
    last: int  # its last step
    objective: Objective
    optimizer: optax.GradientTransformation  # its state is `TrainState.optimizer`, that of all stages
    schedule: optax.Schedule  # learning rate by step of the optimizer, which counts from 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step of the run."""
        return float(self.schedule(step - 1))


class Stages(NamedTuple):
    """All stages of a run, in order."""

    all: tuple[Stage, ...]
    trained: set[str]  # the parameters that config.trainable names
    optimizer: optax.GradientTransformation  # only to initialise the state of all optimizers

    @property
    def learning(self) -> set[str]:
        """The parameters that some stage changes."""
        return self.trained.union(*(stage.objective.learning or () for stage in self.all))

    def at(self, step: int) -> Stage:
        """The stage of a step, which counts from 1."""
        return next(stage for stage in self.all if step <= stage.last)


def make_stages(config: ConfigDict, model: LanguageModel, teacher: Teacher | None) -> Stages:
    """The stages of a config; `model` and `teacher` may be abstract."""
    transfer_steps, steps, soft = config.transfer.steps, config.steps, config.teacher.soft
    trained = trainable_names(model, config.trainable)
    main = make_optimizer(config.optimizer, steps - transfer_steps)
    schedule = make_schedule(config.optimizer, steps - transfer_steps)
    objective, stages, optimizer = Objective(model, config.label_smoothing, teacher), [], main
    if transfer_steps:
        fields, learning = transfer_optimizer(config), trainable_names(model, config.transfer.trainable)
        transfer = make_optimizer(fields, transfer_steps)
        optimizer = _all_optimizers(transfer=(transfer, learning), main=(main, trained))
        transfer, main = _one_of_many(transfer, "transfer"), _one_of_many(main, "main")
        transfer_objective = Objective(model, teacher=teacher, transfer=True, learning=frozenset(learning))
        transfer_schedule = make_schedule(fields, transfer_steps)
        stages.append(Stage("transfer", 0, transfer_steps, transfer_objective, transfer, transfer_schedule))
        objective = objective._replace(learning=frozenset(trained))
    # How many steps have the teacher's probabilities in their loss, then how many have not.
    distill = (config.teacher.soft_steps or steps) if soft else 0
    last = min(transfer_steps + distill, steps)
    main_stage = lambda *fields: Stage(*fields, main, lambda step: schedule(step - transfer_steps))  # noqa: E731
    if last > transfer_steps:
        stages.append(main_stage("distill", transfer_steps, last, objective))
    if last < steps:
        labels_alone = objective._replace(teacher=teacher and teacher._replace(share=0.0))
        stages.append(main_stage("finetune", last, steps, labels_alone))
    return Stages(tuple(stages), trained, optimizer)


def transfer_optimizer(config: ConfigDict) -> ConfigDict:
    """config.optimizer with the fields of config.transfer: one decay over all steps of the transfer."""
    fields = ConfigDict(config.optimizer.to_dict())
    own = {name: value for name, value in config.transfer.items() if name in fields}
    fields.update(own, schedule="cosine_cycles", period=0, name="adam")
    return fields


def _all_optimizers(**optimizers: tuple[optax.GradientTransformation, Set[str] | None]) -> optax.GradientTransformation:
    """The states of several optimizers by name, each for some of the parameters (None: all)."""

    def init(params: dict[str, Any]) -> dict[str, Any]:
        chosen = lambda names: params if names is None else {name: params[name] for name in params if name in names}  # noqa: E731
        return {name: optimizer.init(chosen(names)) for name, (optimizer, names) in optimizers.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise NotImplementedError("each stage updates its own part of the state")

    return optax.GradientTransformation(init, update)


def _one_of_many(optimizer: optax.GradientTransformation, name: str) -> optax.GradientTransformation:
    """The optimizer of one stage, on the states of all."""

    def update(updates: Any, states: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        updates, state = optimizer.update(updates, states[name], params)
        return updates, {**states, name: state}

    return optax.GradientTransformation(optimizer.init, update)
