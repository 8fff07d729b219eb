"""Optimizers and schedules as the paper used them, from optax."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from t2r.errors import InputError


def make_optimizer(fields: ConfigDict, steps: int) -> optax.GradientTransformation:
    """Clipping, then Adam or Nesterov momentum, then decoupled weight decay, all times the scheduled rate."""
    parts = [optax.clip_by_global_norm(fields.clip_norm)] if fields.clip_norm else []
    if fields.name == "adam":
        parts.append(optax.scale_by_adam(b1=fields.b1, b2=fields.b2, eps=fields.eps))
    elif fields.name == "nesterov":
        # Equal to the paper's toolkit's `nag`, whose velocity carries the rate: dividing it out leaves this.
        parts.append(optax.trace(decay=fields.momentum, nesterov=True))
    else:
        raise InputError(f"config.optimizer.name={fields.name!r}: choose adam or nesterov")
    if fields.weight_decay:
        parts.append(optax.add_decayed_weights(fields.weight_decay, mask=decayed))
    return optax.chain(*parts, optax.scale_by_learning_rate(make_schedule(fields, steps)))


def decayed(params: dict[str, jax.Array]) -> dict[str, bool]:
    """Weight decay falls on matrices; biases, norms and φ's biases are spared."""
    return {name: array.ndim > 1 and not name.endswith("bias") for name, array in params.items()}


def make_schedule(fields: ConfigDict, steps: int) -> optax.Schedule:
    """Learning rate by step: a linear warm-up, then one of the paper's two decays or none."""
    warmup = fields.warmup_steps
    rise = optax.linear_schedule(fields.warmup_from, fields.learning_rate, warmup)
    if fields.schedule == "cosine_cycles":
        first = fields.period or max(steps - warmup, 1)
        return cosine_cycles(fields, rise, warmup, first, steps)
    if fields.schedule == "inverse_sqrt":
        peak = max(warmup, 1)
        # Counted from the end of the warm-up; before it this is computed too, and thrown away.
        fall = lambda step: fields.learning_rate * (peak / jnp.maximum(step + peak, 1)) ** 0.5  # noqa: E731
        return optax.join_schedules([rise, fall], [warmup])
    if fields.schedule == "constant":
        return optax.join_schedules([rise, optax.constant_schedule(fields.learning_rate)], [warmup])
    raise InputError(f"config.optimizer.schedule={fields.schedule!r}: choose cosine_cycles, inverse_sqrt or constant")


def cosine_cycles(fields: ConfigDict, rise: optax.Schedule, warmup: int, period: float, steps: int) -> optax.Schedule:
    """Loshchilov & Hutter's restarts: each cycle is longer by `period_growth` and lower by `peak_shrink`."""
    lowest = fields.min_learning_rate / fields.learning_rate
    schedules, bounds = [rise], [warmup]
    shrink = 1.0
    while True:
        schedules.append(optax.cosine_decay_schedule(fields.learning_rate * shrink, int(period), alpha=lowest))
        if bounds[-1] + period >= steps:
            return optax.join_schedules(schedules, bounds)
        bounds.append(bounds[-1] + int(period))
        period, shrink = period * fields.period_growth, shrink * fields.peak_shrink
