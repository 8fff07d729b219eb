"""Tokenizers: lossless subwords, and WikiText's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import PROSE
from t2r.data.tokenizer import SentencePiece, Words, load_tokenizer, train_tokenizer
from t2r.errors import InputError

TOKENIZER = SentencePiece.train(PROSE, 300)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581"), max_size=60))
def test_subwords_are_lossless(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("text", ["  two  spaces\n\n\tand a tab \n", "ünïcödé 漢字 🎉", "</s> <unk> literally"])
def test_subwords_keep_white_space_and_any_character(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_documents_end_in_the_end_token():
    assert TOKENIZER.encode_document("a boat") == [*TOKENIZER.encode("a boat"), TOKENIZER.end]


def test_words_are_those_of_wikitext():
    words = Words.train("the cat saw the dog \n the end \n", 0)
    ids = words.encode_document("the cat saw a bird \n")
    assert words.decode(ids).split(" ") == ["the", "cat", "saw", "<unk>", "<unk>", "\n"]
    assert ids[-1] == words.end and words.unknown(ids) == 2
    assert words.stop not in range(words.vocab_size) and TOKENIZER.stop == TOKENIZER.end
    assert words.encode("the")[0] == 0, "numbered by falling frequency"
    limited = Words.train("a a a b b c \n", 4)
    assert limited.vocab_size == 4 and limited.unknown(limited.encode("a b c")) == 1


@pytest.mark.parametrize("kind", ["sentencepiece", "word"])
def test_tokenizers_survive_the_disk(kind, tmp_path):
    tokenizer = train_tokenizer(kind, PROSE, 300 if kind == "sentencepiece" else 0)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("The old boat moves") == tokenizer.encode("The old boat moves")


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(InputError, match="sentencepiece, word"):
        train_tokenizer("bytes", "text", 100)
    with pytest.raises(InputError, match=r"data\.vocab_size"):
        SentencePiece.train("a short text", 5000)
    with pytest.raises(InputError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
