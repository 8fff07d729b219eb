"""Import a pretrained transformer: a Hugging Face directory becomes a model directory of ours.

python -m t2r import --source=DIR --output=MODEL

Known are Llama and its relatives (Mistral, Qwen2, Qwen3, SmolLM), Gemma 3, GPT-2, GPT-NeoX and Pythia, OPT, and for
translation Marian (OPUS-MT), BART and mBART. The tokenizer comes along. To check the result against any library:
python -m t2r evaluate --model=MODEL --logits=IN.npz:OUT.npz
"""

from pathlib import Path
from typing import Any

from absl import flags

_SOURCE = flags.DEFINE_string("source", None, "Directory with config.json, safetensors and a tokenizer.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)


def main() -> dict[str, Any]:
    from t2r import environment
    from t2r.console import table
    from t2r.convert import model_dir
    from t2r.convert.importers import hugging_face, tokenizers
    from t2r.errors import InputError
    from t2r.model.parameters import abstract_model, count, with_arrays

    source, output = Path(_SOURCE.value), Path(_OUTPUT.value)
    if output.exists():
        raise InputError(f"--output={output} exists already: choose another or remove it")
    config, arrays, theirs = hugging_face.read(source)
    tokenizer = tokenizers.read(source, theirs, translates=bool(config.encoder_layers))
    entry = {
        "action": "import",
        "source": str(source),
        "architecture": theirs.get("architectures"),
        "environment": environment.describe(),
    }
    model = with_arrays(abstract_model(config), arrays)
    model_dir.save(output, model_dir.Model(model, tokenizer, {"history": [entry]}))
    kind = getattr(tokenizer, "target", tokenizer).kind
    result = {
        "model": str(output),
        "family": theirs["model_type"],
        "parameters": count(arrays),
        "layers": config.layers,
        "tokenizer": kind,
    }
    print(table(["imported", ""], result.items()))
    return result
