"""The user's folders for our files: a cache, which can be filled again, and data, which can't."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/engine, or ~/.cache/engine. It has models and packed weights."""
    return _home("XDG_CACHE_HOME", ".cache") / "engine"


def store_directory() -> Path:
    """The default model store: $XDG_CACHE_HOME/engine/models, or ~/.cache/engine/models."""
    return cache_directory() / "models"


def data_directory() -> Path:
    """$XDG_DATA_HOME/engine, or ~/.local/share/engine. It has files, adapters and jobs."""
    return _home("XDG_DATA_HOME", ".local/share") / "engine"


def _home(variable: str, default: str) -> Path:
    """A relative path in the variable is ignored, as the XDG specification demands."""
    found = os.environ.get(variable, "")
    return Path(found) if os.path.isabs(found) else Path.home() / default
