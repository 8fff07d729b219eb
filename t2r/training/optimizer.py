"""The paper's optimizers and learning rate schedules, built from optax."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from t2r.errors import InputError
from t2r.model.parameters import is_new


def make_optimizer(fields: ConfigDict, steps: int) -> optax.GradientTransformation:
    """Gradient clipping, then Adam or Nesterov momentum, then decoupled weight decay; scaled by the learning rate."""
    parts = [optax.clip_by_global_norm(fields.clip_norm)] if fields.clip_norm else []
    if fields.name == "adam":
        parts.append(optax.scale_by_adam(b1=fields.b1, b2=fields.b2, eps=fields.eps))
    elif fields.name == "nesterov":
        # Equal to `nag` of fairseq, the paper's toolkit: there the velocity contains the learning rate as a factor.
        parts.append(optax.trace(decay=fields.momentum, nesterov=True))
    else:
        raise InputError(f"config.optimizer.name={fields.name!r}: choose adam or nesterov")
    if fields.weight_decay:
        parts.append(optax.add_decayed_weights(fields.weight_decay, mask=decayed))
    if fields.new_rate != 1:
        parts.append(optax.stateless(lambda updates, _: faster(updates, fields.new_rate)))
    return optax.chain(*parts, optax.scale_by_learning_rate(make_schedule(fields, steps)))


def faster(updates: dict[str, jax.Array], factor: float) -> dict[str, jax.Array]:
    """The updates, those of what a conversion added times `factor`."""
    return {name: factor * update if is_new(name) else update for name, update in updates.items()}


def decayed(params: dict[str, jax.Array]) -> dict[str, bool]:
    """Which parameters have weight decay: matrices, but neither biases (also those of φ), norms, nor RFA's σ.

    With a smaller σ the attention of RFA is flatter: decay would drive it to the mean of all tokens.
    """
    return {name: array.ndim > 1 and not name.endswith(("bias", "sigma")) for name, array in params.items()}


def make_schedule(fields: ConfigDict, steps: int) -> optax.Schedule:
    """step → learning rate: a linear warm-up, then cosine cycles, inverse square root decay, or a constant."""
    warmup = fields.warmup_steps
    warm_up = optax.linear_schedule(fields.warmup_from, fields.learning_rate, warmup)
    if fields.schedule == "cosine_cycles":
        period = fields.period or max(steps - warmup, 1)
        return cosine_cycles(fields, warm_up, warmup, period, steps)
    if fields.schedule == "inverse_sqrt":
        peak = max(warmup, 1)
        # join_schedules counts from the end of the warm-up. Before it `step` is negative and the value is not used.
        decay = lambda step: fields.learning_rate * (peak / jnp.maximum(step + peak, 1)) ** 0.5  # noqa: E731
        return optax.join_schedules([warm_up, decay], [warmup])
    if fields.schedule == "constant":
        return optax.join_schedules([warm_up, optax.constant_schedule(fields.learning_rate)], [warmup])
    raise InputError(f"config.optimizer.schedule={fields.schedule!r}: choose cosine_cycles, inverse_sqrt or constant")


def cosine_cycles(
    fields: ConfigDict, warm_up: optax.Schedule, warmup: int, period: float, steps: int
) -> optax.Schedule:
    """Cosine decay with warm restarts (Loshchilov & Hutter): each cycle is `period_growth` times as long as the one
    before, and its rates are `peak_shrink` times as high."""
    lowest = fields.min_learning_rate / fields.learning_rate
    schedules, bounds = [warm_up], [warmup]
    shrink = 1.0
    while True:
        schedules.append(optax.cosine_decay_schedule(fields.learning_rate * shrink, int(period), alpha=lowest))
        if bounds[-1] + period >= steps:
            return optax.join_schedules(schedules, bounds)
        bounds.append(bounds[-1] + int(period))
        period, shrink = period * fields.period_growth, shrink * fields.peak_shrink
