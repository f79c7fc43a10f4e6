"""The native CPU framework: our own C++ kernels, which compute with quantized weights directly. It
needs no tensor library.
"""

from typing import TYPE_CHECKING

from engine.runners.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks import NativeBackend

__all__ = ["NativeBackend"]

__getattr__ = lazy_backend(__name__, "NativeBackend")
