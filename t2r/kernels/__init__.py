"""Every kernel: for attention, the loss, layer dropout and decoding. Each equals the plain form that it replaces.

Kernels take and return arrays. Nothing here imports `attention`, `model` or `decode`, which call it; and nothing of
Pallas is loaded before a kernel is used: callers ask `support` whether a kernel runs here, then `load` it.
"""

import functools
import importlib
from types import ModuleType

from t2r.console import say


@functools.cache
def load(name: str) -> ModuleType | None:
    """The kernels of module `name`; None, after one line that says so, if this version of JAX lacks what they need."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except (ImportError, AttributeError) as error:
        say(f"kernels {name!r} need another version of JAX ({error}): computing without them")
        return None
