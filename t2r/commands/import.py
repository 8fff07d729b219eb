"""Import a pretrained transformer: a Hugging Face directory or a fairseq checkpoint becomes a model directory of ours.

t2r import --source=DIR_OR_FILE --output=MODEL [--source_language=de_DE] [--target_language=en_XX]

Hugging Face: Llama and its relatives (Mistral, Qwen2, Qwen3, SmolLM), Gemma 3, GPT-2, GPT-NeoX and Pythia, OPT, and for
translation Marian (OPUS-MT), BART and mBART; of a model of many languages choose two, else its own files do.

fairseq: transformer_lm, with adaptive input and softmax or without, and transformer for translation: a .pt
file, or a directory with one (checkpoint_best.pt or model.pt among several), beside it dict.txt, or dict.SOURCE.txt and
dict.TARGET.txt, and bpecodes or code if there are byte-pair codes. Nothing in the checkpoint is executed.

The tokenizer comes along. To check the result against any library:
t2r evaluate --model=MODEL --logits=IN.npz:OUT.npz
"""

from typing import Any

from absl import flags

_SOURCE = flags.DEFINE_string(
    "source", None, "Directory with config.json, safetensors and a tokenizer; or a fairseq checkpoint.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)
_FROM = flags.DEFINE_string("source_language", None, "Of a model of many languages, the one to translate from.")
_INTO = flags.DEFINE_string("target_language", None, "Of a model of many languages, the one to translate into.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.importers.source import import_model

    languages = dict(source_language=_FROM.value, target_language=_INTO.value)
    result = import_model(_SOURCE.value, _OUTPUT.value, **languages)
    print(table(["imported", ""], result.items()))
    return result
