"""What a figure was measured on: the machine and the versions, as they go into provenance and results; its memory."""

import importlib.metadata
import math
import os
import platform
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "sentencepiece")


def describe() -> dict[str, Any]:
    """Device, processor, Python and package versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
    }


def total_bytes(arrays: Any) -> int:
    """What arrays, or shapes of them, occupy."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def available_memory() -> int | None:
    """Bytes that are free for arrays on one device; None where nobody can tell."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform != "cpu":
        return None
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _page_cache()
    except (ValueError, OSError):
        return None


def _page_cache() -> int:
    """Memory that Linux uses for files and gives back on demand."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["Cached"].split()[0]) * 1024 + int(fields["Buffers"].split()[0]) * 1024
