"""The kernel that reorders the beams of a search, on a CPU that emulates a GPU's threads, and where it is used."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.kernels.decoding import fused_model, launch, layers_packing, reorder
from t2r.model.config import AttentionSpec
from tests.conftest import make_model, micro_mt
from tests.kernels.emulation import emulate


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("sentences", "beams"), [(3, 5), (1, 2), (4, 24)])
def test_sequences_take_the_state_of_their_parents_in_place(sentences, beams, tmp_path, monkeypatch):
    """With arrays of different sizes and types, one of which has more words than there are threads."""
    monkeypatch.setattr(reorder, "MOST_BLOCKS", 2)
    rng, count = np.random.default_rng(beams), sentences * beams
    arrays = [
        rng.standard_normal((count, 3, 7)).astype(np.float32),
        rng.standard_normal((count, 40, 64)).astype(np.float32),
        rng.standard_normal((count, 2, 8)).astype(jnp.bfloat16),
        rng.integers(0, 100, count).astype(np.int32),
        rng.integers(0, 2, (count, 12)).astype(bool),
    ]
    arrays = [jnp.asarray(array) for array in arrays]
    parents = (np.arange(count) // beams * beams + rng.integers(0, beams, count)).astype(np.int32)
    macros = reorder.definitions(arrays, beams)
    blocks, emulated = macros["BLOCKS"] * macros["ARRAYS"], dict(macros, RANKS=1, SHARED_MEMORY=0)
    moved = emulate(tmp_path, launch.source("reorder.cu"), emulated, [parents], arrays, blocks, "reorder")
    for before, after in zip(arrays, moved):
        np.testing.assert_array_equal(after, before[parents])


def test_arrays_that_the_kernel_cannot_move():
    array = jnp.zeros((10, 4), jnp.float32)
    assert reorder.fits([array, jnp.zeros(10, jnp.int32)], 5)
    assert not reorder.fits([array], 1) and not reorder.fits([array], reorder.MOST_BEAMS + 1)
    assert not reorder.fits([array, jnp.zeros((10, 7), bool)], 5)


def test_the_kernel_of_all_layers_reorders_in_place(monkeypatch):
    """All arrays of a state but the sources, each once; otherwise the model reorders."""
    calls = []

    def gather(arrays, parents, beams):
        calls.append((len(arrays), beams))
        return [array[parents] for array in arrays]

    monkeypatch.setattr(reorder, "reorder", gather)
    model = make_model(micro_mt(attention=(AttentionSpec("linear", "t2r", 16), AttentionSpec())))
    state = model.init_state(6, 8)
    state = jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype), state)
    parents = jnp.array([1, 1, 0, 5, 3, 4])
    packed = layers_packing.PackedLayers((), ())
    for layers, count in ((packed, 1), ((), 0)):
        fast = fused_model.FusedModel(model, fused_model.PackedModel(layers, None))
        found, expected = fast.reorder(state, parents, 3), model.reorder(state, parents, 3)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert len(calls) == count
        calls.clear()
