"""Translation scores against sacrebleu's own, and the paper's tokenised BLEU against a computation by hand."""

import math

import pytest
import sacrebleu

from t2r.errors import InputError
from t2r.evaluation.bleu import score_translations, tokenized_bleu

HYPOTHESES = ["The cat sat on the mat.", "A well-known old dog barks, doesn't it?", "Nothing in common"]
REFERENCES = ["The cat sat on the mat.", "A well-known old dog barked, didn't it?", "Quite something else here"]


def test_scores_equal_sacrebleus():
    scores = score_translations(HYPOTHESES, REFERENCES)
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert "tok:13a" in scores["signature"] and sacrebleu.__version__ in scores["signature"]
    assert scores["sentences"] == 3 and scores["exact_match"] == pytest.approx(1 / 3)


def test_chinese_is_scored_by_character():
    text = ["我喜欢学习新的语言。"]
    scores = score_translations(text, text, tokenize="zh")
    assert scores["bleu"] == pytest.approx(100) and "tok:zh" in scores["signature"]
    assert score_translations(["我喜欢学习旧的语言。"], text, tokenize="zh")["bleu"] > 40
    with pytest.raises(InputError, match=r"tokenize='14a'.*13a, zh"):
        score_translations(text, text, tokenize="14a")


def test_tokenised_bleu_by_hand():
    """'Der Hund, der bellt.' is 6 tokens; one of them differs: precisions 5/6, 3/5, 2/4, 1/3."""
    score = tokenized_bleu(["Der Hund, der bellt."], ["Der Hahn, der bellt."], language="de")
    assert score == pytest.approx(100 * math.exp(sum(map(math.log, (5 / 6, 3 / 5, 2 / 4, 1 / 3))) / 4))


def test_compounds_are_split_on_request():
    """rot-grün and rot-gelb share two of three parts, which whole words do not."""
    pair = ["das Bündnis ist in diesem Land rot-grün"], ["das Bündnis ist in diesem Land rot-gelb"]
    whole = tokenized_bleu(*pair, language="de")
    assert tokenized_bleu(*pair, language="de", split_compounds=True) > whole
    assert tokenized_bleu(pair[0], pair[0], language="de", split_compounds=True) == pytest.approx(100)
