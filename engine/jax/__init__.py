"""The JAX framework: pure functions over pytrees, compiled once per step shape.

This module sets options of XLA. By default XLA reserves most of a GPU's memory at first use; here
it allocates on demand, because the engine plans memory itself. XLA also launches a whole step,
with attention, as CUDA graphs. Launching the kernels one by one would take the host longer than the
kernels run.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.runners.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks import JAXBackend

__all__ = ["JAXBackend"]

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
if find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin"):
    _KINDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
    _FLAGS = f"--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer={_KINDS}"
    os.environ.setdefault("XLA_FLAGS", _FLAGS)

__getattr__ = lazy_backend(__name__, "JAXBackend")
