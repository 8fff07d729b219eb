"""How arrays are sharded over a device mesh: each dimension has a name, and each name its mesh axes.

The mesh axes: `data` shards the batch. `fsdp` shards the batch too, and also parameters and optimizer state, which are
gathered layer by layer when needed. `tensor` shards the work within a layer: heads (or features, if the number of heads
is not divisible), feed-forward units, and the vocabulary.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXES = ("data", "fsdp", "tensor")

# Dimension → the mesh axes that shard it.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "width": ("fsdp",),
    "heads": ("tensor",),
    "features": ("tensor",),
    "feedforward": ("tensor",),
    "vocabulary": ("tensor",),
}

# The dimensions of parameters, by how their names end. Those not listed, vectors of `width`, are replicated.
PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(query|key|value)\.kernel", ("width", "heads", None)),
    (r"(query|key|value)\.bias", ("heads", None)),
    (r"out\.kernel", ("heads", None, "width")),
    (r"feature_map\.(weight|directions)", ("heads", "features", None)),
    (r"feature_map\.bias", ("heads", "features")),
    (r"feature_map\.sigma", ("heads", None)),
    (r"feature_map\.pool", (None, None, None)),
    (r"mixture\.weight", ("heads", None, None)),
    (r"mixture\.bias", ("heads", None)),
    (r"(up|gate)\.kernel", ("width", "feedforward")),
    (r"(up|gate)\.bias", ("feedforward",)),
    (r"down\.kernel", ("feedforward", "width")),
    (r"embedding\.(table|output|tables\.\d+)", ("vocabulary", "width")),
    (r"embedding\.projections\.\d+", (None, "width")),
    (r"positions", (None, "width")),
)

# The dimensions of hidden activations, and of the arrays of a decoding state.
HIDDEN = ("batch", None, None)
STATE = {
    "S": ("batch", "heads", "features", None),
    "z": ("batch", "heads", "features"),
    "log_scale": ("batch", "heads"),
    "k": ("batch", "heads", None, None),
    "v": ("batch", "heads", None, None),
    "valid": ("batch", None),
    "count": ("batch",),
    "index": (),
}


def partition_spec(dimensions: Sequence[str | None], shape: Sequence[int], sizes: dict[str, int]) -> PartitionSpec:
    """The sharding of an array with these dimension names, on a mesh whose axes have these `sizes`.

    A dimension is sharded by its axes in RULES, unless an earlier dimension uses them or its size is not divisible.
    """
    used, parts = set(), []
    for name, size in zip(dimensions, shape):
        axes = tuple(axis for axis in RULES.get(name, ()) if sizes.get(axis, 1) > 1 and axis not in used)
        shards = 1
        for axis in axes:
            shards *= sizes[axis]
        if not axes or size % shards:
            parts.append(None)
            continue
        used.update(axes)
        parts.append(axes if len(axes) > 1 else axes[0])
    return PartitionSpec(*parts)


def dimensions_of(name: str) -> tuple[str | None, ...]:
    """The dimension names of the parameter `name`; () if it is replicated."""
    for pattern, dimensions in PARAMETERS:
        if re.search(rf"(^|\.){pattern}$", name):
            return dimensions
    return ()


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of each leaf of a tree with dicts from parameter names to arrays, such as an optimizer's state.

    Leaves that are in no such dict, or do not have their parameter's number of dimensions, are replicated.
    """
    sizes = dict(mesh.shape)

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        dimensions = dimensions_of(names[-1]) if names else ()
        if len(dimensions) != len(leaf.shape):
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, partition_spec(dimensions, leaf.shape, sizes))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def uninitialized(shape: Sequence[int], dtype: Any) -> Array:
    """An array whose contents are arbitrary, to be written before it is read.

    Zeros if the compiler shards arrays over a mesh: it does not shard `jax.lax.empty`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = [] if mesh is None or mesh.empty else zip(mesh.axis_sizes, mesh.axis_types)
    compiler_shards = any(size > 1 and kind != AxisType.Manual for size, kind in axes)
    return jnp.zeros(shape, dtype) if compiler_shards else jax.lax.empty(shape, dtype)


def constrain(x: Array, dimensions: Sequence[str | None]) -> Array:
    """x with the sharding of its dimension names, if a mesh is set (`jax.set_mesh`); otherwise x."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(dimensions, x.shape, dict(mesh.shape)))
