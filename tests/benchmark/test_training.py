"""Training benchmarks: operation counts, the timed step, and compilation for TPUs."""

import importlib.util

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from conftest import linear_spec, micro, micro_mt
from t2r.batch import Batch
from t2r.benchmark.compile import compile_training, lower_decoding, topology_devices
from t2r.benchmark.floor import training_flops
from t2r.benchmark.train import measure, zipf_tokens
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.model.config import AttentionSpec, preset
from t2r.model.loss import total_loss
from t2r.model.parameters import abstract_model
from t2r.training.config import architecture, default_config
from t2r.training.sharding import make_mesh


def abstract_batch(sequences, targets, sources=None):
    ids = lambda length: jax.ShapeDtypeStruct((sequences, length), np.int32)  # noqa: E731
    return Batch(ids(targets + 1), None if sources is None else ids(sources))


@pytest.mark.slow
def test_operations_of_the_papers_language_model_by_hand():
    """Per token: 6 for each parameter of the layers and of the first softmax band, 6 · n · 1,024 for causal attention.

    A fifth of the layers is dropped; T2R's queries and keys have 8 · 32 features instead of 1,024.
    """
    config, n = preset("paper_lm"), 512
    per_token = 0.8 * 32 * (6 * 12 * 1024**2 + 6 * n * 1024) + 6 * 1024 * 20_002
    assert training_flops(config, abstract_batch(3, n)) == pytest.approx(3 * n * per_token, rel=1e-6)
    t2r = swap(abstract_model(config), feature_map="t2r", features=32).config
    per_token = 0.8 * 32 * (6 * 10.5 * 1024**2 + 6 * 1024 * 2 * 32) + 6 * 1024 * 20_002
    assert training_flops(t2r, abstract_batch(3, n)) == pytest.approx(3 * n * per_token, rel=1e-6)


@pytest.mark.parametrize("family", ["language model", "translation"])
def test_operations_are_about_what_the_compiler_counts(family):
    """In the forward pass. The compiler also counts operations that are not products, and full attention."""
    sizes = dict(layers=1, width=256, heads=4, feedforward=1024, vocab_size=2048)
    if family == "language model":
        config, batch = micro(**sizes, adaptive_cutoffs=()), abstract_batch(2, 96)
    else:
        config, batch = micro_mt(**sizes, encoder_layers=1), abstract_batch(2, 96, 64)
    model = abstract_model(config)
    counted = jax.jit(total_loss).lower(model, batch).cost_analysis()["flops"]
    assert 0.9 < training_flops(config, batch) / 3 / counted < 1.05


def test_operations_of_a_window():
    """A window over the whole sequence needs full attention's products beside those of φ, a shorter one fewer."""
    batch, length = abstract_batch(1, 96), 96

    def flops(window, features=1):
        return training_flops(micro(attention=(AttentionSpec("windowed", "t2r", features, window=window),)), batch)

    softmax, pairs = training_flops(micro(), batch), 2 * 2 * 32 * 3 * 2  # layers, products, width; forward, backward
    assert flops(96) == flops(500)
    assert flops(96) - flops(8) == pairs * (length**2 / 2 - (8 * length - 8**2 / 2))
    with_map = 2 * length * 32 * (2 + 2) * 3 * 2 / 2 * 2  # φ and linear attention with one feature, of two layers
    assert flops(96) - softmax == with_map


def test_tokens_follow_zipfs_law():
    tokens = zipf_tokens((200, 500), 267_735, 0)
    assert tokens.min() == 0 or tokens.min() == 1
    assert tokens.max() < 267_735
    shares = [(tokens < bound).mean() for bound in (20_000, 60_000)]
    np.testing.assert_allclose(shares, np.log([20_000, 60_000]) / np.log(267_735), atol=0.01)


def test_a_step_is_measured_on_all_devices():
    config = default_config()
    config.model = architecture("micro_lm", dropout=0.1)
    config.data.update(length=16, batch=16, vocab_size=0)
    config.accumulate = 2
    speed = measure(config, steps=1, rounds=2)
    assert speed.tokens_per_second == pytest.approx(256 / speed.step_seconds)
    assert np.isfinite(speed.loss) and speed.utilisation is None, "the peak of a CPU is unknown"
    assert speed.forward_seconds > 0


def test_batches_that_do_not_divide_among_devices_are_refused():
    config = default_config()
    config.model = architecture("micro_lm")
    config.data.update(length=16, batch=20, vocab_size=0)
    with pytest.raises(InputError, match=r"config.data.batch=20 .* 8 devices of config.mesh.data and fsdp"):
        measure(config)


def test_unknown_topologies_are_refused():
    with pytest.raises(InputError, match="--topology=v1:2x2"):
        topology_devices("v1:2x2")
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(InputError, match=r"jax\[tpu\]"):
            topology_devices("v2:2x2")


@pytest.mark.parametrize("kind", ["softmax", "t2r", "windowed"])
def test_a_decoding_step_lowers_with_a_sharded_state(kind):
    mesh = make_mesh(ConfigDict(dict(data=2, tensor=2)))
    with jax.set_mesh(mesh):
        lowered = lower_decoding(abstract_model(micro(attention=linear_spec(kind))), mesh, 4, 32)
    assert '{"data"' in lowered.as_text() and '"tensor"' in lowered.as_text()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler, libtpu, is not installed")
def test_a_step_compiles_for_a_real_tpu():
    config = default_config()
    config.model = architecture("micro_lm")
    config.data.update(length=128, batch=16, vocab_size=0)
    report = compile_training(config, "v2:2x2")
    assert report["devices"] == 8 and report["fits"] and report["step_seconds"] > 0
