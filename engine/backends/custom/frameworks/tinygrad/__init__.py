"""The tinygrad framework: a step is captured once for each shape and replayed from then on."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.backends.custom.frameworks.backends import TinygradBackend

__all__ = ["TinygradBackend"]


def __getattr__(name: str) -> Any:
    """The backend's class belongs to the frontend, which an engine's process does not load."""
    if name != "TinygradBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.backends.custom.frameworks.backends import TinygradBackend

    return TinygradBackend
