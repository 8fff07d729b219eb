"""The training step: accumulation, data parallelism, precision, and which parameters it updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from conftest import WINDOW, error, make_model, micro, micro_mt, random_tokens, slow_but
from t2r.batch import PADDING, Batch
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.model.parameters import arrays_of, trainable_names
from t2r.training.config import default_config
from t2r.training.optimizer import make_optimizer
from t2r.training.sharding import make_mesh
from t2r.training.step import Objective, init_state, make_step


def run(model, *, steps=3, devices=1, accumulate=1, trainable="all"):
    """Losses and final parameters of a few steps on 4 sequences."""
    options = default_config().optimizer
    options.warmup_steps = 1
    options.learning_rate = 0.01
    optimizer, mesh = make_optimizer(options, steps), make_mesh(ConfigDict({"data": devices}))
    state = init_state(arrays_of(model), trainable_names(model, trainable), optimizer, 0)
    step = make_step(Objective(model), optimizer, mesh, state)
    losses = []
    for i in range(steps):
        parts = random_tokens(4, 17, seed=i).reshape(accumulate, -1, 17)
        state, result = step(state, [Batch(part) for part in parts])
        losses.append(float(result["loss"]))
    return losses, {**state.trained, **state.frozen}


@pytest.fixture(scope="module")
def model():
    return swap(make_model(micro(layers=1)), features=8)


@pytest.fixture(scope="module")
def plain(model):
    return run(jax.tree.map(jnp.copy, model))


@pytest.fixture(scope="module")
def windowed():
    return swap(make_model(micro(layers=1)), features=8, **WINDOW)


@pytest.mark.slow
def test_the_loss_falls(plain):
    model = make_model(micro(layers=1))
    options = default_config().optimizer
    options.update(learning_rate=0.01, warmup_steps=1)
    optimizer, mesh = make_optimizer(options, 30), make_mesh(ConfigDict({"data": 1}))
    state = init_state(arrays_of(model), trainable_names(model, "all"), optimizer, 0)
    step, tokens = make_step(Objective(model), optimizer, mesh, state), [Batch(random_tokens(4, 17))]
    losses = []
    for _ in range(30):
        state, result = step(state, tokens)
        losses.append(float(result["loss"]))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_the_forward_pass_has_the_same_loss():
    """With the same dropout, over two parts."""
    model = make_model(micro(layers=1, dropout=0.2))
    optimizer, mesh = make_optimizer(default_config().optimizer, 1), make_mesh(ConfigDict({"data": 2}))
    state = init_state(arrays_of(model), trainable_names(model, "all"), optimizer, 0)
    step, parts = (
        make_step(Objective(model), optimizer, mesh, state),
        [Batch(random_tokens(4, 17, seed=seed)) for seed in range(2)],
    )
    losses, tokens = zip(*step.forward_pass(state, parts))
    assert float(step(state, parts)[1]["loss"]) == pytest.approx(sum(loss["loss"] for loss in losses) / sum(tokens))


OPTIONS = [dict(accumulate=4), dict(devices=2), dict(devices=2, accumulate=2)]


@pytest.mark.parametrize("options", slow_but(OPTIONS, OPTIONS[-1]))
def test_parts_and_devices_do_not_change_the_result(model, plain, options):
    losses, arrays = run(jax.tree.map(jnp.copy, model), **options)
    np.testing.assert_allclose(losses, plain[0], rtol=1e-5)
    assert error(arrays, plain[1]) < 1e-5


@pytest.mark.slow
def test_a_windowed_model_trains_in_parts_on_devices_and_in_bfloat16(windowed):
    losses, arrays = run(jax.tree.map(jnp.copy, windowed))
    split_losses, split_arrays = run(jax.tree.map(jnp.copy, windowed), devices=2, accumulate=2)
    np.testing.assert_allclose(split_losses, losses, rtol=1e-5)
    assert error(split_arrays, arrays) < 1e-5
    rounded, arrays = run(swap(make_model(micro(layers=1, dtype="bfloat16")), features=8, **WINDOW))
    np.testing.assert_allclose(rounded, losses, rtol=2e-2)
    assert {array.dtype.name for array in arrays.values()} == {"float32"}


def test_bfloat16_follows_float32(plain):
    model = swap(make_model(micro(layers=1, dtype="bfloat16")), features=8)
    losses, arrays = run(model)
    np.testing.assert_allclose(losses, plain[0], rtol=2e-2)
    assert {array.dtype.name for array in arrays.values()} == {"float32"}


TRAINABLE = ["all", "feature_maps", "all_but_feature_maps"]


@pytest.mark.parametrize(
    ("kind", "trainable"), slow_but([(k, t) for k in ("model", "windowed") for t in TRAINABLE],
                                    *(("model", t) for t in TRAINABLE), ("windowed", "feature_maps"))
)  # fmt: skip
def test_only_trainable_parameters_change(kind, trainable, request):
    """What a conversion added, φ and with a window the mixture, is what `feature_maps` names."""
    model = request.getfixturevalue(kind)
    before = {name: np.asarray(array) for name, array in arrays_of(model).items()}
    _, after = run(jax.tree.map(jnp.copy, model), steps=2, trainable=trainable)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    in_maps = {name for name in before if ".feature_map." in name or ".mixture." in name}
    assert any(".mixture." in name for name in in_maps) == (kind == "windowed")
    assert (
        changed
        == {"all": set(before), "feature_maps": in_maps, "all_but_feature_maps": set(before) - in_maps}[trainable]
    )


def test_converted_attention_or_the_decoder_can_train_alone():
    hybrid = swap(make_model(micro_mt(layers=2)), features=4, cross_features=8, keep="1")
    converted, decoder = (trainable_names(hybrid, which) for which in ("converted", "decoder"))
    assert {name.rsplit(".", 2)[0] for name in converted} >= {"blocks.0.attention", "blocks.0.cross"}
    assert {".".join(name.split(".")[:2]) for name in converted} == {"blocks.0"} and not any(
        "norm" in name for name in converted
    )
    assert decoder == {name for name in trainable_names(hybrid, "all") if name.startswith("blocks.")}


def pairs(count, longest, seed):
    """A batch of random sentence pairs with random lengths up to `longest`."""
    rng = np.random.default_rng(seed)
    batch = Batch(np.full((count, longest + 1), PADDING), np.full((count, longest), PADDING))
    for i, (target, source) in enumerate(rng.integers(1, longest + 1, (count, 2))):
        batch.tokens[i, : target + 1] = rng.integers(0, 60, target + 1)
        batch.source[i, :source] = rng.integers(0, 60, source)
    return batch


def test_a_step_of_pairs_is_the_mean_over_all_tokens_of_all_parts():
    """Two parts of different lengths on two devices equal one batch of all pairs, with padding, on one device."""
    model = swap(make_model(micro_mt(layers=1)), features=4, cross_features=8)
    short, long = pairs(4, 5, 0), pairs(2, 9, 1)
    wider = [np.pad(side, ((0, 2), (0, 4)), constant_values=PADDING) for side in short]  # two pairs are only padding
    together = Batch(*(np.concatenate(sides) for sides in zip(wider, long)))
    options = default_config().optimizer
    options.update(learning_rate=0.01, warmup_steps=1)
    optimizer = make_optimizer(options, 2)
    results = []
    for devices, parts in ((2, [short, long]), (1, [together])):
        state = init_state(jax.tree.map(jnp.copy, arrays_of(model)), trainable_names(model, "all"), optimizer, 0)
        step = make_step(Objective(model, 0.1), optimizer, make_mesh(ConfigDict({"data": devices})), state)
        state, result = step(state, parts)
        results.append((result, state.trained))
    tokens = sum((part.tokens[:, 1:] != PADDING).sum() for part in (short, long))
    assert int(results[0][0]["tokens"]) == int(results[1][0]["tokens"]) == tokens
    assert error(results[0], results[1]) < 1e-5


def test_label_smoothing_spreads_a_share_of_the_target():
    model = make_model(micro_mt(layers=1))
    x, targets = jax.random.normal(jax.random.key(0), (7, 32)), jnp.arange(7)
    smoothed = 0.9 * jax.nn.one_hot(targets, 60) + 0.1 / 60
    expected = -(smoothed * model.log_probs(x)).sum(-1)
    np.testing.assert_allclose(model.embedding.loss(x[None], targets[None], smoothing=0.1)[0], expected, rtol=1e-5)
    with pytest.raises(InputError, match="label_smoothing"):
        make_model(micro()).embedding.loss(x[None], targets[None], smoothing=0.1)


def test_random_features_are_constants(model):
    swapped = swap(make_model(micro()), feature_map="rfa", features=8)
    names = trainable_names(swapped, "all")
    assert not any(name.endswith(".pool") for name in names) and any(name.endswith(".sigma") for name in names)


def test_bad_requests_are_refused(model):
    with pytest.raises(InputError, match="all, feature_maps, all_but_feature_maps"):
        trainable_names(model, "phi")
    with pytest.raises(InputError, match="convert it first"):
        trainable_names(make_model(micro()), "feature_maps")
    with pytest.raises(InputError, match="convert it first"):
        trainable_names(make_model(micro()), "converted")
