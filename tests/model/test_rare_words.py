"""The kernels of the loss over rare words, interpreted where there is no GPU, against the loop they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.model import rare_words
from t2r.model.cross_entropy import Scored, cross_entropy
from tests.attention.test_kernels import imagined_gpu
from tests.conftest import error

TOKENS, WORDS = 200, 1100


@pytest.mark.parametrize("width, count", [(16, 150), (16, 0), (256, 3), (256, 200)])
def test_it_is_the_loop_and_its_derivative_too(width, count):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (TOKENS, width), jnp.bfloat16)
    table = jax.random.normal(keys[1], (WORDS, width)) * width**-0.5
    targets = jax.random.randint(keys[2], (TOKENS,), 0, WORDS)
    weights = jax.random.normal(keys[3], (TOKENS,))
    inside = jnp.arange(TOKENS) < count

    def kernels(x, table):
        found = rare_words.losses(x, table, targets, jnp.int32(count), jax.default_backend() != "gpu")
        return (weights * found).sum(), found

    def loop(x, table):
        found = cross_entropy(Scored(x[None], table), targets[None], inside[None], rare=True)[0]
        return (weights * found).sum(), found

    found, expected = (jax.jit(jax.value_and_grad(one, (0, 1), has_aux=True))(x, table) for one in (kernels, loop))
    assert error(found[0], expected[0]) < 1e-4
    assert error(found[1], expected[1]) < 1e-2  # gradients of bfloat16 vectors are bfloat16
    np.testing.assert_array_equal(found[0][1][count:], 0)
    np.testing.assert_array_equal(found[1][0][count:].astype(np.float32), 0)


def test_they_lower_for_a_gpu():
    shapes = jax.ShapeDtypeStruct((300, 64), jnp.bfloat16), jax.ShapeDtypeStruct((WORDS, 64), jnp.float32)
    others = jax.ShapeDtypeStruct((300,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    gradient = jax.jit(jax.grad(lambda *given: rare_words.losses(*given).sum(), (0, 1)))
    with imagined_gpu():
        text = gradient.trace(*shapes, *others).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_they_are_for_gpus_and_widths_they_can_multiply():
    assert not rare_words.has_kernels("auto", jnp.zeros((2, 64), jnp.bfloat16))  # here is no GPU
