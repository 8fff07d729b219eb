"""The machine and package versions, as recorded in provenance and benchmark results; available memory; a clock."""

import importlib.metadata
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from t2r.errors import InputError

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


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_bytes(arrays: Any) -> int:
    """Bytes that a pytree of arrays, or of `ShapeDtypeStruct`s, occupies."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def require_memory(needed: int, what: str, advice: Callable[[int], str]) -> None:
    """Raises an InputError if `what` needs more bytes than are free; `advice` is a function of the free bytes."""
    free = available_memory()
    if free is not None and needed > free:
        gib = f"{needed / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB are free"
        raise InputError(f"{what} needs {gib}: {advice(free)}")


def is_out_of_memory(error: Exception) -> bool:
    """Whether JAX or the system has said that memory was too little."""
    return "RESOURCE_EXHAUSTED" in str(error) or "ut of memory" in str(error)


def available_memory() -> int | None:
    """Free bytes on the first local device; None if the platform does not report them."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return host_memory() if device.platform == "cpu" else None


def host_memory(root: Path = Path("/")) -> int | None:
    """Free bytes for this process on a Linux machine: the machine's, or fewer if a container or scheduler limits them.

    Memory that holds copies of files counts as free, because the kernel gives it back on demand.
    """
    try:
        with (root / "proc/meminfo").open() as file:
            fields = dict(line.split(":") for line in file)
        free = [int(fields["MemAvailable"].split()[0]) * 1024]
    except (OSError, ValueError, KeyError):
        return None
    return max(min(free + [bytes_ for folder in _control_groups(root) for bytes_ in _free_in_group(folder)]), 0)


# The files of a control group, of versions 2 and 1: the limit, what is in use, and copies of files (in memory.stat).
_GROUP_FILES = [
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
]


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of the control groups that limit the memory of this process: its own and all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, group = line.split(":", 2)
        tops = ["sys/fs/cgroup", "sys/fs/cgroup/unified"] if number == "0" else ["sys/fs/cgroup/memory"]
        if number == "0" or "memory" in controllers.split(","):
            # Within a container the group's own name may not be visible: its files are then at the top.
            inside = Path(group.lstrip("/"))
            yield from (root / top / part for top in tops for part in (inside, *inside.parents))


def _free_in_group(folder: Path) -> Iterator[int]:
    for limit, usage, copies in _GROUP_FILES:
        try:
            most, used = ((folder / name).read_text().strip() for name in (limit, usage))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most != "max":
            yield int(most) - int(used) + sum(int(stat.get(name, 0)) for name in copies)


def process_bytes(process: int | str = "self") -> int | None:
    """Bytes of memory that a process has, on Linux; elsewhere, and if it has ended, None."""
    try:
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) * 1024
    except (OSError, TypeError):
        return None


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
