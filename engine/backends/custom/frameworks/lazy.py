"""The frameworks' packages name their backend's class without loading it: it is the frontend's,
which an engine's process does without.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

BACKENDS = "engine.backends.custom.frameworks.backends"


def lazy_backend(package: str, name: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that has a backend's class."""

    def find(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {package!r} has no attribute {asked!r}")
        return getattr(import_module(BACKENDS), name)

    return find
