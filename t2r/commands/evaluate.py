"""Score a model: a language model's perplexity on text, a translation model's BLEU and chrF on sentence pairs.

t2r evaluate --model=MODEL --data=builtin:pydoc
t2r evaluate --model=MODEL --data=text:FILE [--split=all|train|valid|test]
t2r evaluate --model=MODEL --data=text:FILE --documents [--first=60 --window=256]
t2r evaluate --model=MODEL --data=builtin:numbers-en-de
t2r evaluate --model=MODEL --data=pairs:SOURCE,TARGET [--beam=5 --length_penalty=0.6 --moses=de]
t2r evaluate --model=MODEL --logits=IN.npz:OUT.npz

Perplexity is that of the last 256 of each 512 tokens (the paper's measure), and over all tokens. With
--documents each document is scored by itself instead, cut at --window tokens, its beginning among them; a file of
several has lines `<|endoftext|>` between them. BLEU and chrF are sacrebleu's, with its signature; --moses adds the
paper's tokenised BLEU.

--logits reads `input_ids` (for translation also `decoder_input_ids`, and `attention_mask` if sources are padded) and
writes `logits`, float32, to be compared with another library's.
"""

from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory, or builtin:NAME.", required=True)
_DATA = flags.DEFINE_string(
    "data", None, "builtin:NAME, text:PATH, pairs:SOURCE,TARGET, tsv:PATH (.gz too), tfds:NAME."
)
_LOGITS = flags.DEFINE_string("logits", None, "IN.npz:OUT.npz: compute logits of given ids, to compare elsewhere.")
_SPLIT = flags.DEFINE_string("split", None, "train, valid, test or all; default: all of a file, test of others.")
_WINDOW = flags.DEFINE_integer(
    "window", None, "Tokens the model sees at once, the later half of which is scored; default: 512.", lower_bound=2
)
_DOCUMENTS = flags.DEFINE_bool("documents", False, "Score each document of a text by itself, from its beginning.")
_FIRST = flags.DEFINE_integer("first", None, "Score only so many, the first, documents or pairs.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", None, "Windows or documents (8) or sentences (32) at a time.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations.")
_BEAM = flags.DEFINE_integer("beam", 5, "Translation: beam size; 1: greedy.")
_PENALTY = flags.DEFINE_float("length_penalty", 0.6, "Translation: scores are divided by length to this power.")
_EARLY = flags.DEFINE_bool("early_stopping", False, "Translation: stop at as many results as beams.")
_TOKENIZE = flags.DEFINE_string("tokenize", "13a", "Translation: sacrebleu's tokenizer: 13a; zh into Chinese.")
_MOSES = flags.DEFINE_string("moses", None, "Translation: target language, such as de, for tokenised BLEU as well.")
_COMPOUNDS = flags.DEFINE_bool("split_compounds", False, "Translation: take hyphenated words apart in tokenised BLEU.")
_OUTPUT = flags.DEFINE_string("output", None, "Translation: file to keep source, reference and translation in (TSV).")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.errors import InputError
    from t2r.evaluation.score import default_split, evaluate, write_logits
    from t2r.store import model_dir

    if (_DATA.value is None) == (_LOGITS.value is None):
        raise InputError("say what to score: one of --data=SPEC and --logits=IN.npz:OUT.npz")
    loaded = model_dir.load(_MODEL.value, dtype=_DTYPE.value)
    if _LOGITS.value:
        ids, _, output = _LOGITS.value.partition(":")
        if not output:
            raise InputError(f"--logits={_LOGITS.value}: name two files, as in --logits=ids.npz:logits.npz")
        result = write_logits(loaded, ids, output)
        print(table(["written", ""], result.items()))
        return result
    split = _SPLIT.value or default_split(_DATA.value)
    result = evaluate(loaded, _DATA.value, split=split, **_options(translates=bool(loaded.model.config.encoder_layers)))
    print(table(["measure", split], result.items()))
    return result


def _options(*, translates: bool) -> dict[str, Any]:
    from t2r.decode.beam import Beam

    both = dict(first=_FIRST.value, batch=_BATCH.value)
    if not translates:
        return dict(both, documents=_DOCUMENTS.value, window=_WINDOW.value)
    return dict(
        both,
        beam=Beam(_BEAM.value, _PENALTY.value, _EARLY.value),
        tokenize=_TOKENIZE.value,
        moses=_MOSES.value,
        split_compounds=_COMPOUNDS.value,
        output=_OUTPUT.value,
    )
