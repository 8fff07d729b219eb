"""The device mesh of a run."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from t2r.errors import InputError
from t2r.model.layout import AXES, RULES


def make_mesh(axes: ConfigDict) -> Mesh:
    """A mesh of the devices there are: so many along each axis; one axis may be -1 and takes what the others leave."""
    devices, sizes = jax.device_count(), {name: axes.get(name, 1) for name in AXES}
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(f"config.mesh has {asked}: sizes are at least 1, and one may be -1 for all that are left")
    if fixed > devices or (free and devices % fixed):
        raise InputError(f"config.mesh has {asked}: that does not fit {devices} devices")
    for name in free:
        sizes[name] = devices // fixed
    used = jax.devices()[: math.prod(sizes.values())]
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
