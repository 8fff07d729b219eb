"""Training data that the teacher generates."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from t2r.batch import Batch
from t2r.conversion.swap import swap
from t2r.data.pairs import load_pairs
from t2r.data.sources import load_documents
from t2r.data.tokenizer import TokenizerPair
from t2r.decode.beam import Beam
from t2r.decode.translator import TranslateOptions, translate_lines
from t2r.errors import InputError
from t2r.evaluation.score import evaluate_text
from t2r.model.loss import token_losses
from t2r.store import model_dir
from t2r.training import teacher
from t2r.training.build import load_teacher
from t2r.training.config import check, default_config, pretrained
from t2r.training.task import make_task
from t2r.training.trainer import build
from tests.conftest import error, make_model, micro, micro_mt, random_tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer):
    """A language model and a translation model on disk."""
    folder = tmp_path_factory.mktemp("models")
    sizes = dict(vocab_size=tokenizer.vocab_size, layers=1)
    lm, mt = make_model(micro(**sizes, adaptive_cutoffs=())), make_model(micro_mt(**sizes))
    model_dir.save(folder / "lm", model_dir.LoadedModel(lm, tokenizer, {"history": []}))
    model_dir.save(folder / "mt", model_dir.LoadedModel(mt, TokenizerPair(tokenizer, tokenizer), {"history": []}))
    return folder


def make_config(init_from, **fields):
    config = default_config()
    config.init_from, config.model = str(init_from), pretrained()
    config.convert.update(feature_map="t2r", features=4)
    config.data.update(length=12, batch=4, documents=True)
    config.teacher.update(writes=True, texts=20, length=8, batch=8, **fields)
    check(config)
    return config


def test_a_language_model_generates_training_texts(models, tmp_path, tokenizer, monkeypatch):
    """Prompts are used in turn, each text is terminated, 5% validate; an interrupted generation resumes."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The quick fox\nThe old lamp\n")
    config = make_config(models / "lm", prompts=str(prompts))
    generate, calls = teacher.generate_tokens, []

    def interrupted_at_the_second_call(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(teacher, "generate_tokens", interrupted_at_the_second_call)
    with pytest.raises(KeyboardInterrupt):
        teacher.written_tokens(config, tmp_path, tokenizer)
    ids, ends = teacher.written_tokens(config, tmp_path, tokenizer)
    assert len(calls) == 4 and len(ends) == 20  # three batches, of which the second was generated twice
    texts = [text.tolist() for text in np.split(ids, ends[:-1])]
    encoded_prompts = [tokenizer.encode(line) for line in prompts.read_text().splitlines()]
    for number, text in enumerate(texts):
        prompt = encoded_prompts[number % 2]
        # It ends if the teacher ended it, and not at the length limit.
        assert text[: len(prompt)] == prompt and (text[-1] == tokenizer.end) == (len(text) < len(prompt) + 8)
        assert len(prompt) < len(text) <= len(prompt) + 8
    assert len({tuple(text) for text in texts}) > 10
    model = build(config, tmp_path).model
    task = make_task(config, tmp_path, model, tokenizer, 1)
    assert len(calls) == 4 and next(task.batches())[0].whole().tokens.shape == (4, 13)
    assert 1 < task.validate(model) < 1e4
    (sample,) = tmp_path.glob("teacher-*/sample.txt")
    assert sample.read_text().startswith("The quick fox") and not list(tmp_path.glob("teacher-parts*"))
    os.utime(models / "lm" / "model.safetensors", (0, 0))  # another model of this name
    teacher.written_tokens(config, tmp_path, tokenizer)
    assert len(calls) == 7


def test_a_text_ends_with_the_stop_token_that_the_teacher_chose(models, tmp_path, tokenizer, monkeypatch):
    stops = (tokenizer.end, *range(10, tokenizer.vocab_size, 3))
    monkeypatch.setattr(teacher, "stop_ids", lambda _: stops)
    config = make_config(models / "lm")
    ids, ends = teacher.written_tokens(config, tmp_path, tokenizer)
    texts, chosen = [text.tolist() for text in np.split(ids, ends[:-1])], []
    for text in texts:
        found = [i for i in text if i in stops]
        if found:
            assert text[-1] == tokenizer.end and found in (text[-2:], text[-1:])
            chosen.append(found[0])
        else:
            assert len(text) == config.teacher.length  # it has not ended
    assert len(set(chosen)) > 3
    config.data.documents = False  # another text follows in the same sequence
    ids, ends = teacher.written_tokens(config, tmp_path, tokenizer)
    assert all(text[-1] == tokenizer.end for text in np.split(ids, ends[:-1]))


def test_validation_on_documents_is_what_evaluate_measures(models, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(["The quick fox runs.", "An old lamp is here, and it burns.", "No."]))
    config = make_config(models / "lm")
    config.data.update(valid=f"text:{text}", length=10)
    loaded = model_dir.load(models / "lm")
    task = make_task(config, tmp_path, loaded.model, loaded.tokenizer, 1)
    expected = evaluate_text(loaded, f"text:{text}", "all", documents=True, window=10)["perplexity"]
    assert task.validate(loaded.model) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_translation_model_translates_the_sources_of_a_corpus(models, tmp_path):
    """Equal to greedy `translate`; the targets of the corpus are not read, and duplicate sources are removed."""
    table = tmp_path / "pairs.tsv"
    lines = ["The old fox", "A boat", "The lamp counts seven foxes", "A boat"]
    table.write_text("".join(f"{line}\tunused target\n" for line in lines))
    content = model_dir.load(models / "mt")
    config = make_config(models / "mt", temperature=0.0)
    config.data.length = 40
    pairs = teacher.written_pairs(config, tmp_path, f"tsv:{table}", "all", content.tokenizer)
    assert len(pairs) == 3
    expected = translate_lines(content, lines[:3], TranslateOptions(beam=Beam(1), batch=3))
    target = content.tokenizer.target
    for pair in (pairs[number] for number in range(3)):
        source = target.decode(list(pair.source)[:-1])
        written = target.decode([int(i) for i in pair.target[1:-1]])
        (hypothesis,) = expected[lines.index(source)]
        assert written == "" or " ".join(written.split()) == hypothesis.text


def test_the_likeliest_token_alone_is_a_label(models):
    """soft_top_k=1: the loss is that of the token that the teacher would write."""
    teacher = load_teacher(make_config(models / "lm", soft=1.0, soft_top_k=1))
    student, tokens = swap(teacher.model, features=4), random_tokens(2, 9)
    losses, _ = token_losses(student, Batch(tokens), teacher=teacher)
    log_probs = student.log_probs(student(tokens[:, :-1])[0])
    likeliest = teacher.model.logits(teacher.model(tokens[:, :-1])[0]).argmax(-1)
    assert error(losses, -jnp.take_along_axis(log_probs, likeliest[..., None], -1)[..., 0]) < 1e-5


def test_spliced_sources_have_clauses_of_two_sentences_from_all_corpora_equally():
    large, small = [f"large {i}, and more; too." for i in range(50)], ["small, and few.", "no clause"]
    texts = list(teacher.spliced([large, small], 400, seed=1))
    assert texts == list(teacher.spliced([large, small], 400, seed=1)) and len(set(texts)) > 100
    assert {"small, too.", "small, and few.", "no clauseno clause"} <= set(texts)
    from_small = [text.startswith(("small", "no")) for text in texts]
    assert 150 < sum(from_small) < 250
    assert all(text.startswith(("large", "small,", "no clause")) and text[-1] in ".e" for text in texts)


def test_sources_can_be_concatenated(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"text of {name}\n")
        (tmp_path / f"{name}.tsv").write_text(f"{name} one\teins\n{name} two\tzwei\n")
    spec = " + ".join(f"text:{tmp_path / name}" for name in "ab")
    assert load_documents(spec, "all") == ["text of a\n", "text of b\n"]
    pairs = load_pairs(" + ".join(f"tsv:{tmp_path / name}.tsv" for name in "ab"), "all")
    assert [source for source, _ in pairs] == ["a one", "a two", "b one", "b two"]


def test_a_teacher_needs_a_pretrained_model():
    config = default_config()
    config.teacher.update(writes=True, texts=3, soft=2.0)
    config.transfer.update(steps=5)
    problems = (
        r"config.teacher.texts=3 must be at least 20(.|\n)*needs config.init_from(.|\n)*a conversion(.|\n)*soft=2"
    )
    with pytest.raises(InputError, match=problems):
        check(config)
