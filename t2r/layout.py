"""Where arrays lie on a device mesh. Dimensions have names, and a name has the mesh axis it is divided along.

The axes of a mesh: `data` divides sequences; `fsdp` divides sequences too, and the parameters and what the optimizer
keeps of them, which are gathered layer by layer when they are needed; `tensor` divides the work within a layer, by
heads (or features, where the heads do not divide), feed-forward units and words of the vocabulary.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXES = ("data", "fsdp", "tensor")

# The one table: dimension → mesh axes.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "width": ("fsdp",),
    "heads": ("tensor",),
    "features": ("tensor",),
    "feedforward": ("tensor",),
    "vocabulary": ("tensor",),
}

# Dimensions of parameters, by the end of their name. Vectors of the residual stream's width are left whole.
PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(query|key|value)\.kernel", ("width", "heads", None)),
    (r"(query|key|value)\.bias", ("heads", None)),
    (r"out\.kernel", ("heads", None, "width")),
    (r"feature_map\.(weight|directions)", ("heads", "features", None)),
    (r"feature_map\.bias", ("heads", "features")),
    (r"feature_map\.sigma", ("heads", None)),
    (r"feature_map\.pool", (None, None, None)),
    (r"(up|gate)\.kernel", ("width", "feedforward")),
    (r"(up|gate)\.bias", ("feedforward",)),
    (r"down\.kernel", ("feedforward", "width")),
    (r"embedding\.(table|output|tables\.\d+)", ("vocabulary", "width")),
    (r"embedding\.projections\.\d+", (None, "width")),
    (r"positions", (None, "width")),
)

# Dimensions of activations and of the state.
HIDDEN = ("batch", None, None)
LINEAR_STATE = {
    "S": ("batch", "heads", "features", None),
    "z": ("batch", "heads", "features"),
    "log_scale": ("batch", "heads"),
}
KV_CACHE = {"k": ("batch", "heads", None, None), "v": ("batch", "heads", None, None), "valid": ("batch", None)}


def partition_spec(dimensions: Sequence[str | None], shape: Sequence[int], sizes: dict[str, int]) -> PartitionSpec:
    """How an array is divided: each dimension along its axes, if no other has taken them and they divide it."""
    taken, parts = set(), []
    for name, size in zip(dimensions, shape):
        axes = tuple(axis for axis in RULES.get(name, ()) if sizes.get(axis, 1) > 1 and axis not in taken)
        ways = 1
        for axis in axes:
            ways *= sizes[axis]
        if not axes or size % ways:
            parts.append(None)
            continue
        taken.update(axes)
        parts.append(axes if len(axes) > 1 else axes[0])
    return PartitionSpec(*parts)


def dimensions_of(name: str) -> tuple[str | None, ...]:
    """The dimensions of a parameter; () for those that are kept whole."""
    for pattern, dimensions in PARAMETERS:
        if re.search(rf"(^|\.){pattern}$", name):
            return dimensions
    return ()


def shardings(tree: Any, mesh: Mesh) -> Any:
    """For a tree that holds parameters, or what an optimizer keeps of each, in dicts by name: where each leaf lies."""
    sizes = dict(mesh.shape)

    def place(path: tuple, leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        dimensions = dimensions_of(names[-1]) if names else ()
        if len(dimensions) != len(leaf.shape):
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, partition_spec(dimensions, leaf.shape, sizes))

    return jax.tree_util.tree_map_with_path(place, tree)


def uninitialized(shape: Sequence[int], dtype: Any) -> Array:
    """Room for what is written before it is read; zeros where the compiler divides arrays, since it would not divide
    this one."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [] if mesh is None or mesh.empty else zip(mesh.axis_sizes, mesh.axis_types)
    divided = any(size > 1 and kind != AxisType.Manual for size, kind in axes)
    return jnp.zeros(shape, dtype) if divided else jax.lax.empty(shape, dtype)


def constrain(x: Array, dimensions: Sequence[str | None]) -> Array:
    """Says how an activation is divided, where a mesh is set (`jax.set_mesh`); elsewhere, nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(dimensions, x.shape, dict(mesh.shape)))
