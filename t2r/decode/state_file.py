"""Saves a generation to a file, and loads it to continue later."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import load_file, save

from t2r.decode.generate import Generation
from t2r.errors import InputError, raise_all
from t2r.files import atomic_file, check_output_file
from t2r.model.config import RUNTIME_FIELDS
from t2r.model.parameters import arrays_of
from t2r.model.transformer import LanguageModel


def check_state_file(path: Path) -> None:
    """Refuses a path for a state that cannot be written, or where there is a file that is no state."""
    check_output_file(path)
    if not path.is_file() or not path.stat().st_size:
        return  # nothing, or a device
    try:
        with safe_open(path, "numpy") as file:
            is_state = "last" in set(file.keys())
    except (SafetensorError, OSError):
        is_state = False
    if not is_state:
        raise InputError(f"{path} exists and is not a saved state: choose another file")


def save_generation(path: Path, generation: Generation, model: LanguageModel) -> None:
    """Writes the file atomically, with a fingerprint of the model, without which a state means nothing."""
    arrays = {name: jnp.asarray(leaf) for name, leaf in named_leaves(generation)}
    content = save(arrays, {"model": fingerprint(model)})
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(content)  # safetensors' own save_file would replace a device by a file


def load_generation(path: Path, model: LanguageModel) -> Generation:
    """Loads a generation that was saved with this model."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a state file: check the path")
    try:
        arrays = load_file(path)
        with safe_open(path, "numpy") as file:
            saved_by = (file.metadata() or {}).get("model")
    except FileNotFoundError:
        raise InputError(f"no state file {path}: check the path") from None
    except (SafetensorError, OSError) as error:
        reason = f" ({error.strerror})" if getattr(error, "strerror", None) else ""
        raise InputError(f"cannot read {path}{reason}: it is damaged or not a state file") from None
    if "last" not in arrays or arrays["last"].ndim != 1:
        raise InputError(f"{path} is not a saved state: it has no array 'last', one token for each sequence")
    batch = len(arrays["last"])
    capacity = max(
        [array.shape[1] for name, array in arrays.items() if name.endswith(".valid") and array.ndim == 2], default=1
    )
    key = jax.random.key_data(jax.random.key(0))
    expected = jax.eval_shape(
        lambda: Generation(model.init_state(batch, capacity), jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), key)
    )
    problems, leaves = [], []
    for name, leaf in named_leaves(expected):
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            actual = "nothing" if array is None else f"{array.dtype}{array.shape}"
            problems.append(f"{name}: {actual} instead of {leaf.dtype}{leaf.shape}")
        leaves.append(array)
    raise_all(f"{path} was saved by another kind of model:", problems)
    if saved_by != fingerprint(model):
        raise InputError(f"{path} was saved by another model: a state can be continued only by the model that wrote it")
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def fingerprint(model: LanguageModel) -> str:
    """A number that differs between models of other architectures or weights, from a few values of each array."""
    architecture = {name: value for name, value in model.config.to_dict().items() if name not in RUNTIME_FIELDS}
    values = [np.asarray(array.reshape(-1)[:8], np.float32) for _, array in sorted(arrays_of(model).items())]
    content = json.dumps(architecture, sort_keys=True).encode() + b"".join(x.tobytes() for x in values)
    return f"{zlib.crc32(content):08x}"


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of each leaf of a pytree; names are paths such as `layers.0.S`."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in jax.tree.leaves_with_path(tree)
    ]
