"""Imports a model of another library, Hugging Face, fairseq or llama.cpp, into a model directory."""

from pathlib import Path
from typing import Any, NamedTuple

from t2r import environment
from t2r.data.tokenizer import Tokenizer, TokenizerPair
from t2r.errors import InputError
from t2r.files import check_free
from t2r.importers import fairseq, gguf_model, gguf_tokenizer, hub, hugging_face, tokenizers
from t2r.importers.gguf_file import GGUFFile, is_gguf
from t2r.model.config import ModelConfig
from t2r.model.parameters import Arrays, abstract_model, parameter_count, with_arrays
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel


class Imported(NamedTuple):
    """A model of another library, converted to this one's config, arrays and tokenizer."""

    config: ModelConfig
    arrays: Arrays
    tokenizer: Tokenizer | TokenizerPair
    family: str  # "llama", "fairseq transformer_lm"
    architecture: Any  # the name in the original library


def import_model(
    source: str | Path,
    output: str | Path,
    *,
    source_language: str | None = None,
    target_language: str | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Writes a model directory, its weights as `dtype`, from a Hugging Face directory, a fairseq checkpoint, a GGUF
    file, or a model of the Hugging Face hub, `ORG/NAME` or `ORG/NAME@REVISION`; returns a summary."""
    source, output = Path(source), Path(output)
    check_free(output)
    downloaded = hub.download(str(source)) if hub.is_name(source) else None
    folder = downloaded.folder if downloaded else source
    imported = read_source(folder, tokenizers.Languages(source_language, target_language))
    entry = {
        "action": "import",
        "source": str(source),
        **({"commit": downloaded.commit} if downloaded else {}),
        "architecture": imported.architecture,
        "environment": environment.describe(),
    }
    model = with_arrays(abstract_model(imported.config), imported.arrays)
    model_dir.save(output, LoadedModel(model, imported.tokenizer, {"history": [entry]}), dtype=dtype)
    return {
        "model": str(output),
        "family": imported.family,
        "parameters": parameter_count(imported.arrays),
        "layers": imported.config.layers,
        "tokenizer": getattr(imported.tokenizer, "target", imported.tokenizer).kind,
    }


def read_source(source: Path, languages: tokenizers.Languages = tokenizers.Languages()) -> Imported:
    """Reads a Hugging Face directory (it has a config.json), a GGUF file, or a fairseq checkpoint (a .pt file)."""
    if not source.exists():
        raise InputError(
            f"{source} does not exist: give a directory or a checkpoint on this machine, or a model of the Hugging "
            "Face hub as ORG/NAME"
        )
    if (source / "provenance.json").exists():
        raise InputError(f"{source} is a t2r model directory already: use it as it is")
    if (source / "config.json").exists():
        return _hugging_face(source, languages)
    checkpoint = fairseq.find(source)
    if checkpoint is None:
        raise InputError(
            f"{source} has neither a config.json (Hugging Face) nor a .pt file (fairseq) and is not a GGUF file: there "
            "is nothing to import"
        )
    if any(languages):
        raise InputError(
            f"{checkpoint} chooses its languages itself: leave out --source_language and --target_language"
        )
    return _gguf(checkpoint) if is_gguf(checkpoint) else _fairseq(checkpoint)


def _hugging_face(source: Path, languages: tokenizers.Languages) -> Imported:
    config, arrays, original = hugging_face.load_checkpoint(source)
    tokenizer = tokenizers.find_tokenizer(source, original, translates=bool(config.encoder_layers), chosen=languages)
    return Imported(config, arrays, tokenizer, original["model_type"], original.get("architectures"))


def _fairseq(checkpoint: Path) -> Imported:
    config, arrays, settings = fairseq.load_checkpoint(checkpoint)
    tokenizer = tokenizers.fairseq(checkpoint.parent, settings, config)
    family = "transformer" if config.encoder_layers else "transformer_lm"
    return Imported(config, arrays, tokenizer, f"fairseq {family}", settings["arch"])


def _gguf(path: Path) -> Imported:
    file = GGUFFile(path)
    config, arrays, original = gguf_model.load_checkpoint(file, path)
    tokenizer = gguf_tokenizer.read(file.metadata, config.vocab_size, path)
    return Imported(config, arrays, tokenizer, f"gguf {original['model_type']}", file.metadata["general.architecture"])
