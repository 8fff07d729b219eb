"""`import t2r`: the functions that a notebook needs, and what they say to wrong arguments."""

import pytest

import t2r
from t2r.errors import InputError


@pytest.fixture(scope="module")
def model():
    return t2r.load("builtin:tiny_lm")


def test_from_a_model_to_text(model, tmp_path):
    text = t2r.generate(model, "Return a new", length=4)
    assert isinstance(text, str) and t2r.generate("builtin:tiny_lm", ["Return a new"], length=4) == [text]
    assert t2r.generate(model, []) == []
    hybrid = t2r.convert(model, features=4, keep=[0, 2])
    assert [spec.kind for spec in hybrid.model.config.attention] == ["softmax", "linear", "softmax", "linear"]
    t2r.save(t2r.merge(hybrid), tmp_path / "rnn")
    merged = t2r.load(tmp_path / "rnn")
    assert [entry["action"] for entry in merged.provenance["history"]][-2:] == ["swap", "merge"]
    assert set(t2r.__all__) <= set(dir(t2r)) and t2r.__version__


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda model: t2r.generate(model.model, "a"), "is not a model with its tokenizer"),
        (lambda model: t2r.generate(model, "a", length=0), "length=0 must be at least 1"),
        (lambda model: t2r.generate(model, "a", temperature=float("nan")), "temperature=nan must be"),
        (lambda model: t2r.translate(model, "a"), "language model"),
        (lambda model: t2r.convert(model, keep=[9]), "layers 0 to 3"),
        (lambda model: t2r.convert(model, cross_keep=[1]), "a language model has no cross attention"),
        (lambda model: t2r.merge(model), "convert it first"),
        (lambda model: t2r.load("nowhere"), "does not exist"),
        (lambda model: t2r.load_config("no_such_config"), "no config file no_such_config"),
        (lambda model: t2r.evaluate(model, "builtin:numbers-en-de"), "is sentence pairs, but the model is"),
    ],
)
def test_wrong_arguments_get_one_clear_error(model, call, message):
    with pytest.raises(InputError, match=message):
        call(model)
