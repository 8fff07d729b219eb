"""The device mesh of a run, and placement of arrays and batches on it. Devices may belong to several processes."""

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


def make_mesh(axes: ConfigDict, available: Sequence[Any] | None = None) -> Mesh:
    """A mesh with `axes[name]` devices along each axis; one axis may be -1 and gets all remaining devices."""
    available = jax.devices() if available is None else available
    devices, sizes = len(available), {name: axes.get(name, 1) for name in AXES}
    given = ", ".join(f"{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(f"config.mesh has {given}: sizes must be at least 1; one may be -1, for all remaining devices")
    if fixed > devices or (free and devices % fixed):
        raise InputError(f"config.mesh has {given}, which does not fit {devices} devices: lower a size")
    for name in free:
        sizes[name] = devices // fixed
    used = available[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=used)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is copied to every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of (batch, length) arrays: sequences are divided among the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_ways(mesh: Mesh) -> int:
    """The number of shards that the sequences of a batch are divided into."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def sequences_per_part(config: ConfigDict, ways: int) -> int:
    """Language models: sequences in one part of a step; must be a multiple of the number of batch shards, `ways`."""
    sequences = config.data.batch // config.accumulate
    if sequences % ways:
        raise InputError(
            f"config.data.batch={config.data.batch} over config.accumulate={config.accumulate} must be a multiple of "
            f"the {ways} devices of config.mesh.data and fsdp (devices along config.mesh.tensor share sequences)"
        )
    return sequences


def place(tree: Any, layout: Any) -> Any:
    """Puts a tree of host arrays, equal in all processes, on devices with the given tree of shardings."""

    def place_array(array: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place_array, tree, layout)


def load_batch(part: LazyBatch, mesh: Mesh) -> Batch:
    """A batch on the mesh; each process reads only the sequences of its own devices."""
    sharding, shards = batch_sharding(mesh), {}

    def shard(index: tuple[slice, ...]) -> Batch:  # read once, also if several devices hold the same sequences
        if (bounds := index[0].indices(len(part.rows))) not in shards:
            shards[bounds] = part.read(part.rows[index[0]])
        return shards[bounds]

    def field(name: str) -> jax.Array | None:
        if getattr(example, name) is None:
            return None
        shape = (len(part.rows), *getattr(example, name).shape[1:])
        return jax.make_array_from_callback(shape, sharding, lambda index: getattr(shard(index), name))

    example = part.read(part.rows[:1])  # one sequence, for the shapes
    return Batch(*map(field, Batch._fields))
