"""Lets a framework's package name its backend class without importing it. The class belongs to the
frontend; an engine process never loads it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

BACKENDS = "engine.backends.custom.frameworks.backends"


def lazy_backend(package: str, name: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that exports a backend class."""

    def find(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {package!r} has no attribute {asked!r}")
        return getattr(import_module(BACKENDS), name)

    return find
