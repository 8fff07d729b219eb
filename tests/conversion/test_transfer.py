"""Attention transfer: its loss, what it trains, and a training run that begins with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.batch import PADDING, Batch
from t2r.conversion.swap import swap
from t2r.conversion.transfer import converted_attention_names, transfer_losses
from t2r.errors import InputError
from t2r.model.parameters import arrays_of, with_arrays
from t2r.model.transformer import embed
from t2r.store import model_dir
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


def test_a_run_begins_with_transfer_and_then_finetunes(tmp_path, tokenizer, text_file):
    config = default_config()
    model = make_model(micro(vocab_size=tokenizer.vocab_size, layers=1, adaptive_cutoffs=()))
    model_dir.save(tmp_path / "lm", model_dir.LoadedModel(model, tokenizer, {"history": []}))
    config.init_from, config.model = str(tmp_path / "lm"), pretrained()
    config.convert.update(feature_map="t2r", features=4)
    config.data.update(source=f"text:{text_file}", length=16, batch=4)
    config.mesh.data, config.teacher.transfer_steps = 1, 2
    config.steps, config.log_every = 4, 1
    config.checkpoint_every, config.keep_checkpoints, config.optimizer.weight_decay = 2, 2, 0.5
    train(config, tmp_path / "run")
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "gradient_norm" in line]
    assert [set(line) & {"distance", "distance.0.attention", "loss"} for line in lines] == [
        *2 * [{"distance", "distance.0.attention"}],
        *2 * [{"loss"}],
    ]
    assert all(0 < line["distance"] < 10 for line in lines[:2])
    # Weight decay moves the attention that learns, and nothing else, while it learns alone.
    after = restored_parameters(tmp_path / "run" / "checkpoints" / "2")
    moved = {name for name, array in arrays_of(model).items() if name in after and not np.allclose(after[name], array)}
    assert moved and all(name.startswith("blocks.0.attention.") for name in moved)


def restored_parameters(folder):
    import orbax.checkpoint as ocp

    return {k: np.asarray(v) for k, v in ocp.StandardCheckpointer().restore(folder / "state")["trained"].items()}
