"""Score a model on text: perplexity of the last 256 of each 512 tokens (the paper's measure), and over all tokens.

python -m t2r evaluate --model=MODEL --data=builtin:pydoc
python -m t2r evaluate --model=MODEL --data=text:FILE [--split=all|train|valid|test]
"""

from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory, or builtin:NAME.", required=True)
_DATA = flags.DEFINE_string("data", None, "builtin:pydoc, or text:PATH (.gz too).", required=True)
_SPLIT = flags.DEFINE_string("split", None, "train, valid, test or all; default: test of builtin data, all of a file.")
_WINDOW = flags.DEFINE_integer(
    "window", None, "Tokens the model sees at once, the later half of which is scored; default: 512.", lower_bound=2
)
_BATCH = flags.DEFINE_integer("batch", 8, "Windows scored at a time.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.convert import model_dir
    from t2r.data.batches import tokenize
    from t2r.data.sources import load_documents
    from t2r.evaluate.perplexity import bits_per_byte, per_word, perplexity

    split = _SPLIT.value or ("test" if _DATA.value.startswith("builtin:") else "all")
    model, tokenizer, _ = model_dir.load(_MODEL.value, dtype=_DTYPE.value)
    documents = load_documents(_DATA.value, split)
    text = "\n".join(documents)
    tokens = tokenize(tokenizer, documents)
    scores = perplexity(model, tokens, window=_WINDOW.value, batch=_BATCH.value, start=tokenizer.end)
    result = {
        "perplexity": scores.perplexity,
        "perplexity_all": scores.perplexity_all,
        "word_perplexity": per_word(scores, text),
        "bits_per_byte": bits_per_byte(scores, text),
        "tokens": scores.tokens,
    }
    if tokenizer.kind == "word":
        # A word the vocabulary lacks costs only as much as <unk>: no fair count of bits.
        result["unknown_words"] = tokenizer.unknown(tokens)
    print(table(["measure", split], result.items()))
    return result
