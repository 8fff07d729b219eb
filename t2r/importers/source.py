"""A model of another library → a model directory: which library a source is of, and what to do with it."""

from pathlib import Path
from typing import Any, NamedTuple

from t2r import environment
from t2r.data.tokenizer import Tokenizer, TokenizerPair
from t2r.errors import InputError
from t2r.importers import fairseq, hugging_face, tokenizers
from t2r.model.config import ModelConfig
from t2r.model.parameters import Arrays, abstract_model, parameter_count, with_arrays
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel


class Imported(NamedTuple):
    """A model of another library, in this one's terms."""

    config: ModelConfig
    arrays: Arrays
    tokenizer: Tokenizer | TokenizerPair
    family: str  # "llama", "fairseq transformer_lm"
    architecture: Any  # the library's own name for it


def import_model(
    source: str | Path,
    output: str | Path,
    *,
    source_language: str | None = None,
    target_language: str | None = None,
) -> dict[str, Any]:
    """Writes a model directory from a Hugging Face directory or a fairseq checkpoint; returns what it is."""
    source, output = Path(source), Path(output)
    if output.exists():
        raise InputError(f"--output={output} exists already: choose another or remove it")
    found = read_source(source, tokenizers.Languages(source_language, target_language))
    entry = {
        "action": "import",
        "source": str(source),
        "architecture": found.architecture,
        "environment": environment.describe(),
    }
    model = with_arrays(abstract_model(found.config), found.arrays)
    model_dir.save(output, LoadedModel(model, found.tokenizer, {"history": [entry]}))
    return {
        "model": str(output),
        "family": found.family,
        "parameters": parameter_count(found.arrays),
        "layers": found.config.layers,
        "tokenizer": getattr(found.tokenizer, "target", found.tokenizer).kind,
    }


def read_source(source: Path, languages: tokenizers.Languages = tokenizers.Languages()) -> Imported:
    """A directory with a config.json is Hugging Face's, one with a .pt file fairseq's."""
    if (source / "config.json").exists():
        return _hugging_face(source, languages)
    checkpoint = fairseq.find(source)
    if checkpoint is None:
        raise InputError(f"no {source / 'config.json'} (Hugging Face), and no .pt file (fairseq): nothing to import")
    if any(languages):
        raise InputError("fairseq checkpoints name their languages: leave --source_language and --target_language out")
    return _fairseq(checkpoint)


def _hugging_face(source: Path, languages: tokenizers.Languages) -> Imported:
    config, arrays, theirs = hugging_face.load_checkpoint(source)
    tokenizer = tokenizers.find_tokenizer(source, theirs, translates=bool(config.encoder_layers), chosen=languages)
    return Imported(config, arrays, tokenizer, theirs["model_type"], theirs.get("architectures"))


def _fairseq(checkpoint: Path) -> Imported:
    config, arrays, settings = fairseq.load_checkpoint(checkpoint)
    tokenizer = tokenizers.fairseq(checkpoint.parent, settings, config)
    family = "transformer" if config.encoder_layers else "transformer_lm"
    return Imported(config, arrays, tokenizer, f"fairseq {family}", settings["arch"])
