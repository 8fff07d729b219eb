"""The loss in chunks of rows, with a derivative of its own, against what it says it is."""

import functools

import jax
import jax.numpy as jnp
import pytest

from t2r.model import cross_entropy as module
from t2r.model.cross_entropy import LogitInputs, cross_entropy, distances
from tests.conftest import error

WORDS = 37


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Five rows at a time, of which the last are filled up; and memory that is not written to is not zero."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(module, "LOGITS", 5 * WORDS + 1)
    monkeypatch.setattr(module, "ALIGNED", 8)


def scored(seed: int, *, bias: bool, width: int = 8) -> LogitInputs:
    keys = jax.random.split(jax.random.key(seed), 3)
    x, table = jax.random.normal(keys[0], (3, 4, width)), jax.random.normal(keys[1], (WORDS, width))
    return LogitInputs(x, table, jax.random.normal(keys[2], (WORDS,)) if bias else None)


def log_probs(one: LogitInputs) -> jax.Array:
    logits = one.x @ one.table.T
    return jax.nn.log_softmax(logits if one.bias is None else logits + one.bias)


def plain(student: LogitInputs, targets, inside, smoothing, teacher, taught) -> jax.Array:
    logs = log_probs(student)
    wanted = (1 - smoothing) * jax.nn.one_hot(targets, WORDS) + smoothing / WORDS
    if teacher is not None:
        wanted = (1 - taught) * wanted + taught * jnp.exp(log_probs(teacher))
    losses = -(wanted * logs).sum(-1)
    return losses if inside is None else jnp.where(inside, losses, 0)


@pytest.mark.parametrize(
    "smoothing, taught, bias, padded, kept",
    [
        (0.0, 0.0, True, False, True),
        (0.0, 0.0, True, False, False),
        (0.1, 0.0, False, True, True),
        (0.1, 0.5, False, False, True),
        (0.0, 0.5, False, False, False),
        (0.1, 0.3, True, True, False),
    ],
)
def test_it_is_the_cross_entropy_and_its_derivative_too(smoothing, taught, bias, padded, kept, monkeypatch):
    monkeypatch.setattr(module, "KEPT", module.KEPT if kept else 0)
    student = scored(0, bias=bias)
    teacher = scored(1, bias=bias, width=16) if taught else None
    targets = jax.random.randint(jax.random.key(2), (3, 4), 0, WORDS)
    inside = jnp.arange(12).reshape(3, 4) % 3 > 0 if padded else None
    weights = jax.random.normal(jax.random.key(3), (3, 4))

    def total(loss, student):
        losses = loss(student, targets, inside, smoothing, teacher, taught)
        return (weights * losses).sum(), losses

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(total, loss), has_aux=True))(student)
        for loss in (cross_entropy, plain)
    )
    assert error(found, expected) < 1e-5


def test_it_is_the_distance_of_any_two_distributions():
    student, teacher = scored(0, bias=True), scored(1, bias=False)
    targets = jnp.zeros((3, 4), jnp.int32)
    found = cross_entropy(student, targets, None, 0.0, teacher, 1.0)
    ours, theirs = (lambda x, one=one: log_probs(one._replace(x=x)) for one in (student, teacher))
    assert error(found, distances(ours, student.x, theirs, teacher.x)) < 1e-5


def test_devices_that_share_rows_find_the_same():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    given = [scored(seed, bias=True) for seed in (0, 1)]
    student, teacher = (one._replace(x=jnp.tile(one.x, (8, 1, 1))) for one in given)
    targets, inside = jnp.zeros((24, 4), jnp.int32), jnp.arange(96).reshape(24, 4) % 5 > 0

    def total(student):
        return cross_entropy(student, targets, inside, 0.0, teacher, 0.5).sum()

    alone = jax.jit(jax.value_and_grad(total))(student)
    with jax.set_mesh(mesh):
        together = jax.jit(jax.value_and_grad(total))(student)
    assert error(jax.device_get(together), jax.device_get(alone)) < 1e-5
