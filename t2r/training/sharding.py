"""The device mesh of a run, and how values get onto it. Its devices may belong to several processes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from t2r.batch import Batch
from t2r.data.batches import LazyBatch
from t2r.errors import InputError
from t2r.layout import AXES, RULES


def make_mesh(axes: ConfigDict, available: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the devices there are: so many along each axis; one axis may be -1 and takes what the others leave."""
    available = jax.devices() if available is None else available
    devices, sizes = len(available), {name: axes.get(name, 1) for name in AXES}
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(f"config.mesh has {asked}: sizes are at least 1, and one may be -1 for all that are left")
    if fixed > devices or (free and devices % fixed):
        raise InputError(f"config.mesh has {asked}: that does not fit {devices} devices")
    for name in free:
        sizes[name] = devices // fixed
    used = available[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=used)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sequences divided among the devices: (batch, length)."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_ways(mesh: Mesh) -> int:
    """Among how many devices the sequences of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def sequences_per_part(config: ConfigDict, ways: int) -> int:
    """Sequences in one of a step's parts, for language models; they must divide among the devices."""
    rows = config.data.batch // config.accumulate
    if rows % ways:
        raise InputError(
            f"config.data.batch={config.data.batch} over config.accumulate={config.accumulate} must divide among the "
            f"{ways} devices of config.mesh.data and fsdp; those of config.mesh.tensor share sequences"
        )
    return rows


def place(tree: Any, layout: Any) -> Any:
    """A tree of arrays that every process has, laid out on the mesh."""

    def one(array: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, layout)


def load_batch(part: LazyBatch, mesh: Mesh) -> Batch:
    """A batch on the mesh, of which each process has read the rows of its own devices."""
    sharding, pieces = batch_sharding(mesh), {}

    def piece(index: tuple[slice, ...]) -> Batch:  # devices that share rows share what was read
        if (found := index[0].indices(len(part.rows))) not in pieces:
            pieces[found] = part.read(part.rows[index[0]])
        return pieces[found]

    def field(name: str) -> jax.Array | None:
        if getattr(like, name) is None:
            return None
        shape = (len(part.rows), *getattr(like, name).shape[1:])
        return jax.make_array_from_callback(shape, sharding, lambda index: getattr(piece(index), name))

    like = part.read(part.rows[:1])
    return Batch(*map(field, Batch._fields))
