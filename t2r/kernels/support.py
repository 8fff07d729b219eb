"""Which devices and array sizes have kernels. Does not import Pallas."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Bounds on the last dimension of arrays: tensor cores multiply at least 16 values, and larger ones overflow registers.
LEAST_SIZE, MOST_SIZE, MOST_RARE_SIZE = 16, 128, 256


def is_power_of_two(size: int, least: int) -> bool:
    """Whether a size is a power of two, which Triton requires of blocks, and at least `least`."""
    return size >= least and size & (size - 1) == 0


def is_one_device() -> bool:
    """Whether arrays are on one device, not sharded over a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh is None or mesh.empty or mesh.size == 1


def kernel_platform(kernels: str, *arrays: Array, widest: int = MOST_SIZE) -> str | None:
    """The platform ("gpu" or "tpu") whose kernels run on these arrays; None if there is none or `kernels` forbids it.

    `kernels` is "auto", "on" or "off". "auto" uses kernels where they were measured to be faster, which is on GPUs. On
    TPUs, Mosaic multiplies bfloat16 from v4 on.
    """
    fit = all(is_power_of_two(x.shape[-1], LEAST_SIZE) and x.shape[-1] <= widest for x in arrays)
    if kernels == "off" or arrays[-1].dtype != jnp.bfloat16 or not fit:
        return None
    if jax.default_backend() == "tpu" and kernels == "on":
        return None if jax.devices()[0].device_kind in ("TPU v2", "TPU v3") else "tpu"
    return "gpu" if jax.default_backend() == "gpu" else None


def has_rare_token_kernels(kernels: str, x: Array) -> bool:
    """Whether the kernels of `rare_tokens` run on vectors x (t, e); they exist for GPUs only."""
    return kernel_platform(kernels, x, widest=MOST_RARE_SIZE) == "gpu"
