"""Statistics of attention: what they say of distributions that are known, and what they need of memory."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.analysis.attention_maps import attention_maps
from t2r.analysis.features import feature_use
from t2r.analysis.statistics import LEAST_WEIGHT, averages, mean_of_heads, measure, sums_of
from t2r.batch import PADDING, Batch
from t2r.conversion.swap import swap
from tests.conftest import make_model, micro, micro_mt, random_tokens


def one_query(weights, reference=None):
    """The statistics of one query, the last of as many tokens as it has weights."""
    weights = jnp.asarray(weights, jnp.float32)
    reference = None if reference is None else jnp.asarray(reference, jnp.float32)[None, None, None]
    sums = sums_of(weights[None, None, None], reference, jnp.ones((1, 1), bool), jnp.full((1, 1), len(weights) - 1.0))
    return {name: float(value[0]) for name, value in sums._asdict().items()}


def test_a_uniform_query_and_a_pointed_one():
    even, last = one_query([0.1] * 10), one_query([0.0] * 9 + [1.0])
    assert even["entropy"] == pytest.approx(np.log(10), rel=1e-5) and last["entropy"] == pytest.approx(0)
    assert even["look_back"] == pytest.approx(4.5) and last["look_back"] == 0
    assert one_query([0.11] + [0.089] * 10)["span"] == 11, "the first of 11 tokens is needed for 90%"
    assert last["span"] == 1 and one_query([0.05, 0.05, 0.9, 0])["span"] == 2
    first = one_query([1.0, 0, 0, 0])
    assert first["look_back"] == 3 and first["span"] == 4


def test_distances_to_a_reference():
    two = one_query([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5])
    assert two["distance"] == pytest.approx(1.0)
    assert two["kl"] == pytest.approx(np.log(0.5 / LEAST_WEIGHT), rel=1e-4), "a weight of zero is bounded"
    same = one_query([0.25, 0.75], [0.25, 0.75])
    assert same["distance"] == same["kl"] == 0
    assert one_query([0.5, 0.5], [0.25, 0.75])["kl"] == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5), rel=1e-4)


def test_weights_that_are_no_distribution():
    """Small weights, of a clamped normaliser, are a distribution when scaled; none at all, or negative ones, not."""
    small = one_query([0.005, 0.005], [0.5, 0.5])
    assert small["entropy"] == pytest.approx(np.log(2), rel=1e-5) and small["kl"] == pytest.approx(0, abs=1e-5)
    assert small["distance"] == pytest.approx(0.495 * 2**0.5, rel=1e-5)
    none = one_query([0.0, 0.0], [1.0, 0.0])
    assert none["distance"] == 1 and none["with_weight"] == none["entropy"] == 0
    assert one_query([-0.2, 1.2])["negative"] == 1


def test_a_model_is_measured_as_its_maps_say():
    """Over two batches, the second with a padded sequence; the last two queries count."""
    transformer = make_model(micro(layers=2, adaptive_cutoffs=()))
    model = swap(transformer, features=4)
    tokens = np.asarray(random_tokens(3, 13))
    padded = np.concatenate([tokens[2:], np.full((1, 13), PADDING, np.int32)])
    measured = measure(model, iter([Batch(tokens[:2]), Batch(padded)]), transformer=transformer, queries=2)
    maps = [[attention_maps(one, row[:-1].tolist())[:, :, -2:] for row in tokens] for one in (model, transformer)]
    ours, theirs = (np.stack(one) for one in maps)  # [sequence, layer, head, query, key]
    distances = np.linalg.norm(ours - theirs, axis=-1).mean((0, 3))
    np.testing.assert_allclose([one.distance for one in measured], distances, rtol=1e-4)
    back = np.asarray([10, 11])[:, None] - np.arange(12)
    np.testing.assert_allclose(
        [one.look_back for one in measured], (ours * back).sum(-1).mean((0, 3)) / ours.sum(-1).mean((0, 3)), rtol=0.02
    )
    assert [one.name for one in measured] == ["0.attention", "1.attention"]
    use = feature_use(model, Batch(tokens))
    assert [one.features.dead for one in measured] == [use[one.name].dead for one in measured]
    assert measured[0].features.clamped == pytest.approx(use["0.attention"].clamped)
    mean = averages(measured)
    assert mean["distance"] == pytest.approx(distances.mean(), rel=1e-4) and 0 <= mean["dead"] <= 1


def test_a_head_that_gives_no_weight_has_a_distance_only():
    """Where relu is 0 for all keys of one head; the other head alone counts in means."""
    transformer = make_model(micro(layers=1, adaptive_cutoffs=()))
    model = swap(transformer, features=4)
    bias = model.blocks[0].attention.feature_map.bias
    bias[...] = bias[...].at[0].set(-1e6)
    (measured,) = measure(model, [Batch(random_tokens(2, 9))], transformer=transformer)
    for values in (measured.entropy, measured.kl, measured.look_back, measured.span):
        assert values[0] is None and values[1] is not None
        assert mean_of_heads(values) == pytest.approx(np.mean([value for value in values[1:] if value is not None]))
    assert measured.distance[0] > 0 and averages([measured])["entropy"] == mean_of_heads(measured.entropy)
    assert averages([measured._replace(entropy=[None] * 4)])["entropy"] is None


def test_a_transformer_is_at_no_distance_from_itself():
    model = make_model(micro(layers=2, adaptive_cutoffs=()))
    (first, _) = measure(model, [Batch(random_tokens(2, 9))], transformer=model)
    assert max(first.distance) < 1e-6 and max(first.kl) < 1e-4 and first.features is None and first.kind == "softmax"


def test_rfa_has_distances_and_no_entropy():
    transformer = make_model(micro(layers=1, adaptive_cutoffs=()))
    model = swap(transformer, feature_map="rfa", features=8)
    (one,) = measure(model, [Batch(random_tokens(4, 30))], transformer=transformer)
    assert one.entropy is None and one.kl is None and one.look_back is None and min(one.distance) > 0
    assert averages([one])["entropy"] is None


@pytest.mark.slow
def test_translation_has_causal_and_cross_attention():
    """The weights of cross attention are those that its output is made of, and padding has none."""
    transformer = make_model(micro_mt())
    model = swap(transformer, features=4, cross_features=8)
    source = np.asarray(random_tokens(2, 7, seed=1)).copy()
    source[1, 4:] = PADDING
    batch = Batch(np.asarray(random_tokens(2, 6)), source)
    measured = {one.name: one for one in measure(model, [batch], transformer=transformer)}
    layers = range(transformer.config.layers)
    assert list(measured) == [f"{layer}.{kind}" for layer in layers for kind in ("attention", "cross")]
    assert measured["0.cross"].look_back is None and min(measured["0.cross"].entropy) >= 0
    assert max(measured["0.cross"].entropy) <= np.log(7) + 1e-5
    hidden = jax.random.normal(jax.random.key(0), (2, 6, transformer.config.width))
    encoded = jax.random.normal(jax.random.key(1), (2, 7, transformer.config.width))
    mask = jnp.asarray(source != PADDING)
    for one in (transformer, model):
        cross = one.blocks[0].cross
        weights = cross.cross_weights(hidden, encoded, mask)
        assert not np.asarray(weights[1, :, :, 4:]).any()
        out = cross._finish(jnp.einsum("bhnm,bmhd->bnhd", weights, cross.value(encoded))[:, :, :, None])
        expected = cross.query_state(hidden, cross.build_state(encoded, mask=mask))
        np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4)


def test_memory_does_not_grow_with_the_data():
    """Neither on the host, where sums are kept, nor on the device, where no array stays."""
    transformer = make_model(micro(layers=1, adaptive_cutoffs=()))
    model = swap(transformer, features=4)

    def batches(count):
        return (Batch(np.full((2, 65), number % 7, np.int32)) for number in range(count))

    def peaks(count):
        on_device = []

        def noting():
            for batch in batches(count):
                on_device.append(sum(array.nbytes for array in jax.live_arrays()))
                yield batch

        tracemalloc.start()
        measure(model, noting(), transformer=transformer, queries=4)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, max(on_device)

    peaks(2)  # compiles
    (few, few_on_device), (many, many_on_device) = peaks(3), peaks(60)
    assert many < few + 100_000 and many_on_device <= few_on_device + 4096
