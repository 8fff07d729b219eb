"""Answers as text: no broken characters, no stop strings."""

import pytest

from t2r.data.tokenizer import SentencePiece, continuation_prefix
from t2r.serve.text import AnswerText
from tests.conftest import PROSE


def pieces(tokenizer, text: str, *stops: str) -> tuple[list[str], bool]:
    answer, shown = AnswerText(tokenizer, (tokenizer.stop,), stops), []
    for token in tokenizer.encode(text):
        shown.append(answer.add([token]))
        if answer.stopped:
            break
    return [*shown, answer.close()], answer.stopped


@pytest.fixture(scope="module")
def bytes_and_words() -> SentencePiece:
    return SentencePiece.train(PROSE, 300)


def test_characters_of_several_tokens_come_whole(bytes_and_words):
    text = "The 老狐狸 counts 🦊🦊 lamps, naïve Ärger " * 8
    shown, stopped = pieces(bytes_and_words, text)
    assert "".join(shown) == text and not stopped
    assert not any("\ufffd" in piece for piece in shown)
    assert sum(bool(piece) for piece in shown) > 20


def test_tokens_that_come_together_are_the_same_text(bytes_and_words):
    text = "The 老狐狸 counts 🦊🦊 lamps, naïve Ärger " * 8
    answer, ids = AnswerText(bytes_and_words, (bytes_and_words.stop,)), bytes_and_words.encode(text)
    parts = [answer.add(ids[first : first + 7]) for first in range(0, len(ids), 7)]
    assert "".join([*parts, answer.close()]) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_answer_that_continues_a_text_keeps_its_first_space():
    tokenizer = SentencePiece.train(PROSE, 300, sentences=True)
    answer = AnswerText(tokenizer, (tokenizer.stop,), (), continuation_prefix(tokenizer, 5))
    shown = [answer.add([token]) for token in tokenizer.encode("counts lamps")]
    assert "".join([*shown, answer.close()]) == " counts lamps" and shown[0].startswith(" ")


@pytest.mark.parametrize(
    "stops, expected",
    [
        ([" counts"], "The old clerk"),
        (["clerk c", "old"], "The "),
        (["counts lamps, then counts"], "The old clerk counts lamps, then moves"),
        (["🦊"], "The old clerk counts lamps, then moves"),
        (["moves"], "The old clerk counts lamps, then "),
        (["The old clerk counts lamps, then moves"], ""),
    ],
)
def test_stop_strings_end_the_text_and_are_not_shown(stops, expected, bytes_and_words):
    text = "The old clerk counts lamps, then moves"
    shown, stopped = pieces(bytes_and_words, text, *stops)
    assert "".join(shown) == expected
    assert stopped == (expected != text)
