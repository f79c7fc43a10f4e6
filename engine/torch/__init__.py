"""The PyTorch framework, for CUDA and for CPUs.

This module sets OpenMP's wait policy, which OpenMP reads when PyTorch is first imported. By default
idle OpenMP threads spin. If another process needs their cores, spinning threads make steps tens of
times slower.
"""

import os
from typing import TYPE_CHECKING

from engine.runners.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks import TorchBackend

__all__ = ["TorchBackend"]

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__getattr__ = lazy_backend(__name__, "TorchBackend")
