"""Import a pretrained transformer: a Hugging Face directory or a fairseq checkpoint becomes a model directory of ours.

python -m t2r import --source=DIR_OR_FILE --output=MODEL [--source_language=de_DE] [--target_language=en_XX]

Hugging Face: Llama and its relatives (Mistral, Qwen2, Qwen3, SmolLM), Gemma 3, GPT-2, GPT-NeoX and Pythia, OPT, and for
translation Marian (OPUS-MT), BART and mBART; of a model of many languages choose two, else its own files do.

fairseq: transformer_lm, with adaptive input and softmax or without, and transformer for translation: a .pt
file, or a directory with one (checkpoint_best.pt or model.pt among several), beside it dict.txt, or dict.SOURCE.txt and
dict.TARGET.txt, and bpecodes or code if there are byte-pair codes. Nothing in the checkpoint is executed.

The tokenizer comes along. To check the result against any library:
python -m t2r evaluate --model=MODEL --logits=IN.npz:OUT.npz
"""

from pathlib import Path
from typing import Any

from absl import flags

_SOURCE = flags.DEFINE_string(
    "source", None, "Directory with config.json, safetensors and a tokenizer; or a fairseq checkpoint.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)
_FROM = flags.DEFINE_string("source_language", None, "Of a model of many languages, the one to translate from.")
_INTO = flags.DEFINE_string("target_language", None, "Of a model of many languages, the one to translate into.")


def main() -> dict[str, Any]:
    from t2r import environment
    from t2r.console import table
    from t2r.convert import model_dir
    from t2r.errors import InputError
    from t2r.model.parameters import abstract_model, count, with_arrays

    source, output = Path(_SOURCE.value), Path(_OUTPUT.value)
    if output.exists():
        raise InputError(f"--output={output} exists already: choose another or remove it")
    config, arrays, tokenizer, family, architecture = read(source, (_FROM.value, _INTO.value))
    entry = {
        "action": "import",
        "source": str(source),
        "architecture": architecture,
        "environment": environment.describe(),
    }
    model = with_arrays(abstract_model(config), arrays)
    model_dir.save(output, model_dir.Model(model, tokenizer, {"history": [entry]}))
    kind = getattr(tokenizer, "target", tokenizer).kind
    result = {
        "model": str(output),
        "family": family,
        "parameters": count(arrays),
        "layers": config.layers,
        "tokenizer": kind,
    }
    print(table(["imported", ""], result.items()))
    return result


def read(source: Path, languages: tuple[str | None, str | None] = (None, None)) -> tuple:
    """A model's config, arrays and tokenizer, and the names of its family and architecture, whoever wrote it."""
    from t2r.convert.importers import fairseq, hugging_face, tokenizers
    from t2r.errors import InputError

    if (source / "config.json").exists():
        config, arrays, theirs = hugging_face.read(source)
        chosen = tokenizers.Languages(*languages)
        tokenizer = tokenizers.read(source, theirs, translates=bool(config.encoder_layers), chosen=chosen)
        return config, arrays, tokenizer, theirs["model_type"], theirs.get("architectures")
    checkpoint = fairseq.find(source)
    if checkpoint is None:
        raise InputError(f"no {source / 'config.json'} (Hugging Face), and no .pt file (fairseq): nothing to import")
    if any(languages):
        raise InputError("fairseq checkpoints name their languages: leave --source_language and --target_language out")
    config, arrays, settings = fairseq.read(checkpoint)
    tokenizer = tokenizers.fairseq(checkpoint.parent, settings, config)
    family = "transformer" if config.encoder_layers else "transformer_lm"
    return config, arrays, tokenizer, f"fairseq {family}", settings["arch"]
