"""Training data that a model writes itself."""

import numpy as np
import pytest

from t2r.data.pairs import load_pairs
from t2r.data.sources import load_documents
from t2r.data.tokenizer import TokenizerPair
from t2r.decode.beam import Beam
from t2r.decode.translator import TranslateOptions, translate_lines
from t2r.errors import InputError
from t2r.store import model_dir
from t2r.training import teacher
from t2r.training.config import check, default_config, pretrained
from t2r.training.task import make_task
from t2r.training.trainer import build
from tests.conftest import make_model, micro, micro_mt


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer):
    """A language model and a translation model on disk."""
    folder = tmp_path_factory.mktemp("models")
    sizes = dict(vocab_size=tokenizer.vocab_size, layers=1)
    lm, mt = make_model(micro(**sizes, adaptive_cutoffs=())), make_model(micro_mt(**sizes))
    model_dir.save(folder / "lm", model_dir.LoadedModel(lm, tokenizer, {"history": []}))
    model_dir.save(folder / "mt", model_dir.LoadedModel(mt, TokenizerPair(tokenizer, tokenizer), {"history": []}))
    return folder


def a_config(init_from, **fields):
    config = default_config()
    config.init_from, config.model = str(init_from), pretrained()
    config.convert.update(feature_map="t2r", features=4)
    config.data.update(length=12, batch=4, documents=True)
    config.teacher.update(writes=True, texts=20, length=8, batch=8, **fields)
    check(config)
    return config


def test_a_language_model_writes_what_its_conversion_trains_on(models, tmp_path, tokenizer, monkeypatch):
    """Its prompts in turn; each text closed; the last twentieth to validate on; written once, taken up if cut off."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The quick fox\nThe old lamp\n")
    config = a_config(models / "lm", prompts=str(prompts))
    write, calls = teacher.generate_tokens, []

    def dies_at_the_second(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*arguments, **options)

    monkeypatch.setattr(teacher, "generate_tokens", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        teacher.written_tokens(config, tmp_path, tokenizer)
    ids, ends = teacher.written_tokens(config, tmp_path, tokenizer)
    assert len(calls) == 4 and len(ends) == 20  # of three batches, the first was kept
    texts = [text.tolist() for text in np.split(ids, ends[:-1])]
    begins = [tokenizer.encode(line) for line in prompts.read_text().splitlines()]
    for number, text in enumerate(texts):
        begin = begins[number % 2]
        assert text[: len(begin)] == begin and text[-1] == tokenizer.end and len(begin) < len(text) <= len(begin) + 9
    assert len({tuple(text) for text in texts}) > 10
    model, _, _ = build(config, tmp_path)
    task = make_task(config, tmp_path, model, tokenizer, 1)
    assert len(calls) == 4 and next(task.batches())[0].whole().tokens.shape == (4, 13)
    assert 1 < task.validate(model) < 1e4
    (sample,) = tmp_path.glob("teacher-*/sample.txt")
    assert sample.read_text().startswith("The quick fox") and not list(tmp_path.glob("teacher-parts*"))


def test_a_translation_model_translates_the_sources_of_a_corpus(models, tmp_path):
    """As `translate` does, greedily; the corpus's own targets are not read, sources that come twice are one."""
    table = tmp_path / "pairs.tsv"
    lines = ["The old fox", "A boat", "The lamp counts seven foxes", "A boat"]
    table.write_text("".join(f"{line}\tno matter what\n" for line in lines))
    content = model_dir.load(models / "mt")
    config = a_config(models / "mt", temperature=0.0)
    config.data.length = 40
    found = teacher.written_pairs(config, tmp_path, f"tsv:{table}", "all", content.tokenizer)
    assert len(found) == 3
    expected = translate_lines(content, lines[:3], TranslateOptions(beam=Beam(1), batch=3))
    target = content.tokenizer.target
    for pair in (found[number] for number in range(3)):
        source = target.decode(list(pair.source)[:-1])
        written = target.decode([int(i) for i in pair.target[1:-1]])
        (wanted,) = expected[lines.index(source)]
        assert written == "" or " ".join(written.split()) == wanted.text


def test_spliced_sources_are_clauses_of_two_and_small_corpora_have_an_equal_part():
    large, small = [f"large {i}, and more; too." for i in range(50)], ["small, and few.", "no clause"]
    found = list(teacher.spliced([large, small], 400, seed=1))
    assert found == list(teacher.spliced([large, small], 400, seed=1)) and len(set(found)) > 100
    assert {"small, too.", "small, and few.", "no clauseno clause"} <= set(found)
    beginnings = [text.startswith(("small", "no")) for text in found]
    assert 150 < sum(beginnings) < 250
    assert all(text.startswith(("large", "small,", "no clause")) and text[-1] in ".e" for text in found)


def test_sources_add_up(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"text of {name}\n")
        (tmp_path / f"{name}.tsv").write_text(f"{name} one\teins\n{name} two\tzwei\n")
    spec = " + ".join(f"text:{tmp_path / name}" for name in "ab")
    assert load_documents(spec, "all") == ["text of a\n", "text of b\n"]
    pairs = load_pairs(" + ".join(f"tsv:{tmp_path / name}.tsv" for name in "ab"), "all")
    assert [source for source, _ in pairs] == ["a one", "a two", "b one", "b two"]


def test_a_teacher_must_be_there():
    config = default_config()
    config.teacher.update(writes=True, texts=3, soft=2.0, transfer_steps=5)
    problems = (
        r"config.teacher.texts=3 must be at least 20(.|\n)*needs config.init_from(.|\n)*a conversion(.|\n)*soft=2"
    )
    with pytest.raises(InputError, match=problems):
        check(config)
