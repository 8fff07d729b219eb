"""Helpers of the attention kernels: products of blocks, the causal mask, and running a kernel on sharded arrays."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from t2r.kernels.support import is_one_device
from t2r.layout import partition_spec


def dot(a: Array, b: Array, a_axis: int = 1, b_axis: int = 0) -> Array:
    """The product of two matrices, summed over axis `a_axis` of a and `b_axis` of b, in float32."""
    return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def causal_mask(shape: tuple[int, int], first_query: Array | int = 0, first_key: Array | int = 0) -> Array:
    """True where a query may attend to a key; (queries, keys), from these positions on."""
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return first_query + queries >= first_key + keys


def on_each_device(kernel: Callable[..., Array], q: Array, k: Array, v: Array, *others: Array) -> Array:
    """Runs a kernel on each device's own sequences and heads; the compiler cannot shard a kernel.

    `kernel(q, k, v, *others, first=(sequence, head))` gets the device's shard of q, k and v, all of `others`, and the
    global indices of the shard's first sequence and first key/value head.
    """
    if is_one_device():
        return kernel(q, k, v, *others, first=(0, 0))
    mesh = jax.sharding.get_abstract_mesh()
    specs = [
        partition_spec(("batch", None, "heads", None, None)[: x.ndim], x.shape, dict(mesh.shape)) for x in (q, k, v)
    ]
    batch_axes, _, head_axes = specs[0][:3]

    def run_on_shard(q: Array, *rest: Array) -> Array:
        first = [
            0 if mesh_axes is None else jax.lax.axis_index(mesh_axes) * q.shape[dimension]
            for dimension, mesh_axes in ((0, batch_axes), (2, head_axes))
        ]
        return kernel(q, *rest, first=tuple(first))

    replicated = [PartitionSpec()] * len(others)
    return jax.shard_map(run_on_shard, in_specs=(*specs, *replicated), out_specs=specs[0], check_vma=False)(
        q, k, v, *others
    )
