"""Optimizers and schedules against the formulas of fairseq, the paper's toolkit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t2r.errors import InputError
from t2r.model.config import AttentionSpec
from t2r.model.parameters import abstract_model, arrays_of
from t2r.training.config import default_config
from t2r.training.optimizer import decayed, make_optimizer, make_schedule
from tests.conftest import micro


def fields(**changed):
    result = default_config().optimizer
    result.update(changed)
    return result


def test_cosine_cycles_grow_longer_and_lower():
    """Each cycle twice as long, its peak and floor 25% lower, after a linear warm-up."""
    schedule = make_schedule(
        fields(schedule="cosine_cycles", learning_rate=1.0, min_learning_rate=1e-4, warmup_steps=16, warmup_from=1e-7,
               period=100, period_growth=2.0, peak_shrink=0.75), 1000,
    )  # fmt: skip

    def expected(step):
        if step < 16:
            return 1e-7 + (1 - 1e-7) * step / 16
        after_warmup = step - 16
        cycle = math.floor(math.log2(1 + after_warmup / 100))
        length, start = 100 * 2**cycle, 100 * (2**cycle - 1)
        low, high = 1e-4 * 0.75**cycle, 0.75**cycle
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * (after_warmup - start) / length))

    for step in [0, 1, 8, 15, 16, 17, 66, 115, 117, 200, 315, 317, 600, 714, 717, 999]:
        assert float(schedule(step)) == pytest.approx(expected(step), rel=1e-4, abs=1e-6), step


def test_inverse_square_root():
    schedule = make_schedule(fields(schedule="inverse_sqrt", learning_rate=5e-4, warmup_steps=4000), 30_000)
    assert float(schedule(2000)) == pytest.approx(1e-7 + (5e-4 - 1e-7) / 2, rel=1e-5)
    for step in (4000, 9000, 30_000):
        assert float(schedule(step)) == pytest.approx(5e-4 * math.sqrt(4000 / step), rel=1e-5)


def test_nesterov_is_the_papers_nag():
    """fairseq's update, whose velocity contains the learning rate, with a schedule that changes the rate."""
    options = fields(
        name="nesterov", momentum=0.9, learning_rate=0.1, schedule="inverse_sqrt", warmup_steps=3, clip_norm=0
    )
    optimizer, schedule = make_optimizer(options, 100), make_schedule(options, 100)
    params = {"w": jnp.array([1.0, -2.0])}
    state = optimizer.init(params)
    p, velocity, last_rate = np.array([1.0, -2.0]), np.zeros(2), None
    rng = np.random.default_rng(0)
    for step in range(12):
        gradient = rng.normal(size=2)
        rate = float(schedule(step))
        correction = rate / last_rate if last_rate else rate
        p = p + 0.81 * correction * velocity - 1.9 * rate * gradient
        velocity = 0.9 * correction * velocity - rate * gradient
        last_rate = rate
        updates, state = optimizer.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], p, rtol=1e-5)


def test_adam_with_decoupled_decay_on_matrices_only():
    options = fields(
        name="adam", learning_rate=0.01, schedule="constant", warmup_steps=0, weight_decay=0.1, clip_norm=0
    )
    optimizer = make_optimizer(options, 10)
    params = {"a.kernel": jnp.ones((2, 2)), "a.bias": jnp.ones(2), "phi.bias": jnp.ones((2, 2))}
    assert decayed(params) == {"a.kernel": True, "a.bias": False, "phi.bias": False}
    gradient = jax.tree.map(lambda x: 0.5 * jnp.ones_like(x), params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a.bias"], -0.01, rtol=1e-4)  # Adam's first step equals the learning rate
    np.testing.assert_allclose(updates["a.kernel"], -0.01 - 0.01 * 0.1, rtol=1e-4)


def test_clipping_bounds_the_global_norm():
    options = fields(
        name="nesterov", momentum=0.0, learning_rate=1.0, schedule="constant", warmup_steps=0, clip_norm=0.1
    )
    optimizer = make_optimizer(options, 10)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    assert float(optax.global_norm(updates)) == pytest.approx(0.1, rel=1e-4)


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="adam or nesterov"):
        make_optimizer(fields(name="sgd"), 10)
    with pytest.raises(InputError, match="cosine_cycles, inverse_sqrt or constant"):
        make_schedule(fields(schedule="cosine"), 10)


def test_the_scale_of_random_features_does_not_decay():
    """RFA's σ is a matrix of a scale for each head and dimension: decayed, its attention would become flat."""
    params = arrays_of(abstract_model(micro(attention=(AttentionSpec("linear", "rfa", 8),) * 2)))
    decays = decayed({name: jnp.zeros(array.shape) for name, array in params.items() if "attention" in name})
    assert not decays["blocks.0.attention.feature_map.sigma"] and decays["blocks.0.attention.query.kernel"]
