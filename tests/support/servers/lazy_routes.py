"""Routes of FastAPI that read their function's signature when they are first used.

An application has about 190 routes, which take 80 ms to construct, and a test uses few of them.
"""

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import compile_path, get_name

_construct = APIRoute.__init__


def _remember(self: APIRoute, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
    """Set only what the search for a request's route reads."""
    self.__dict__["unread"] = {"path": path, "endpoint": endpoint, **settings}
    self.path, self.endpoint = path, endpoint
    self.path_regex, self.path_format, self.param_convertors = compile_path(path)
    self.methods = {method.upper() for method in settings.get("methods") or ["GET"]}
    self.name = settings.get("name") or get_name(endpoint)
    self.include_in_schema = settings.get("include_in_schema", True)


def _read(self: APIRoute, name: str) -> Any:
    """An attribute that is not set yet."""
    settings = self.__dict__.pop("unread", None)
    if settings is None:
        raise AttributeError(name)
    _construct(self, **settings)
    return getattr(self, name)


def make_routes_lazy() -> None:
    APIRoute.__init__ = _remember  # type: ignore[method-assign, assignment]
    APIRoute.__getattr__ = _read  # type: ignore[attr-defined]
