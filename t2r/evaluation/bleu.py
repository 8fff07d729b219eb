"""Translation quality: sacrebleu's BLEU and chrF, the paper's tokenised BLEU, and exact matches."""

import re
from typing import Any

from t2r.errors import InputError
from t2r.extras import require

TOKENIZERS = ("13a", "zh", "char", "intl", "none")


def check_tokenizer(name: str) -> None:
    """Raises an error for an unknown tokenizer or a missing sacrebleu, before translating, which may take hours."""
    if name not in TOKENIZERS:
        raise InputError(f"tokenize={name!r}: choose one of {', '.join(TOKENIZERS)}")
    require("sacrebleu.metrics", "translation")


def score_translations(hypotheses: list[str], references: list[str], *, tokenize: str = "13a") -> dict[str, Any]:
    """Corpus BLEU and chrF with sacrebleu's signatures, and the fraction of exact matches."""
    check_tokenizer(tokenize)
    metrics = require("sacrebleu.metrics", "translation")
    bleu, chrf = metrics.BLEU(tokenize=tokenize), metrics.CHRF()
    exact = sum(h.strip() == r.strip() for h, r in zip(hypotheses, references))
    return {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "exact_match": exact / len(references),
        "sentences": len(references),
        "signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def tokenized_bleu(
    hypotheses: list[str], references: list[str], *, language: str, split_compounds: bool = False
) -> float:
    """BLEU over Moses tokens, as in the paper; not comparable with sacrebleu's.

    `split_compounds` splits hyphenated words, as is usual for WMT14 EN-DE since Vaswani et al. (2017).
    """
    metrics = require("sacrebleu.metrics", "translation")
    moses = require("sacremoses", "translation").MosesTokenizer(lang=language)

    def tokens(line: str) -> str:
        text = moses.tokenize(line, return_str=True, escape=False, aggressive_dash_splits=False)
        return re.sub(r"(\S)-(?=\S)", r"\1 ##AT##-##AT## ", text) if split_compounds else text

    sides = [[tokens(line) for line in side] for side in (hypotheses, references)]
    return metrics.BLEU(tokenize="none", force=True).corpus_score(sides[0], [sides[1]]).score
