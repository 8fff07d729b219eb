"""Matrices by row, in float32 and in 8 bits, against the model that they come from."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from conftest import WINDOW, error, make_model, micro, micro_mt, random_tokens
from t2r.batch import PADDING
from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.integers import quantise
from t2r.model import rows
from t2r.model.loss import source_states
from t2r.model.rows import for_decoding, is_for_decoding
from t2r.store import model_dir

TOKENS = np.random.default_rng(0).integers(3, 300, (3, 9)).astype(np.int32)
SOURCES = np.where(np.arange(7) < np.array([[7], [4], [5]]), TOKENS[:, :7], PADDING)


def model_of(name):
    """A language model or a translation model, of each kind of attention and of embedding."""
    if name == "gated":  # with rotary positions, and an output table of its own
        fields = dict(positions="rotary", gated=True, activation="swish", tied_output=False, output_bias=True)
        model = make_model(micro(vocab_size=300, adaptive_cutoffs=(), **fields))
        model.embedding.bias[...] = jax.random.normal(jax.random.key(0), (300,))
        return model
    model = make_model(micro_mt(vocab_size=300, source_vocab_size=300))
    converted = lambda **options: swap(model, features=4, cross_features=8, **options)  # noqa: E731
    return {"softmax": lambda: model, "t2r": converted, "merged": lambda: merge(converted()),
            "windowed": lambda: converted(**WINDOW)}[name]()  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def stepwise(graph, arrays):
    """The last hidden layer of each token, decoded one by one, and what an output layer makes of it."""
    model = nnx.merge(graph, arrays)
    source = source_states(model, jnp.asarray(SOURCES)) if model.config.encoder_layers else None
    state = model.init_state(3, 9, source)
    outputs = []
    for token in TOKENS.T:
        hidden, state = model(jnp.asarray(token)[:, None], state=state)
        outputs.append(hidden[:, 0])
    last = outputs[-1]
    likeliest = model.embedding.likeliest(last, 6, 4)
    logits = model.logits(jnp.stack(outputs, 1))
    return logits, model.log_probs(last), likeliest, model.greedy_token(last)


def run(model):
    return stepwise(*nnx.split(model))


@pytest.mark.parametrize("name", ["softmax", "t2r", "merged", "windowed", "gated"])
def test_matrices_by_row_are_the_same_model(name):
    model = model_of(name)
    plain, by_row = run(model), run(for_decoding(model))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, by_row)
    assert not is_for_decoding(model) and is_for_decoding(for_decoding(model))


@pytest.mark.parametrize("name", ["merged", "gated"])
def test_8_bit_matrices_are_nearly_the_same_model(name):
    model = model_of(name)
    exact, rounded = run(model)[0], run(for_decoding(model, "int8"))[0]
    deviation = float(jnp.sqrt(jnp.square(exact - rounded).mean() / exact.var()))
    assert 1e-4 < deviation < 0.05  # rounded, but to one part in 127 of the largest of each row
    arrays = jax.tree.leaves(nnx.state(for_decoding(model, "int8")))
    assert {array.dtype for array in arrays if array.ndim > 1} >= {jnp.dtype("int8")}


def test_prompts_are_read_with_the_rounded_matrices_that_steps_have():
    """T2R that is not merged, with so many tokens that merging would be cheaper: merged matrices round otherwise."""
    model = for_decoding(swap(make_model(micro(vocab_size=300)), features=2), "int8")
    tokens = random_tokens(2, 200)
    whole = jax.jit(lambda tokens: model(tokens, state=model.init_state(2, 200))[1])(tokens)
    step = jax.jit(lambda state, token: (model(token[:, None], state=state)[1], None))
    state, _ = jax.lax.scan(step, model.init_state(2, 200), jnp.asarray(tokens).T)
    for prompt, steps in zip(whole.layers, state.layers):
        assert error(prompt, steps) < 1e-4


def test_rounding_is_to_the_nearest_of_255_values():
    x = np.random.default_rng(0).standard_normal((5, 40), np.float32) * np.array([[1], [9], [1e-4], [1e6], [0]])
    x = jnp.asarray(x, jnp.float32)
    integers, scale = quantise(x)
    assert integers.dtype == jnp.int8 and int(jnp.abs(integers).max()) == 127
    assert (np.abs(integers * scale[:, None] - x) <= np.asarray(scale)[:, None] / 2 * 1.0001).all()
    assert not integers[4].any() and np.isfinite(scale).all()


@pytest.mark.parametrize("vectors", [1, 3, 4, 33])
def test_the_product_of_integers_and_that_of_rounded_weights_agree(vectors):
    """On CPUs the activations are rounded too; elsewhere only the weights are."""
    rng = np.random.default_rng(vectors)
    matrix, scale = quantise(jnp.asarray(rng.standard_normal((24, 64), np.float32)))
    x = jnp.asarray(rng.standard_normal((vectors, 64), np.float32))
    expected = (matrix * scale[:, None]) @ x.T
    np.testing.assert_allclose(rows._dequantised_product(matrix, scale, x), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rows._integer_product(matrix, scale, x), expected, atol=0.3)
    integers, x_scale = quantise(x)  # whose product is exact
    exact = np.asarray(matrix, np.int64) @ np.asarray(integers, np.int64).T * np.outer(scale, x_scale)
    np.testing.assert_allclose(rows._integer_product(matrix, scale, x), exact, rtol=1e-5)


def test_a_model_for_decoding_is_not_saved(tmp_path, tokenizer):
    content = model_dir.LoadedModel(for_decoding(make_model(micro(vocab_size=300)), "int8"), tokenizer, {"history": []})
    with pytest.raises(InputError, match="save the one that it was made from"):
        model_dir.save(tmp_path / "model", content)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_no_token_is_outside_the_vocabulary(weights):
    """Not even if a vector is infinite: then rows of zeros, with which the table is padded, give no numbers."""
    model = for_decoding(make_model(micro(vocab_size=130, adaptive_cutoffs=())), weights)
    x = jnp.ones((2, model.config.width)).at[0, 3].set(jnp.inf)
    for choose in (rows._argmax, rows._argmax_in_blocks):
        assert (choose(model.embedding._row_logits(x)) < 130).all()
    assert model.embedding.greedy_token(x).shape == (2,) and model.embedding.logits(x).shape == (2, 130)


def test_8_bit_matrices_round_to_the_same_integers_again():
    """Also in bfloat16: the kernel of all layers packs them from what the model has."""
    model = for_decoding(make_model(micro(dtype="bfloat16", adaptive_cutoffs=())), "int8")
    down = model.blocks[0].feedforward.down
    again, _ = quantise(down.kernel.reshape(math.prod(down.inputs), -1).T)
    assert (again == down.matrix.matrix[...]).all()
