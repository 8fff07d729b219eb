"""Where commands keep compiled programs, so that the same command does not compile them again."""

import hashlib
import os
import platform
from pathlib import Path

from t2r.user_cache import user_cache

LEAST_SECONDS = "0.1"  # programs that compile faster are not kept


def use_compilation_cache() -> None:
    """Tells JAX, which is not imported yet, to keep its compiled programs. What the user's environment says goes first:
    JAX_COMPILATION_CACHE_DIR is another folder, JAX_ENABLE_COMPILATION_CACHE=false turns it off."""
    folder = cache_folder()
    if folder is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", LEAST_SECONDS)


def cache_folder() -> Path | None:
    """~/.cache/t2r/xla-PROCESSOR, or below XDG_CACHE_HOME; None for a user without a home directory.

    A program for the CPU is compiled for one kind of processor; a home directory may be shared by several.
    """
    cache = user_cache()
    return cache and cache / f"xla-{platform.machine()}-{_features()}"


def _features() -> str:
    """A digest of the instructions that this processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return hashlib.sha256("\n".join([*features, platform.processor()]).encode()).hexdigest()[:8]
