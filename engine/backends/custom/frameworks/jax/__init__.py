"""The JAX framework: pure functions over pytrees, compiled once for each shape of a step.

XLA would take most of a GPU's memory at its first use; the engine plans what it takes, so XLA is
told to take what it is asked for.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.backends.custom.frameworks.backends import JAXBackend

__all__ = ["JAXBackend"]

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def __getattr__(name: str) -> Any:
    """The backend's class belongs to the frontend, which an engine's process does not load."""
    if name != "JAXBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.backends.custom.frameworks.backends import JAXBackend

    return JAXBackend
