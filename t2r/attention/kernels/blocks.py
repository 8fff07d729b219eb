"""What the kernels share: products of blocks, and where kernels can be used."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from t2r.layout import spec_of


def dot(a: Array, b: Array, axis: int = 1, other: int = 0) -> Array:
    """The product of two matrices over these axes, in float32."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)


def past(shape: tuple[int, int], row: Array | int = 0, column: Array | int = 0) -> Array:
    """Where a block of queries from `row` on may see a block of keys from `column` on."""
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row + rows >= column + columns


def padded(x: Array, length: int) -> Array:
    """A sequence (b, n, …) with zeros after it, up to a length."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def on_each_device(kernel: Callable[..., Array], q: Array, k: Array, v: Array, *others: Array) -> Array:
    """Runs a kernel on each device's own sequences and heads: by itself it would not be divided.

    It is called with these, and with the numbers of its first sequence and its first key/value head.
    """
    if is_alone():
        return kernel(q, k, v, *others, first=(0, 0))
    mesh = jax.sharding.get_abstract_mesh()
    specs = [spec_of(("batch", None, "heads", None, None)[: x.ndim], x.shape, dict(mesh.shape)) for x in (q, k, v)]
    by_row, _, by_head = specs[0][:3]

    def here(q: Array, *parts: Array) -> Array:
        first = [
            0 if axes is None else jax.lax.axis_index(axes) * q.shape[place]
            for place, axes in ((0, by_row), (2, by_head))
        ]
        return kernel(q, *parts, first=tuple(first))

    whole = [PartitionSpec()] * len(others)
    return jax.shard_map(here, in_specs=(*specs, *whole), out_specs=specs[0], check_vma=False)(q, k, v, *others)


def is_power(size: int, least: int) -> bool:
    """Of two, as are all sizes in Triton, and at least this."""
    return size >= least and size & (size - 1) == 0


def platform_of(kernels: str, *arrays: Array, widest: int = 128) -> str | None:
    """The platform here that there is a kernel for, if `kernels` ("auto", "on", "off") and last dimensions allow it.

    By themselves kernels are used where they were measured: on GPUs. Triton's blocks are powers of two, and Mosaic
    multiplies bfloat16 from TPU v4 on.
    """
    fit = all(is_power(x.shape[-1], 16) and x.shape[-1] <= widest for x in arrays)
    if kernels == "off" or arrays[-1].dtype != jnp.bfloat16 or not fit:
        return None
    if jax.default_backend() == "tpu" and kernels == "on":
        return None if jax.devices()[0].device_kind in ("TPU v2", "TPU v3") else "tpu"
    return "gpu" if jax.default_backend() == "gpu" else None


def is_alone() -> bool:
    """Whether arrays are not divided among devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh is None or mesh.empty or mesh.size == 1
