"""Packages that only some commands need: imported when needed, with an error that says how to install them."""

import importlib
from types import ModuleType

from t2r.errors import InputError


def require(module: str, extra: str) -> ModuleType:
    """The module; if it is not installed, an error that names the extra of t2r it comes with."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise InputError(f"this needs the package {error.name}: pip install 't2r[{extra}]'") from None
