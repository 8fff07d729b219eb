"""GPU and TPU kernels for attention, the loss, layer dropout and decoding. Each equals the plain JAX code it replaces.

Kernels take and return arrays. Nothing here imports `attention`, `model` or `decode`, which call it. Pallas is imported
only when a kernel is used: callers first check with `support` that the device has the kernel, then `load` its module.
"""

import functools
import importlib
from types import ModuleType

from t2r.console import say


@functools.cache
def load(name: str) -> ModuleType | None:
    """Imports `t2r.kernels.<name>`; if this version of JAX lacks what it needs, prints one line and returns None."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except (ImportError, AttributeError) as error:
        say(f"kernels {name!r} need another version of JAX ({error}): computing without them")
        return None
