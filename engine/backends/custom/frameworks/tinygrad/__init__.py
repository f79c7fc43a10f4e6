"""The tinygrad framework. It captures the kernels of a step once per step size and replays them."""

from typing import TYPE_CHECKING

from engine.backends.custom.frameworks.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks.backends import TinygradBackend

__all__ = ["TinygradBackend"]

__getattr__ = lazy_backend(__name__, "TinygradBackend")
