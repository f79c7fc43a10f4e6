"""The JAX framework: pure functions over pytrees, compiled once for each shape of a step.

XLA would take most of a GPU's memory at its first use; the engine plans what it takes, so XLA is
told to take what it is asked for.
"""

import os
from typing import TYPE_CHECKING

from engine.backends.custom.frameworks.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks.backends import JAXBackend

__all__ = ["JAXBackend"]

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

__getattr__ = lazy_backend(__name__, "JAXBackend")
