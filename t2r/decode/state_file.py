"""A generation on disk: what has been read and written so far, to be continued another day."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file

from t2r.decode.generate import Generation
from t2r.errors import InputError, raise_all
from t2r.model.transformer import LanguageModel


def save_generation(path: Path, generation: Generation) -> None:
    """Writes the file whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    save_file({name: jnp.asarray(leaf) for name, leaf in named_leaves(generation)}, unfinished)
    os.replace(unfinished, path)


def load_generation(path: Path, model: LanguageModel) -> Generation:
    """Reads a generation that this model, or one of the same config, has saved."""
    try:
        arrays = load_file(path)
    except FileNotFoundError:
        raise InputError(f"no state file {path}") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read {path}: {error}; it is damaged or no state file") from None
    if "last" not in arrays:
        raise InputError(f"{path} is not a saved state: it has no array 'last'")
    batch = len(arrays["last"])
    capacity = max([array.shape[1] for name, array in arrays.items() if name.endswith(".valid")], default=1)
    key = jax.random.key_data(jax.random.key(0))
    like = jax.eval_shape(
        lambda: Generation(model.init_state(batch, capacity), jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), key)
    )
    problems, leaves = [], []
    for name, leaf in named_leaves(like):
        found = arrays.get(name)
        if found is None or found.shape != leaf.shape or found.dtype != leaf.dtype:
            what = "nothing" if found is None else f"{found.dtype}{found.shape}"
            problems.append(f"{name}: {what} instead of {leaf.dtype}{leaf.shape}")
        leaves.append(found)
    raise_all(f"{path} was saved by another kind of model:", problems)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a generation or a state with their names, such as `layers.0.S`."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in jax.tree.leaves_with_path(tree)
    ]
