"""The chunked cross-entropy and its hand-written gradient, against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.model import cross_entropy as module
from t2r.model.cross_entropy import LogitInputs, cross_entropy, teacher_cross_entropy
from tests.conftest import error

VOCAB_SIZE = 37


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of at most five tokens, so that the last one is padded; and uninitialised memory that is NaN."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 5 * VOCAB_SIZE + 1)
    monkeypatch.setattr(module, "ALIGNMENT", 8)


def random_inputs(seed: int, *, bias: bool, width: int = 8) -> LogitInputs:
    keys = jax.random.split(jax.random.key(seed), 3)
    x, table = jax.random.normal(keys[0], (3, 4, width)), jax.random.normal(keys[1], (VOCAB_SIZE, width))
    return LogitInputs(x, table, jax.random.normal(keys[2], (VOCAB_SIZE,)) if bias else None)


def log_probs(inputs: LogitInputs) -> jax.Array:
    logits = inputs.x @ inputs.table.T
    return jax.nn.log_softmax(logits if inputs.bias is None else logits + inputs.bias)


def by_definition(student: LogitInputs, targets, mask, smoothing, teacher, teacher_weight) -> jax.Array:
    p = (1 - smoothing) * jax.nn.one_hot(targets, VOCAB_SIZE) + smoothing / VOCAB_SIZE
    if teacher is not None:
        p = (1 - teacher_weight) * p + teacher_weight * jnp.exp(log_probs(teacher))
    losses = -(p * log_probs(student)).sum(-1)
    return losses if mask is None else jnp.where(mask, losses, 0)


@pytest.mark.parametrize(
    "smoothing, teacher_weight, bias, padded, saved",
    [
        (0.0, 0.0, True, False, True),
        (0.0, 0.0, True, False, False),
        (0.1, 0.0, False, True, True),
        (0.1, 0.5, False, False, True),
        (0.0, 0.5, False, False, False),
        (0.1, 0.3, True, True, False),
    ],
)
def test_losses_and_gradients_are_those_of_the_definition(smoothing, teacher_weight, bias, padded, saved, monkeypatch):
    monkeypatch.setattr(module, "MAX_SAVED_LOGITS", module.MAX_SAVED_LOGITS if saved else 0)
    student = random_inputs(0, bias=bias)
    teacher = random_inputs(1, bias=bias, width=16) if teacher_weight else None
    targets = jax.random.randint(jax.random.key(2), (3, 4), 0, VOCAB_SIZE)
    mask = jnp.arange(12).reshape(3, 4) % 3 > 0 if padded else None
    weights = jax.random.normal(jax.random.key(3), (3, 4))

    def total(loss, student):
        losses = loss(student, targets, mask, smoothing, teacher, teacher_weight)
        return (weights * losses).sum(), losses

    actual, expected = (
        jax.jit(jax.value_and_grad(functools.partial(total, loss), has_aux=True))(student)
        for loss in (cross_entropy, by_definition)
    )
    assert error(actual, expected) < 1e-5


def test_both_losses_of_a_teachers_distribution_agree():
    student, teacher = random_inputs(0, bias=True), random_inputs(1, bias=False)
    targets = jnp.zeros((3, 4), jnp.int32)
    actual = cross_entropy(student, targets, None, 0.0, teacher, 1.0)
    student_log_probs, teacher_log_probs = (
        lambda x, inputs=inputs: log_probs(inputs._replace(x=x)) for inputs in (student, teacher)
    )
    expected = teacher_cross_entropy(student_log_probs, student.x, teacher_log_probs, teacher.x)
    assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("top_k", [1, 7, VOCAB_SIZE, 10 * VOCAB_SIZE])
def test_a_teachers_top_k_share_the_whole_mass(top_k):
    """Against NumPy: both forms of the loss, and the gradient."""
    student, teacher = random_inputs(0, bias=True), random_inputs(1, bias=True, width=16)
    targets = jax.random.randint(jax.random.key(2), (3, 4), 0, VOCAB_SIZE)
    q, p = (np.exp(np.asarray(log_probs(inputs), np.float64)) for inputs in (student, teacher))
    expected, gradient = np.zeros((3, 4)), 0.5 * q - 0.5 * np.eye(VOCAB_SIZE)[np.asarray(targets)]
    for at in np.ndindex(3, 4):
        likeliest = np.argsort(-p[at])[:top_k]
        share = p[at][likeliest] / p[at][likeliest].sum()
        expected[at] = -(share * np.log(q[at][likeliest])).sum()
        gradient[at] += 0.5 * q[at]
        gradient[at][likeliest] -= 0.5 * share
    actual = cross_entropy(student, targets, None, 0.0, teacher, 1.0, teacher_top_k=top_k)
    functions = [lambda x, inputs=inputs: log_probs(inputs._replace(x=x)) for inputs in (student, teacher)]
    other = teacher_cross_entropy(functions[0], student.x, functions[1], teacher.x, top_k)
    assert error(actual, expected) < 1e-5 and error(other, expected) < 1e-5

    def total(bias):
        changed = student._replace(bias=bias)
        return cross_entropy(changed, targets, None, 0.0, teacher, 0.5, teacher_top_k=top_k).sum()

    assert error(jax.grad(total)(student.bias), gradient.sum((0, 1))) < 1e-5


def test_a_batch_sharded_over_devices_has_the_same_loss():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inputs = [random_inputs(seed, bias=True) for seed in (0, 1)]
    student, teacher = (one._replace(x=jnp.tile(one.x, (8, 1, 1))) for one in inputs)
    targets, mask = jnp.zeros((24, 4), jnp.int32), jnp.arange(96).reshape(24, 4) % 5 > 0

    def total(student):
        return cross_entropy(student, targets, mask, 0.0, teacher, 0.5).sum()

    one_device = jax.jit(jax.value_and_grad(total))(student)
    with jax.set_mesh(mesh):
        sharded = jax.jit(jax.value_and_grad(total))(student)
    assert error(jax.device_get(sharded), jax.device_get(one_device)) < 1e-5
