"""Which devices and array sizes have kernels. Does not import Pallas."""

import re
from typing import NamedTuple

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


class Device(NamedTuple):
    """What the choice of a kernel depends on."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as JAX names it: "NVIDIA H200", "TPU v4"
    capability: tuple[int, int] | None = None  # of NVIDIA GPUs, their generation: (8, 0) is Ampere, (9, 0) is Hopper


def this_device() -> Device:
    """The device that arrays are on."""
    device = jax.devices()[0]
    # GPUs of other vendors have none, or one that is not a number ("gfx942").
    number = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    capability = (int(number[1]), int(number[2])) if number else None
    return Device(device.platform, device.device_kind, capability)


AMPERE, HOPPER = (8, 0), (9, 0)


def gpu_has_kernels(kernels: str, device: Device) -> bool:
    """Whether the Triton kernels here run on this GPU.

    They multiply bfloat16 on tensor cores, which NVIDIA has from Ampere on. They were written for Hopper: only there is
    it known that they fit into shared memory and are faster, which "auto" asks for.
    """
    if device.platform != "gpu" or device.capability is None or kernels == "off":
        return False
    return device.capability >= AMPERE if kernels == "on" else device.capability == HOPPER


def kernel_platform(kernels: str, *arrays: Array, widest: int = MOST_SIZE, device: Device | None = None) -> str | None:
    """The platform ("gpu" or "tpu") whose kernels run on these arrays; None if there is none or `kernels` forbids it.

    `kernels` is "auto", "on" or "off". "auto" uses kernels where they were measured to be faster, which is on GPUs. On
    TPUs, Mosaic multiplies bfloat16 from v4 on.
    """
    device = device or this_device()
    fit = all(is_power_of_two(x.shape[-1], LEAST_SIZE) and x.shape[-1] <= widest for x in arrays)
    if kernels == "off" or arrays[-1].dtype != jnp.bfloat16 or not fit:
        return None
    if device.platform == "tpu" and kernels == "on":
        return None if device.kind in ("TPU v2", "TPU v3") else "tpu"
    return "gpu" if gpu_has_kernels(kernels, device) else None


def has_rare_token_kernels(kernels: str, x: Array, device: Device | None = None) -> bool:
    """Whether the kernels of `rare_tokens` run on vectors x (t, e); they exist for GPUs only."""
    return kernel_platform(kernels, x, widest=MOST_RARE_SIZE, device=device) == "gpu"


def has_flash_attention(q: Array, device: Device | None = None) -> bool:
    """Whether cuDNN's flash attention, which never stores the weights, takes queries (…, d). It has no dropout."""
    device = device or this_device()
    if device.platform != "gpu" or device.capability is None or device.capability < AMPERE:
        return False
    # cuDNN's limit on Hopper is 256 in all versions that this JAX runs with; on later GPUs it depends on more.
    most = 256 if device.capability == HOPPER else 128
    return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= most
