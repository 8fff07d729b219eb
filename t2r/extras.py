"""Optional packages: imported by the commands that need them, with an error that says how to install them."""

import importlib
from types import ModuleType

from t2r.errors import InputError


def require(module: str, extra: str) -> ModuleType:
    """Imports and returns a module; if it is not installed, the error names the extra of t2r that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        package = module.partition(".")[0]
        raise InputError(f"this needs the package {package}: pip install 't2r[{extra}]'") from None
