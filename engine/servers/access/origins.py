"""The web origins whose pages may call the server."""

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_LOCALHOST = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")


class AllowedOrigins:
    """What `server.cors_origins` lists. `*` stands for all origins, and `localhost` for those of
    this machine with any port.
    """

    def __init__(self, listed: Sequence[str]) -> None:
        self._listed = frozenset(listed)

    def __contains__(self, origin: str) -> bool:
        if "*" in self._listed or origin in self._listed:
            return True
        return "localhost" in self._listed and _LOCALHOST.fullmatch(origin) is not None


class CorsLayer(CORSMiddleware):
    """Sends CORS headers that name the origin of the page, if it may call the server. All request
    headers are allowed, because OpenAI's SDK sends many x-stainless-* headers. The server uses no
    cookies.
    """

    def __init__(self, app: ASGIApp, origins: AllowedOrigins, exposed: Sequence[str]) -> None:
        methods = ("GET", "POST", "DELETE", "OPTIONS")
        super().__init__(app, (), methods, allow_headers=["*"], expose_headers=exposed)
        self._origins = origins

    def is_allowed_origin(self, origin: str) -> bool:
        return origin in self._origins
