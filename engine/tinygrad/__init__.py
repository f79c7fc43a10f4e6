"""The tinygrad framework. It captures the kernels of a step once per step size and replays them."""

from typing import TYPE_CHECKING

from engine.runners.lazy import lazy_backend

if TYPE_CHECKING:
    from engine.backends.custom.frameworks import TinygradBackend

__all__ = ["TinygradBackend"]

__getattr__ = lazy_backend(__name__, "TinygradBackend")
