"""Score a model: a language model's perplexity on text, a translation model's BLEU and chrF on sentence pairs.

python -m t2r evaluate --model=MODEL --data=builtin:pydoc
python -m t2r evaluate --model=MODEL --data=text:FILE [--split=all|train|valid|test]
python -m t2r evaluate --model=MODEL --data=text:FILE --documents [--first=60 --window=256]
python -m t2r evaluate --model=MODEL --data=builtin:numbers-en-de
python -m t2r evaluate --model=MODEL --data=pairs:SOURCE,TARGET [--beam=5 --length_penalty=0.6 --moses=de]
python -m t2r evaluate --model=MODEL --logits=IN.npz:OUT.npz

Perplexity is that of the last 256 of each 512 tokens (the paper's measure), and over all tokens. With
--documents each document is scored by itself instead, cut at --window tokens, its beginning among them; a file of
several has lines `<|endoftext|>` between them. BLEU and chrF are sacrebleu's, with its signature; --moses adds the
paper's tokenised BLEU.

--logits reads `input_ids` (for translation also `decoder_input_ids`, and `attention_mask` if sources are padded) and
writes `logits`, float32, to be compared with another library's.
"""

import itertools
import time
from pathlib import Path
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
    from t2r.convert import model_dir
    from t2r.data.pairs import is_pairs
    from t2r.errors import InputError

    if (_DATA.value is None) == (_LOGITS.value is None):
        raise InputError("say what to score: one of --data=SPEC and --logits=IN.npz:OUT.npz")
    if _LOGITS.value:
        return write_logits(model_dir.load(_MODEL.value, dtype=_DTYPE.value).model)
    split = _SPLIT.value or ("test" if _DATA.value.startswith(("builtin:", "tfds:")) else "all")
    content = model_dir.load(_MODEL.value, dtype=_DTYPE.value)
    if is_pairs(_DATA.value) != bool(content.model.config.encoder_layers):
        kinds = ("text", "a language model"), ("sentence pairs", "a translation model")
        data, model = kinds[is_pairs(_DATA.value)][0], kinds[bool(content.model.config.encoder_layers)][1]
        raise InputError(f"--data={_DATA.value} is {data}, but --model={_MODEL.value} is {model}")
    result = evaluate_pairs(content, split) if is_pairs(_DATA.value) else evaluate_text(content, split)
    print(table(["measure", split], result.items()))
    return result


def write_logits(model) -> dict[str, Any]:
    """Logits of the ids in a file, into another."""
    import numpy as np

    from t2r.console import table
    from t2r.errors import InputError
    from t2r.evaluate.logits import logits_of

    source, _, output = _LOGITS.value.partition(":")
    if not output:
        raise InputError(f"--logits={_LOGITS.value}: name two files, as in --logits=ids.npz:logits.npz")
    try:
        arrays = dict(np.load(source))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {source}: {error}; give a file that numpy.savez has written") from None
    logits = logits_of(model, arrays)
    np.savez(output, logits=logits)
    result = {"logits": output, "shape": list(logits.shape)}
    print(table(["written", ""], result.items()))
    return result


def evaluate_text(content, split: str) -> dict[str, Any]:
    """Perplexities of a text."""
    from t2r.data.prepared import tokenize
    from t2r.data.sources import load_documents
    from t2r.data.tokenizer import Words
    from t2r.evaluate.perplexity import bits_per_byte, document_perplexity, per_word, perplexity

    model, tokenizer, _ = content
    documents = load_documents(_DATA.value, split)[: _FIRST.value]
    options = dict(window=_WINDOW.value, batch=_BATCH.value or 8, start=tokenizer.end)
    if _DOCUMENTS.value:
        scores = document_perplexity(model, [tokenizer.encode(text) for text in documents], **options)
        return {"perplexity": scores.perplexity, "documents": len(documents), "tokens": scores.tokens}
    text = "\n".join(documents)
    tokens = tokenize(tokenizer, documents)
    scores = perplexity(model, tokens, **options)
    result = {
        "perplexity": scores.perplexity,
        "perplexity_all": scores.perplexity_all,
        "word_perplexity": per_word(scores, text),
        "bits_per_byte": bits_per_byte(scores, text),
        "tokens": scores.tokens,
    }
    if isinstance(tokenizer, Words):
        # A word the vocabulary lacks costs only as much as <unk>: no fair count of bits.
        result["unknown_words"] = tokenizer.unknown(tokens)
    return result


def evaluate_pairs(content, split: str) -> dict[str, Any]:
    """Scores of the translations of all sources against their references."""
    from t2r.console import Progress
    from t2r.data.pairs import load_pairs
    from t2r.decode.beam import Beam
    from t2r.decode.translator import Options, translate_lines
    from t2r.evaluate.bleu import check_tokenizer, score_translations, tokenized_bleu

    check_tokenizer(_TOKENIZE.value)
    sources, references = zip(*itertools.islice(load_pairs(_DATA.value, split), _FIRST.value))
    options = Options(beam=Beam(_BEAM.value, _PENALTY.value, _EARLY.value), batch=_BATCH.value or 32)
    began = time.perf_counter()
    with Progress("translate", len(sources)) as progress:
        found = translate_lines(content, sources, options, warn=progress.say, on_batch=progress.advance)
    texts = [translations[0].text for translations in found]
    result = score_translations(texts, list(references), tokenize=_TOKENIZE.value)
    if _MOSES.value:
        options = dict(language=_MOSES.value, split_compounds=_COMPOUNDS.value)
        result["tokenized_bleu"] = tokenized_bleu(texts, list(references), **options)
    if _OUTPUT.value:
        rows = ("\t".join(row) + "\n" for row in zip(sources, references, texts))
        Path(_OUTPUT.value).write_text("".join(rows), "utf-8")
    result |= {"beam": _BEAM.value, "length_penalty": _PENALTY.value, "early_stopping": _EARLY.value}
    return result | {"seconds": round(time.perf_counter() - began, 1)}
