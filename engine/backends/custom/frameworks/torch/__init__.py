"""The PyTorch framework: CUDA first, CPU too.

OpenMP reads its wait policy once, when PyTorch is first imported. By default its threads spin; a
thread that spins while another process has the core makes steps tens of times slower.
"""

import os
from typing import TYPE_CHECKING

from engine.backends.custom.frameworks.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks.backends import TorchBackend

__all__ = ["TorchBackend"]

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__getattr__ = lazy_backend(__name__, "TorchBackend")
