"""Import a pretrained transformer from a Hugging Face directory, a fairseq checkpoint or a GGUF file.

t2r import --source=DIR_OR_FILE --output=MODEL [--dtype=float16] [--source_language=de_DE] [--target_language=en_XX]

Hugging Face (config.json, safetensors, tokenizer files): Llama, Mistral, Qwen2, Qwen3, Phi-3 and Phi-4, OLMo 2,
Granite, SmolLM to SmolLM3, Gemma, Gemma 3, StableLM, GPT-J, GPT-NeoX and Pythia, Falcon, GPT-2 and OPT; for translation
Marian (OPUS-MT), BART, mBART, M2M-100, NLLB and Pegasus. For multilingual models, choose the languages with
--source_language and --target_language; by default the model's files decide.

fairseq: transformer_lm, with or without adaptive input and softmax, and transformer (translation). --source is a .pt
file, or a directory with one (of several, checkpoint_best.pt or model.pt). Next to it must be dict.txt, or
dict.SOURCE.txt and dict.TARGET.txt, and, if BPE was used, bpecodes or code. No code in the checkpoint is executed.

GGUF (llama.cpp): the architectures llama (also Mistral), qwen2 and qwen3, in any quantization that the package gguf
reads; --source is the file. Its weights are dequantized.

The tokenizer is imported too. To compare the result with another library:
t2r evaluate --model=MODEL --logits=IN.npz:OUT.npz
"""

from typing import Any

from absl import flags

_SOURCE = flags.DEFINE_string(
    "source",
    None,
    "Directory with config.json, safetensors and a tokenizer; or a fairseq checkpoint or GGUF file.",
    required=True,
)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "float16"], "Type of the weights written.")
_FROM = flags.DEFINE_string("source_language", None, "Multilingual models: the language to translate from.")
_INTO = flags.DEFINE_string("target_language", None, "Multilingual models: the language to translate into.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.importers.source import import_model

    languages = dict(source_language=_FROM.value, target_language=_INTO.value)
    result = import_model(_SOURCE.value, _OUTPUT.value, dtype=_DTYPE.value, **languages)
    print(table(["imported", ""], result.items()))
    return result
