"""Tokenizers: lossless subwords, WikiText's words, and those of fairseq."""

import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import PROSE, make_model, micro
from t2r.data.byte_pairs import BytePairs
from t2r.data.tokenizer import (
    FairseqSubwords,
    FairseqWords,
    Hub,
    Pieces,
    SentencePiece,
    Words,
    continuation_prefix,
    decode_after,
    load_tokenizer,
    train_tokenizer,
)
from t2r.errors import InputError
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from tests.damages import DAMAGES

TOKENIZER = SentencePiece.train(PROSE, 300)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581"), max_size=60))
def test_subwords_are_lossless(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("text", ["  two  spaces\n\n\tand a tab \n", "ünïcödé 漢字 🎉", "</s> <unk> literally"])
def test_subwords_preserve_white_space_and_any_character(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("first", ["sentences", "documents"])
def test_a_continuation_keeps_its_first_space(first):
    """Tokenizers that put a space before a text drop it again, which only a beginning must lose."""
    tokenizer = SentencePiece.train(PROSE, 300, sentences=first == "sentences")
    ids = tokenizer.encode("The old clerk counts lamps")
    for cut in range(1, len(ids)):
        prompt, after = ids[:cut], ids[cut:]
        prefix = continuation_prefix(tokenizer, prompt[-1])
        assert tokenizer.decode(prompt) + decode_after(tokenizer, prefix, after) == "The old clerk counts lamps"
    assert continuation_prefix(tokenizer, tokenizer.end) == []
    assert decode_after(tokenizer, [], ids) == "The old clerk counts lamps", "what begins a text has no such space"
    assert continuation_prefix(Words.train(PROSE, 0), 5) == []


def test_documents_end_in_the_end_token():
    assert TOKENIZER.encode_document("a boat") == [*TOKENIZER.encode("a boat"), TOKENIZER.end]


def test_words_follow_wikitext():
    words = Words.train("the cat saw the dog \n the end \n", 0)
    ids = words.encode_document("the cat saw a bird \n")
    assert words.decode(ids).split(" ") == ["the", "cat", "saw", "<unk>", "<unk>", "\n"]
    assert ids[-1] == words.end and words.unknown(ids) == 2
    assert words.stop not in range(words.vocab_size) and TOKENIZER.stop == TOKENIZER.end
    assert words.encode("the")[0] == 0, "ids are in order of falling frequency"
    limited = Words.train("a a a b b c \n", 4)
    assert limited.vocab_size == 4 and limited.unknown(limited.encode("a b c")) == 1


@pytest.mark.parametrize("kind", ["sentencepiece", "word"])
def test_tokenizers_are_saved_and_loaded(kind, tmp_path):
    tokenizer = train_tokenizer(kind, PROSE, 300 if kind == "sentencepiece" else 0)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("The old boat moves") == tokenizer.encode("The old boat moves")


CODES = "l o\nlo w</w>\nlo w\ne r</w>\nlo w\n"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.mark.parametrize("codes", [f"#version: 0.2\n{CODES}", CODES.replace("\n", " 7\n")])
def test_byte_pairs_are_merged_in_their_order(codes):
    split = BytePairs(codes)
    assert [split(word) for word in ("low", "lower", "l")] == [["low"], ["low@@", "er"], ["l"]]
    assert split("lolo") == ["lo@@", "l@@", "o"], "the last character has the end mark, so it is another symbol"
    with pytest.raises(InputError, match="'one'"):
        BytePairs("one\n")


def test_in_the_oldest_codes_the_end_of_a_word_is_a_symbol():
    split = BytePairs("l o\nlo w\nlow </w>\n")
    assert [split(word) for word in ("low", "lows", "lolo")] == [["low"], ["low@@", "s"], ["lo@@", "lo"]]


def test_fairseq_subwords_are_split_after_moses_tokenisation(tmp_path):
    words = [*SPECIAL, "low@@", "er", "low", ",", "&amp;", "@-@", "."]
    codes = CODES + "@ -\n@- @</w>\n& a\n&a m\n&am p\n&amp ;</w>\n"
    FairseqSubwords(words, f"#version: 0.2\n{codes}", "en").save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("lower-low, low & low.")
    assert ids == [4, 5, 9, 6, 7, 6, 8, 6, 10]
    assert tokenizer.decode(ids) == "lower-low, low & low." and tokenizer.decode([*ids[:1], 1]) == "low"
    assert tokenizer.encode_document("low\nlow\n") == [6, 2, 6, 2] and tokenizer.decode([6, 2, 6]) == "low\nlow"
    without_codes = FairseqSubwords(words)
    assert without_codes.encode("low@@ er elsewhere") == [4, 5, 3] and without_codes.decode([4, 5, 6]) == "lower low"


def test_fairseq_words_have_their_own_line_end(tmp_path):
    FairseqWords([*SPECIAL, "the", "end"]).save(tmp_path)
    words = load_tokenizer(tmp_path)
    assert type(words) is FairseqWords and (words.end, words.stop) == (2, -1)
    assert words.encode_document("the end\nof") == [4, 5, 2, 3, 2] and words.unknown([3, 4]) == 1


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(InputError, match="sentencepiece, word"):
        train_tokenizer("bytes", "text", 100)
    with pytest.raises(InputError, match=r"data\.vocab_size"):
        SentencePiece.train("a short text", 5000)
    with pytest.raises(InputError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("size", "beyond"), [(5000, +1), (5, -1)])
def test_the_error_about_a_vocabulary_size_names_one_that_works(size, beyond):
    text = "a short text, of two lines,\nwhich are short"
    with pytest.raises(InputError) as raised:
        SentencePiece.train(text, size)
    named = int(re.search(r"set --config\.data\.vocab_size=(\d+) or", str(raised.value))[1])
    assert SentencePiece.train(text, named).vocab_size == named
    with pytest.raises(InputError, match=f"--config.data.source_vocab_size={named} or"):
        SentencePiece.train(text, named + beyond, field="data.source_vocab_size")


def a_hub_tokenizer() -> Hub:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "old": 2, "boat": 3}, "</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Hub(model.to_str(), begin=0, stop=1, other_stops=[3])


def a_marian_tokenizer() -> Pieces:
    pieces = [TOKENIZER._processor.id_to_piece(i) for i in range(TOKENIZER.vocab_size)]
    return Pieces(TOKENIZER._model, {**{piece: i for i, piece in enumerate(pieces)}, "<pad>": len(pieces)})


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage != "newer"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SentencePiece(TOKENIZER._model, begin=1),
        lambda: FairseqSubwords([*SPECIAL, "old", "bo@@", "at"], "b o\na t</w>\n", "en"),
        a_hub_tokenizer,
        a_marian_tokenizer,
    ],
)
def test_damaged_files_are_refused_or_change_nothing(make, damage, tmp_path):
    tokenizer = make()
    (tmp_path / "whole").mkdir()
    tokenizer.save(tmp_path / "whole")
    ids = tokenizer.encode("old boat")
    for name in sorted(path.name for path in (tmp_path / "whole").iterdir()):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / name)
        DAMAGES[damage](folder / name)
        try:
            loaded = load_tokenizer(folder)
        except InputError as error:
            assert str(folder) in str(error)
        else:
            optional = damage == "missing" and name == SentencePiece.ids_file
            assert optional or (loaded.encode("old boat"), loaded.end, loaded.stop) == (
                ids,
                tokenizer.end,
                tokenizer.stop,
            )
            loaded.decode(ids)


def test_a_vocabulary_that_was_cut_does_not_fit_the_model(tmp_path):
    words = Words.train(PROSE, 0)
    model_dir.save(
        tmp_path / "lm",
        LoadedModel(make_model(micro(vocab_size=words.vocab_size, adaptive_cutoffs=())), words, {"history": []}),
    )
    path = tmp_path / "lm" / Words.file
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(InputError, match=f"has {words.vocab_size - 1} words, the model {words.vocab_size}"):
        model_dir.load(tmp_path / "lm")
