"""Model directories: config.json, model.safetensors, the tokenizer's files and provenance.json."""

import gc
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t2r.data.tokenizer import Tokenizer, TokenizerPair, Words, load_pair, load_tokenizer
from t2r.errors import InputError, raise_all
from t2r.files import atomic_directory, check_free, read_json, recover
from t2r.model.config import RUNTIME_FIELDS, ModelConfig, from_dict
from t2r.model.parameters import abstract_model, arrays_of, with_arrays
from t2r.model.rows import is_for_decoding
from t2r.model.transformer import LanguageModel
from t2r.store import tensors

FORMAT = "t2r/1"
PURPOSE = (
    "give a t2r model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub; other models are imported first, "
    "with `t2r import`"
)
PRETRAINED = Path(__file__).parent.parent / "pretrained"


class LoadedModel(NamedTuple):
    """The content of a model directory."""

    model: LanguageModel
    tokenizer: Tokenizer | TokenizerPair  # a pair for translation
    provenance: dict[str, Any]  # {"history": [actions such as import and convert, oldest first]}


def resolve(name: str) -> Path:
    """The directory of a model name: a path, or builtin:NAME for a model that ships with the package."""
    if not name.startswith("builtin:"):
        return Path(name)
    path = PRETRAINED / name.removeprefix("builtin:")
    if not path.is_dir():
        shipped = sorted(p.name for p in PRETRAINED.glob("*") if p.is_dir())
        raise InputError(f"no model {name!r} ships with t2r: choose from {', '.join(f'builtin:{n}' for n in shipped)}")
    return path


def save(path: Path, content: LoadedModel, *, replace: bool = False, dtype: str = "float32") -> None:
    """Writes a model directory atomically. If it exists, that is an error, or with `replace` a model is replaced."""
    if is_for_decoding(content.model):
        raise InputError(f"{path}: this model is laid out for decoding: save the one that it was made from")
    if replace:
        check_replaceable(path)
    else:
        check_free(path)
    config = {"format": FORMAT, "family": _family(content.model.config), **content.model.config.to_dict()}
    with atomic_directory(path, replace=replace) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        tensors.write(folder / "model.safetensors", arrays_of(content.model), dtype)
        content.tokenizer.save(folder)
        (folder / "provenance.json").write_text(json.dumps(content.provenance, indent=1) + "\n")


def check_replaceable(path: Path) -> None:
    """Refuses a folder that is not a model's, such as one with source code: it would be replaced."""
    is_empty = path.is_dir() and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty and not (path / "provenance.json").exists():
        raise InputError(f"{path} is not a model directory, and would be replaced: choose another folder, or move it")


def load(path: str | Path, **runtime: Any) -> LoadedModel:
    """Loads a model directory; `runtime` overrides config fields that do not affect parameters, such as dtype."""
    path = resolve(str(path))
    if not path.exists():
        recover(path)  # from a process that was killed while it replaced the directory
    config = load_config(path, **runtime)
    model = with_arrays(abstract_model(config), load_arrays(path, config))
    tokenizer = load_pair(path) if config.encoder_layers else load_tokenizer(path)
    if isinstance(tokenizer, Words) and tokenizer.vocab_size != config.vocab_size:
        raise InputError(f"{path / tokenizer.file} has {tokenizer.vocab_size:,} words, the model {config.vocab_size:,}")
    return LoadedModel(model, tokenizer, _provenance(path / "provenance.json"))


def load_config(path: Path, **runtime: Any) -> ModelConfig:
    """The model config of a directory, with `runtime` overrides."""
    raise_all(
        "a pretrained model's architecture is fixed:",
        [
            f"model.{name} cannot be set; {', '.join(RUNTIME_FIELDS)} can"
            for name in runtime
            if name not in RUNTIME_FIELDS
        ],
    )
    fields = read_json(path / "config.json", PURPOSE)
    _check_format(path / "config.json", fields.pop("format", None))
    family = fields.pop("family", None)
    try:
        config = from_dict({**fields, **runtime})
    except InputError as error:
        raise InputError(f"{path / 'config.json'}: {error}") from None
    if family != _family(config):
        raise InputError(
            f"{path / 'config.json'}: family {family!r} does not match encoder_layers={config.encoder_layers}"
        )
    return config


def _check_format(path: Path, stored: Any) -> None:
    if stored == FORMAT:
        return
    if str(stored).startswith("t2r/"):
        raise InputError(f"{path} has format {stored!r}, this version of t2r reads {FORMAT!r}: install a newer t2r")
    if (path.parent / "model" / "config.json").exists():  # the work directory of `t2r train`
        raise InputError(f"{path.parent} is a run, not a model: give its model, {path.parent / 'model'}")
    raise InputError(
        f"{path.parent} is not a t2r model directory: its config.json has no format {FORMAT!r}; other models are "
        "imported first, with `t2r import`"
    )


def _family(config: ModelConfig) -> str:
    return "seq2seq" if config.encoder_layers else "language_model"


def load_arrays(path: Path, config: ModelConfig) -> dict[str, jnp.ndarray]:
    """The model's arrays in float32; one error lists all that are missing, unknown or of the wrong shape."""
    expected = {name: array.shape for name, array in arrays_of(abstract_model(config)).items()}
    stored = tensors.Tensors(path)
    problems = [f"{name} is missing" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"{name} is unknown" for name in sorted(stored.keys() - expected.keys())]
    problems += [
        f"{name} has shape {stored[name].shape}, the config needs {expected[name]}"
        for name in sorted(stored.keys() & expected.keys())
        if stored[name].shape != expected[name]
    ]
    raise_all(f"{path / 'model.safetensors'} does not match its config.json:", problems)
    gc.collect()  # Flax modules may be reference cycles: a deleted model can still be in memory
    largest_first = sorted(
        expected, key=lambda name: -math.prod(expected[name])
    )  # while most memory is free for the copy
    arrays = {name: _copied(stored[name]) for name in largest_first}
    _check_finite(path, arrays)
    return arrays


def _copied(array: np.ndarray) -> jnp.ndarray:
    """A float32 copy on the device, finished before the next array is read, so that the file can be unmapped."""
    return jax.device_put(np.asarray(array, np.float32), may_alias=False).block_until_ready()


def _check_finite(path: Path, arrays: dict[str, jnp.ndarray]) -> None:
    bad = [name for name, array in arrays.items() if not bool(jnp.isfinite(array.sum()))]
    bad = [name for name in bad if not bool(jnp.isfinite(arrays[name]).all())]  # a sum may overflow
    raise_all(f"{path / 'model.safetensors'} has values that are not numbers:", sorted(bad))


def _provenance(path: Path) -> dict[str, Any]:
    provenance = read_json(path, PURPOSE)
    if not isinstance(provenance.get("history"), list):
        raise InputError(f"{path} has no list 'history': copy it again")
    return provenance
