"""Translation of lines: order, empty lines, long lines."""

import numpy as np
import pytest

from conftest import make_model, micro, micro_mt
from t2r.conversion.swap import swap
from t2r.data.pairs import number_pairs
from t2r.data.tokenizer import FairseqSubwords, SentencePiece, TokenizerPair
from t2r.decode.beam import Beam
from t2r.decode.sampling import Sampling
from t2r.decode.translator import TranslateOptions, batch_rows, pad, translate_lines
from t2r.errors import InputError
from t2r.model.rows import for_decoding
from t2r.store.model_dir import LoadedModel

LINES = [
    "one",
    "",
    "nine hundred and twelve thousand, three hundred and four",
    "  ",
    "forty-two",
    "seven thousand",
    "six",
]


@pytest.fixture(scope="module")
def content():
    text = "\n".join(side for pair in number_pairs(1000) for side in pair)
    tokenizer = SentencePiece.train(text, 340, sentences=True)
    model = swap(make_model(micro_mt(layers=1, vocab_size=340, tied_output=False)), features=4, cross_features=8)
    return LoadedModel(model, TokenizerPair(tokenizer, tokenizer), {"history": []})


def test_translations_are_in_the_order_of_the_lines(content):
    counts = []
    results = translate_lines(content, LINES, TranslateOptions(beam=Beam(3), batch=4), on_batch=counts.append)
    assert sum(counts) == len(LINES) == len(results)
    single = translate_lines(content, LINES[2:3], TranslateOptions(beam=Beam(3), batch=4))[0]
    assert [t.text for t in results[2]] == [t.text for t in single] and len(single) == 3
    np.testing.assert_allclose([t.score for t in results[2]], [t.score for t in single], rtol=1e-4)
    for empty in (1, 3):
        assert results[empty] == [("", 0.0)]
    for translations in results:
        assert all("\n" not in t.text and "\r" not in t.text for t in translations)
        assert [t.score for t in translations] == sorted((t.score for t in translations), reverse=True)


def test_a_limit_of_each_line_is_kept(content):
    unlimited = translate_lines(content, LINES, TranslateOptions(beam=Beam(1), batch=4))
    limited = translate_lines(content, LINES, TranslateOptions(beam=Beam(1), batch=4), limits=[2] * len(LINES))
    whole, cut = ([content.tokenizer.target.encode(t[0].text) for t in results] for results in (unlimited, limited))
    assert max(map(len, cut)) < max(map(len, whole))


def test_8_bit_weights_translate(content):
    """What is likeliest is seldom near to anything else."""
    rounded = content._replace(model=for_decoding(content.model, "int8"))
    exact, results = (translate_lines(c, LINES, TranslateOptions(beam=Beam(1), batch=4)) for c in (content, rounded))
    np.testing.assert_allclose([t[0].score for t in results], [t[0].score for t in exact], rtol=0.1)


def test_sampling_needs_no_beam(content):
    options = TranslateOptions(sampling=Sampling(1.0), seed=1, batch=4)
    first, again = translate_lines(content, LINES, options), translate_lines(content, LINES, options)
    assert first == again != translate_lines(content, LINES, options._replace(seed=2))
    assert all(len(translations) == 1 for translations in first)


@pytest.mark.parametrize("options", [TranslateOptions(sampling=Sampling(1.0)), TranslateOptions(beam=Beam(2))])
def test_a_model_with_few_positions_translates_as_far_as_they_go(options):
    """Sources are padded and default limits are long; neither needs positions."""
    tokenizer = FairseqSubwords(["<s>", "<pad>", "</s>", "<unk>", *"abcdefgh"])
    model = make_model(micro_mt(layers=1, vocab_size=12, positions="learned", max_positions=20))
    content = LoadedModel(model, TokenizerPair(tokenizer, tokenizer), {"history": []})
    (translations,) = translate_lines(content, ["a b c d " * 4], options)
    assert all(0 < len(t.text.split()) < 20 for t in translations)


@pytest.mark.slow
def test_no_translation_is_empty_or_has_padding():
    """Sampled or searched; a random model would give the stop token first in every twelfth sample."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefgh"]
    tokenizer = FairseqSubwords(words)
    model = make_model(micro_mt(layers=1, vocab_size=12))
    content = LoadedModel(model, TokenizerPair(tokenizer, tokenizer), {"history": []})
    for options in (TranslateOptions(sampling=Sampling(9.0), batch=64), TranslateOptions(beam=Beam(4), batch=64)):
        translations = translate_lines(content, ["a b", "c"] * 32, options)
        assert all(t.text for results in translations for t in results)


def test_lines_that_are_too_long_are_refused_or_cut(content):
    options = TranslateOptions(batch=4, max_source=6)
    with pytest.raises(InputError, match=r"max_source=6 tokens: line 13 \(\d+\)"):
        translate_lines(content, LINES, options, first_line=11)
    warnings = []
    results = translate_lines(content, LINES, options._replace(truncate=True), warn=warnings.append)
    assert len(warnings) == 1 and "line 3 " in warnings[0] and len(results) == len(LINES)


def test_batches_have_few_shapes_and_little_padding():
    assert pad([[1] * 3], 4).shape == (4, 16) and pad([[1] * 17], 2).shape == (2, 32) == pad([[1] * 32], 2).shape
    widths = [pad([[1] * length], 1).shape[1] for length in range(1, 1025)]
    assert len(set(widths)) <= 24
    assert all(length <= width < max(17, 1.25 * length + 16) for length, width in enumerate(widths, 1))
    assert batch_rows(100, 32) == 28 and batch_rows(65, 64) == 36 and batch_rows(6400, 64) == 64
    assert all(-(-lines // batch_rows(lines, 32)) == -(-lines // 32) for lines in range(1, 300))


def test_a_language_model_does_not_translate(tokenizer):
    with pytest.raises(InputError, match="language model"):
        translate_lines(LoadedModel(make_model(micro(vocab_size=300)), tokenizer, {}), ["x"])
