"""The tinygrad framework. The kernels of a step are captured once per shape and then replayed."""

from typing import TYPE_CHECKING

from engine.backends.custom.frameworks.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks.backends import TinygradBackend

__all__ = ["TinygradBackend"]

__getattr__ = lazy_backend(__name__, "TinygradBackend")
