"""Lets the package of a framework export its backend class without importing it. The frontend needs
the class. The engine process imports the same package, but does not need the class.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

BACKENDS = "engine.backends.custom.frameworks"


def lazy_backend(package: str, name: str) -> Callable[[str], Any]:
    """A `__getattr__` function for a package. It imports the backend class `name` on first use."""

    def find(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {package!r} has no attribute {asked!r}")
        return getattr(import_module(BACKENDS), name)

    return find
