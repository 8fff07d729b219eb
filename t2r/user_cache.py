"""The user's folder for what can be made again: compiled programs, and imported models of the hub."""

import os
from pathlib import Path


def user_cache() -> Path | None:
    """~/.cache/t2r, or below XDG_CACHE_HOME; None for a user without a home directory."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        caches = given if given.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return caches / "t2r"
