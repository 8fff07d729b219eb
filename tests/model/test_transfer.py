"""Attention transfer: what is compared, what is trained by it, and that a run begins with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2r.convert import model_dir
from t2r.convert.swap import swap
from t2r.data.tokenizer import TokenizerPair
from t2r.errors import InputError
from t2r.model.loss import PADDING, Batch
from t2r.model.parameters import arrays_of, with_arrays
from t2r.model.transfer import converted, transfer_losses
from t2r.train.config import default_config, pretrained
from t2r.train.metrics import read_metrics
from t2r.train.trainer import train
from tests.conftest import PROSE, make_model, micro, micro_mt, random_tokens


@pytest.mark.parametrize("config", [micro(), micro_mt()], ids=["lm", "mt"])
def test_each_converted_attention_learns_from_the_one_it_replaces_and_nothing_else_does(config):
    teacher = make_model(config)
    student = swap(teacher, features=4, keep="1")
    source = random_tokens(3, 7, 1) if config.encoder_layers else None
    batch = Batch(random_tokens(3, 9), source)

    @jax.jit
    def distance(arrays, batch):
        found, count = transfer_losses(with_arrays(student, arrays), teacher, batch)
        assert list(found) == converted(student)
        return sum(found.values()) / count

    found, gradient = jax.value_and_grad(distance)(arrays_of(student), batch)
    learning = {name.rsplit(".", 2)[0] for name, array in gradient.items() if np.abs(array).max() > 0}
    places = {"attention", "cross"} if config.encoder_layers else {"attention"}
    kept = [f"blocks.{layer}.{place}" for layer in range(config.layers) if layer != 1 for place in places]
    assert {".".join(name.split(".")[:3]) for name in learning} == set(kept)
    nearer = {name: array - 0.01 * gradient[name] for name, array in arrays_of(student).items()}
    assert distance(nearer, batch) < found
    longer = Batch(*(x if x is None else jnp.pad(x, ((0, 1), (0, 2)), constant_values=PADDING) for x in batch))
    np.testing.assert_allclose(distance(arrays_of(student), longer), found, rtol=1e-5)
    with pytest.raises(InputError, match="the model has none"):
        converted(teacher)


def test_what_it_compares_are_the_layers_outputs_to_the_teachers_input():
    """With one layer: by hand."""
    teacher = make_model(micro(layers=1))
    student, tokens = swap(teacher, features=4), random_tokens(2, 6)
    heard = []
    teacher.blocks[0].attention_norm, norm = (
        lambda x: heard.append(norm(x)) or heard[-1],
        teacher.blocks[0].attention_norm,
    )
    teacher(tokens[:, :-1])
    said, answer = (model.blocks[0].attention(heard[0])[0] for model in (teacher, student))
    found, count = transfer_losses(student, teacher, Batch(tokens))
    expected = jnp.square(answer - said).sum() / jnp.square(said).sum()
    assert count == 10
    np.testing.assert_allclose(found["0.attention"] / count, expected, rtol=1e-5)


def test_a_run_begins_with_it_and_then_finetunes(tmp_path, tokenizer):
    """A translation model; the teacher's probabilities are not asked for."""
    config = default_config()
    model = make_model(micro_mt(vocab_size=tokenizer.vocab_size, layers=1))
    model_dir.save(tmp_path / "mt", model_dir.Model(model, TokenizerPair(tokenizer, tokenizer), {"history": []}))
    table = tmp_path / "pairs.tsv"
    table.write_text(
        "".join(f"{line[:20]} {number}\t{line[:12]}\n" for number, line in enumerate(PROSE.splitlines()[:60]))
    )
    config.init_from, config.model = str(tmp_path / "mt"), pretrained()
    config.convert.update(feature_map="t2r", features=4)
    config.data.update(source=f"tsv:{table}", length=60, batch_tokens=240, buckets=1)
    config.teacher.transfer_steps = 2
    config.steps, config.log_every = 4, 1
    train(config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"distance.0.attention", "distance.0.cross"} <= set(lines[0])
    assert ["distance" in line for line in lines[:4]] == [True, True, False, False]
    assert ["loss" in line for line in lines[:4]] == [False, False, True, True]
    assert all(0 < line["distance"] < 10 for line in lines[:2])
