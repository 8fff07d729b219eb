"""The machine and package versions, as recorded in provenance and benchmark results; available memory; a clock."""

import importlib.metadata
import math
import os
import platform
import time
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
    """Bytes that a pytree of arrays, or of `ShapeDtypeStruct`s, occupies."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def available_memory() -> int | None:
    """Free bytes on the first local device; None if the platform does not report them."""
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
    """Bytes of the Linux page cache and buffers, which the kernel frees on demand."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["Cached"].split()[0]) * 1024 + int(fields["Buffers"].split()[0]) * 1024


def running_time() -> float:
    """Seconds on a clock that stands still while JAX traces and compiles; only differences have a meaning."""
    return time.monotonic() - sum(end - start for start, end in _compiling)


_compiling: list[tuple[float, float]] = []  # when JAX compiled: disjoint intervals


def _note_compilation(event: str, seconds: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
        end = time.monotonic()
        start = end - seconds
        while _compiling and _compiling[-1][0] >= start:  # phases within this one, such as tracing an inner function
            _compiling.pop()
        _compiling.append((start, end))


jax.monitoring.register_event_duration_secs_listener(_note_compilation)
