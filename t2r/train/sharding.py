"""The device mesh and where arrays lie on it."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from t2r.errors import InputError


def make_mesh(axes: ConfigDict) -> Mesh:
    """A mesh of all devices; one axis may be -1 and takes what the others leave."""
    devices = jax.device_count()
    size = devices if axes.data == -1 else axes.data
    if not 1 <= size <= devices:
        raise InputError(
            f"config.mesh.data={axes.data}: there are {devices} devices; use 1 to {devices}, or -1 for all"
        )
    return jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sequences divided among the devices: (batch, length)."""
    return NamedSharding(mesh, PartitionSpec("data"))
