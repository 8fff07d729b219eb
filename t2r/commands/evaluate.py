"""Score a model: a language model's perplexity on text, a translation model's BLEU and chrF on sentence pairs.

t2r evaluate --model=MODEL --data=builtin:pydoc
t2r evaluate --model=MODEL --data=text:FILE [--split=all|train|valid|test]
t2r evaluate --model=MODEL --data=text:FILE --documents [--first=60 --window=256]
t2r evaluate --model=MODEL --data=text:FILE --recall=512,2048
t2r evaluate --model=MODEL --data=text:FILE --samples=64 [--scorer=TRANSFORMER]
t2r evaluate --model=MODEL --data=builtin:numbers-en-de
t2r evaluate --model=MODEL --data=pairs:SOURCE,TARGET [--beam=5 --length_penalty=0.6 --moses=de]
t2r evaluate --model=MODEL --logits=IN.npz:OUT.npz
t2r evaluate --model=MODEL --log_probs=IN.npz:OUT.npz

Perplexity is computed over the last 256 tokens of windows of 512 (`perplexity`, the paper's measure) and over all
tokens (`perplexity_all`). With --documents each document is scored separately from its first token, and cut off after
--window tokens; lines `<|endoftext|>` separate the documents of a file. BLEU and chrF are computed by sacrebleu, whose
signature is part of the result; --moses adds the paper's tokenised BLEU.

--recall adds the perplexity of the second half of sequences whose second half repeats the first: 1 is perfect recall.

--samples adds scores of what the model itself writes after pieces of the text, sampled at temperature 1 and greedily:
its perplexity under --scorer (such as the transformer that the model was converted from), the share of 4-grams that
repeat, and the share of texts that end in a loop.

--logits computes the logits of given token ids, for comparison with another library. It reads `input_ids` (for
translation also `decoder_input_ids`, and `attention_mask` if sources are padded) and writes `logits` in float32.
--log_probs writes `log_probs` instead, which models with an adaptive softmax have too.
"""

from typing import Any

from absl import flags

from t2r.commands import _decoding as decoding

_MODEL = flags.DEFINE_string(
    "model", None, "Model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub.", required=True
)
_DATA = flags.DEFINE_string(
    "data", None, "Data: builtin:NAME, text:PATH, pairs:SOURCE,TARGET, tsv:PATH (also .gz) or tfds:NAME."
)
_LOGITS = flags.DEFINE_string("logits", None, "IN.npz:OUT.npz: compute the logits of given token ids.")
_LOG_PROBS = flags.DEFINE_string("log_probs", None, "IN.npz:OUT.npz: compute log-probabilities instead of logits.")
_SPLIT = flags.DEFINE_string("split", None, "train, valid, test or all; default: all for files, else test.")
_WINDOW = flags.DEFINE_integer(
    "window", None, "Tokens in a window, of which the second half is scored; default: 512.", lower_bound=2
)
_DOCUMENTS = flags.DEFINE_bool("documents", False, "Score each document separately, from its first token.")
_FIRST = flags.DEFINE_integer("first", None, "Score only the first N documents or pairs.", lower_bound=1)
_BATCH = flags.DEFINE_integer(
    "batch", None, "Batch size; default: 8 windows or documents, 32 sentences.", lower_bound=1
)
_RECALL = flags.DEFINE_list("recall", [], "Perplexity of repeated text, too, at these lengths: 512,2048.")
_SAMPLES = flags.DEFINE_integer("samples", 0, "Score so many texts that the model writes, too.", lower_bound=0)
_SCORER = flags.DEFINE_string("scorer", None, "With --samples: the model that scores them; default: the model itself.")
_SAMPLE_LENGTH = flags.DEFINE_integer("sample_length", 256, "With --samples: tokens of each, at most.", lower_bound=1)
_SAMPLE_PROMPT = flags.DEFINE_integer(
    "sample_prompt", 32, "With --samples: tokens of --data that each continues; 0: none.", lower_bound=0
)
OF_TEXT = [_WINDOW, _DOCUMENTS, _RECALL, _SAMPLES, _SCORER, _SAMPLE_LENGTH, _SAMPLE_PROMPT]
_DTYPE, _WEIGHTS = decoding.define_dtype(), decoding.define_weights()
_BEAM = flags.DEFINE_integer("beam", 5, "Translation: beam size; 1: greedy.")
_PENALTY = flags.DEFINE_float("length_penalty", 0.6, "Translation: scores are divided by length^penalty.")
_EARLY = flags.DEFINE_bool("early_stopping", False, "Translation: stop when --beam hypotheses have ended.")
_TOKENIZE = flags.DEFINE_string(
    "tokenize", "13a", "Translation: tokenizer of sacrebleu: 13a, or zh for Chinese targets."
)
_MOSES = flags.DEFINE_string("moses", None, "Translation: target language, such as de; adds tokenised BLEU.")
_COMPOUNDS = flags.DEFINE_bool("split_compounds", False, "Translation: split hyphenated compounds in tokenised BLEU.")
_OUTPUT = flags.DEFINE_string("output", None, "Translation: TSV file for sources, references and translations.")
OF_TRANSLATIONS = [_BEAM, _PENALTY, _EARLY, _TOKENIZE, _MOSES, _COMPOUNDS, _OUTPUT]


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.errors import InputError
    from t2r.evaluation.score import default_split, evaluate, write_logits
    from t2r.importers import by_name
    from t2r.model.rows import for_decoding

    if sum(flag.value is not None for flag in (_DATA, _LOGITS, _LOG_PROBS)) != 1:
        raise InputError("give one of --data=SPEC, --logits=IN.npz:OUT.npz and --log_probs=IN.npz:OUT.npz")
    unused = decoding.given([_SPLIT, _FIRST, _BATCH, *OF_TEXT, *OF_TRANSLATIONS])
    if _DATA.value is None and unused:
        raise InputError(f"{unused}: nothing is scored with --logits and --log_probs; leave out {unused}")
    if _COMPOUNDS.value and not _MOSES.value:
        raise InputError("--split_compounds is for tokenised BLEU: add --moses=LANGUAGE, or leave it out")
    loaded = by_name.load(_MODEL.value, dtype=_DTYPE.value)
    if _WEIGHTS.value == "int8":
        loaded = loaded._replace(model=for_decoding(loaded.model, "int8"))
    if _DATA.value is None:
        flag = _LOGITS if _LOG_PROBS.value is None else _LOG_PROBS
        ids, _, output = flag.value.partition(":")
        if not output:
            raise InputError(f"--{flag.name}={flag.value}: name two files, as in --{flag.name}=ids.npz:{flag.name}.npz")
        result = write_logits(loaded, ids, output, normalised=flag is _LOG_PROBS)
        print(table(["written", ""], result.items()))
        return result
    split = _SPLIT.value or default_split(_DATA.value)
    result = evaluate(loaded, _DATA.value, split=split, **_options(translates=bool(loaded.model.config.encoder_layers)))
    print(table(["measure", split], result.items()))
    return result


def _options(*, translates: bool) -> dict[str, Any]:
    from t2r.decode.beam import Beam
    from t2r.errors import InputError

    common = dict(first=_FIRST.value, batch=_BATCH.value)
    unused = decoding.given(OF_TEXT if translates else OF_TRANSLATIONS)
    kinds = ("language", "translation", "BLEU") if translates else ("translation", "language", "perplexity")
    if unused:
        raise InputError(f"{unused}: for {kinds[0]} models; this is a {kinds[1]} model, which is scored by {kinds[2]}")
    if not translates:
        lengths = [_length(value) for value in _RECALL.value]
        text = dict(common, documents=_DOCUMENTS.value, window=_WINDOW.value, recall_lengths=lengths)
        return text | _sample_options()
    return dict(
        common,
        beam=Beam(_BEAM.value, _PENALTY.value, _EARLY.value),
        tokenize=_TOKENIZE.value,
        moses=_MOSES.value,
        split_compounds=_COMPOUNDS.value,
        output=_OUTPUT.value,
    )


def _sample_options() -> dict[str, Any]:
    from t2r.errors import InputError
    from t2r.importers import by_name

    if not _SAMPLES.value:
        unused = decoding.given([_SCORER, _SAMPLE_LENGTH, _SAMPLE_PROMPT])
        if unused:
            raise InputError(f"{unused}: say how many texts the model writes, as in --samples=64")
        return {}
    scorer = by_name.load(_SCORER.value, dtype=_DTYPE.value) if _SCORER.value else None
    return dict(
        samples=_SAMPLES.value,
        scorer=scorer,
        sample_length=_SAMPLE_LENGTH.value,
        sample_prompt=_SAMPLE_PROMPT.value,
    )


def _length(value: str) -> int:
    from t2r.errors import InputError

    if not value.isdecimal() or int(value) < 4:
        raise InputError(f"--recall={','.join(_RECALL.value)}: give lengths of at least 4 tokens, such as 512,2048")
    return int(value)
