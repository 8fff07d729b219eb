"""Attention transfer: its loss, what it trains, and a training run that begins with it."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.batch import PADDING, Batch
from t2r.conversion.swap import swap
from t2r.conversion.transfer import converted_attention_names, transfer_losses
from t2r.errors import InputError, Stopped
from t2r.model.parameters import arrays_of, is_new, with_arrays
from t2r.model.transformer import embed
from t2r.store import model_dir
from t2r.training.checkpoint import Checkpoints
from t2r.training.config import default_config, pretrained
from t2r.training.metrics import read_metrics
from t2r.training.trainer import train
from tests.conftest import make_model, micro, micro_mt, random_tokens


def test_only_converted_attention_is_trained():
    teacher = make_model(micro_mt(encoder_layers=1))
    student = swap(teacher, features=4, keep="1")
    batch = Batch(random_tokens(3, 9), random_tokens(3, 7, 1))

    @jax.jit
    @jax.value_and_grad
    def loss(arrays, batch):
        losses, count = transfer_losses(with_arrays(student, arrays), teacher, batch)
        assert list(losses) == converted_attention_names(student) == ["0.attention", "0.cross"]
        return sum(losses.values()) / count

    before, gradient = loss(arrays_of(student), batch)
    trained = {name for name, array in gradient.items() if np.abs(array).max() > 0}
    assert {".".join(name.split(".")[:3]) for name in trained} == {"blocks.0.attention", "blocks.0.cross"}
    stepped = {name: array - 0.01 * gradient[name] for name, array in arrays_of(student).items()}
    assert loss(stepped, batch)[0] < before
    with pytest.raises(InputError, match="the model has none"):
        converted_attention_names(teacher)


def test_the_loss_is_the_relative_error_of_outputs_for_the_teachers_input_without_padding():
    teacher = make_model(micro(layers=1))
    student, tokens = swap(teacher, features=4), random_tokens(2, 6)

    @jax.jit
    def expected_and_actual(tokens):
        x = embed(teacher, teacher.embedding, tokens[:, :-1], jnp.broadcast_to(jnp.arange(5), (2, 5)))
        attention_input = teacher.blocks[0].attention_norm(x)
        teacher_output, output = (model.blocks[0].attention(attention_input)[0] for model in (teacher, student))
        padded = jnp.pad(tokens, ((0, 1), (0, 2)), constant_values=PADDING)
        actual = [transfer_losses(student, teacher, Batch(batch)) for batch in (tokens, padded)]
        return jnp.square(output - teacher_output).sum() / jnp.square(teacher_output).sum(), actual

    expected, actual = expected_and_actual(tokens)
    for losses, count in actual:
        assert count == 10
        np.testing.assert_allclose(losses["0.attention"] / count, expected, rtol=1e-5)


def three_stages(tmp_path, tokenizer, text_file, **transfer):
    """A config with two steps of each stage, on a model of one layer, with much weight decay; and that model."""
    config = default_config()
    model = make_model(micro(vocab_size=tokenizer.vocab_size, layers=1, adaptive_cutoffs=()))
    if not (tmp_path / "lm").exists():
        model_dir.save(tmp_path / "lm", model_dir.LoadedModel(model, tokenizer, {"history": []}))
    config.init_from, config.model = str(tmp_path / "lm"), pretrained()
    config.convert.update(feature_map="t2r", features=4, window=3, sinks=1)
    config.data.update(source=f"text:{text_file}", length=16, batch=4)
    config.transfer.update(steps=2, warmup_steps=0, **transfer)
    config.teacher.update(soft=0.5, soft_steps=2)
    config.optimizer.update(weight_decay=0.5, warmup_steps=0, new_rate=10.0)
    config.mesh.data, config.steps, config.log_every = 1, 6, 1
    config.checkpoint_every, config.keep_checkpoints = 2, 3
    return config, model


def test_a_run_has_three_stages_and_each_changes_only_what_it_says(tmp_path, tokenizer, text_file, capsys):
    config, model = three_stages(tmp_path, tokenizer, text_file)
    train(config, tmp_path / "run")
    said = capsys.readouterr().err
    assert "stage transfer: steps 1 to 2" in said and "stage distill: steps 3 to 4" in said
    assert "stage finetune: steps 5 to 6" in said
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "gradient_norm" in line]
    assert [set(line) & {"distance", "distance.0.attention", "loss"} for line in lines] == [
        *2 * [{"distance", "distance.0.attention"}],
        *4 * [{"loss"}],
    ]
    assert all(0 < line["distance"] < 10 for line in lines[:2])
    rates = [line["learning_rate"] for line in lines]
    assert rates[0] == pytest.approx(1e-2) and rates[2] == pytest.approx(1e-3)  # each stage's own schedule
    # Weight decay, however strong, moves nothing that does not learn.
    after = restored_parameters(tmp_path / "run" / "checkpoints" / "2")
    assert all(np.array_equal(after[name], array) for name, array in arrays_of(model).items())
    before = arrays_of(swap(model, features=4, window=3, sinks=1))
    assert all(np.abs(after[name] - before[name]).max() > 0 for name in after if is_new(name))
    later = restored_parameters(tmp_path / "run" / "checkpoints" / "4")
    assert all(np.abs(later[name] - after[name]).max() > 0 for name in after if not name.endswith("mixture.bias"))


def test_transfer_may_train_the_projections_of_converted_attention(tmp_path, tokenizer, text_file):
    config, model = three_stages(tmp_path, tokenizer, text_file, trainable="converted")
    config.steps = 2
    train(config, tmp_path / "run")
    after = restored_parameters(tmp_path / "run" / "checkpoints" / "2")
    moved = {name for name, array in arrays_of(model).items() if not np.allclose(after[name], array)}
    assert moved and all(name.startswith("blocks.0.attention.") for name in moved)


@pytest.mark.slow
def test_a_run_stopped_in_each_stage_gives_the_losses_of_one_that_was_not(tmp_path, tokenizer, text_file):
    """Stopped at steps 1, 3 and 5, in the middle of each stage, and at the last: it is not finished then, either."""
    config, _ = three_stages(tmp_path, tokenizer, text_file)
    config.checkpoint_every = 1
    train(config, tmp_path / "whole")
    for stop in (1, 3, 5, config.steps, None):
        with pytest.raises(Stopped) if stop else contextlib.nullcontext():
            stop_after(stop, config, tmp_path / "pieces")
        assert (tmp_path / "pieces" / "model").exists() == (stop is None)
    whole, pieces = (
        [{**line, "tokens_per_second": 0, "steps_per_second": 0} for line in read_metrics(path / "metrics.jsonl")]
        for path in (tmp_path / "whole", tmp_path / "pieces")
    )
    assert whole == pieces


def stop_after(step, config, workdir):
    """Runs a config in this process, which is sent SIGTERM before step `step`."""
    import os
    import signal

    from t2r.training import step as steps

    original = steps.Step.__call__
    count = itertools.count(Checkpoints(workdir / "checkpoints", 3).latest or 0)

    def stopping(self, state, parts):
        if next(count) + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, state, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Step, "__call__", stopping)
        train(config, workdir)


def restored_parameters(folder):
    import orbax.checkpoint as ocp

    return {k: np.asarray(v) for k, v in ocp.StandardCheckpointer().restore(folder / "state")["trained"].items()}
