"""What the kernels share: products of blocks, and where kernels can be used."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


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


def available(*arrays: Array) -> bool:
    """Whether there is a kernel for arrays of these last dimensions, here: Triton's blocks are powers of two."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh is None or mesh.empty or mesh.size == 1  # a kernel is not divided among devices by itself
    sizes = [x.shape[-1] for x in arrays]
    powers = all(16 <= size <= 128 and size & (size - 1) == 0 for size in sizes)
    return jax.default_backend() == "gpu" and arrays[-1].dtype == jnp.bfloat16 and powers and alone
