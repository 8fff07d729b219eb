"""What the Pallas kernels of attention share: products of blocks, causal masks, and sharding over devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from t2r.kernels.support import is_one_device
from t2r.layout import partition_spec


def dot(a: Array, b: Array, axis: int = 1, other: int = 0) -> Array:
    """The product of two matrices over these axes, in float32."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)


def past(shape: tuple[int, int], row: Array | int = 0, column: Array | int = 0) -> Array:
    """Where a block of queries from `row` on may see a block of keys from `column` on."""
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row + rows >= column + columns


def on_each_device(kernel: Callable[..., Array], q: Array, k: Array, v: Array, *others: Array) -> Array:
    """Runs a kernel on each device's own sequences and heads: by itself it would not be divided.

    It is called with these, and with the numbers of its first sequence and its first key/value head.
    """
    if is_one_device():
        return kernel(q, k, v, *others, first=(0, 0))
    mesh = jax.sharding.get_abstract_mesh()
    specs = [
        partition_spec(("batch", None, "heads", None, None)[: x.ndim], x.shape, dict(mesh.shape)) for x in (q, k, v)
    ]
    by_row, _, by_head = specs[0][:3]

    def here(q: Array, *parts: Array) -> Array:
        first = [
            0 if axes is None else jax.lax.axis_index(axes) * q.shape[place]
            for place, axes in ((0, by_row), (2, by_head))
        ]
        return kernel(q, *parts, first=tuple(first))

    whole = [PartitionSpec()] * len(others)
    return jax.shard_map(here, in_specs=(*specs, *whole), out_specs=specs[0], check_vma=False)(q, k, v, *others)
