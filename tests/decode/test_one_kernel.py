"""The kernel that decodes all layers at once: its parts, interpreted one by one, against the model's own step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from t2r.decode.one_kernel import OneKernel, Packed, Shape, run_layers, suits
from t2r.model.config import AttentionSpec
from t2r.model.parameters import abstract_model
from tests.attention.test_kernels import imagined_gpu
from tests.conftest import error, make_model, micro, random_tokens

MERGED = (AttentionSpec("merged", "t2r", 16),)


def test_its_parts_are_the_models_step(monkeypatch):
    """For a batch that does not fill it, one text of which has ended."""
    monkeypatch.setattr("t2r.decode.one_kernel.TILE", 32)
    monkeypatch.setattr("t2r.decode.one_kernel.PROGRAMS", 4)  # some have several heads, some have no rows
    model = make_model(micro(attention=MERGED, projection_bias=False))
    tokens, going = random_tokens(3, 5), jnp.array([[True], [False], [True]])
    _, state = model(tokens, state=model.init_state(3, 8))
    fast = OneKernel(model, 3, interpret=True)

    @jax.jit
    def both(state):
        plain = model(tokens[:, :1], state=state, mask=going)
        hidden, after = fast(tokens[:, :1], state=fast.stacked(state), mask=going)
        return plain, (hidden, fast.unstacked(after))

    plain, kernel = both(state)
    texts = np.array([0, 2])  # what comes of a text that has ended is nobody's concern, but its state is
    assert error(kernel[0][texts], plain[0][texts]) < 1e-5
    assert error(kernel[1], plain[1]) < 1e-5


def test_it_is_for_merged_language_models_alone():
    model = abstract_model(micro(attention=MERGED))
    assert suits(model)
    for fields in (
        dict(gated=True), dict(norm_placement="after"), dict(norm="rms"), dict(kv_heads=1), dict(activation="gelu"),
        dict(attention=(AttentionSpec(), *MERGED)), dict(attention=(AttentionSpec("linear", "t2r", 16),)),
    ):  # fmt: skip
        assert not suits(abstract_model(micro(**{"attention": MERGED, **fields}))), fields


def test_the_papers_model_lowers_for_gpus():
    """32 layers in one kernel, in bfloat16."""
    shape = Shape(32, 16, 1024, 8, 32, 128, 4096, 1e-5, 1e-2)
    of = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    matrix = functools.partial(of, 32, dtype=jnp.bfloat16)
    packed = Packed(
        of(32, 2, 1024), matrix(1536, 1024), of(32, 1536), matrix(1024, 1024), of(32, 1024),
        of(32, 2, 1024), matrix(4096, 1024), of(32, 4096), matrix(1024, 4096), of(32, 1024),
    )  # fmt: skip
    arrays = of(16, 1024, dtype=jnp.bfloat16), of(32, 16, 8, 32, 128), of(32, 16, 8, 32), of(16, dtype=bool)
    with imagined_gpu():
        traced = jax.jit(lambda packed, *arrays: run_layers(packed, *arrays, shape)).trace(packed, *arrays)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call") == 1
