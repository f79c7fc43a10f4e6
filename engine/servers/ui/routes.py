"""Serves the web page: `/` and `/ui/{page}` are the same HTML file, `/ui/static/` has the rest.

These routes need no API key, because the files hold nothing that is secret. The page asks its user
for the key, and sends it with each API request. The files of `static/` are served as they are; no
build step changes them.
"""

import asyncio
import base64
import gzip
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from engine.core.errors import NotFoundError
from engine.servers.http.request_log import STATIC_ROUTE
from engine.servers.serving.services import Services

STATIC = Path(__file__).parent / "static"
PAGES = ("chat", "live", "requests", "lens")
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
# Replaced in index.html by the relative URL of `/ui/`, so that the page also works behind a proxy
# that adds a prefix to all paths.
_BASE = "{{ui}}"
_IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)
# No inline script or style can run, except the import map, which is allowed by its hash. Trusted
# Types let only DOMPurify make HTML from text.
_POLICY = (
    "default-src 'none'; script-src 'self' 'sha256-{map_hash}'; style-src 'self';"
    " font-src 'self'; img-src 'self' data: blob:; connect-src 'self'; manifest-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types dompurify"
)
_SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser asks each time whether a file has changed, so an upgraded server is never mixed
    # with old files.
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


class StaticFile(NamedTuple):
    content: bytes
    zipped: bytes
    headers: dict[str, str]


class PageRoute(Route):
    """A route that is open to clients without an API key. With `browsers_only`, it does not match
    requests that do not accept HTML. Clients of Ollama send such requests to `/`.
    """

    def __init__(self, path: str, endpoint: object, browsers_only: bool = False) -> None:
        super().__init__(path, endpoint, methods=["GET"])  # type: ignore[arg-type]
        self._browsers_only = browsers_only

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        if match is Match.NONE or (self._browsers_only and not _accepts_html(scope)):
            return Match.NONE, {}
        return match, {**found, "route": self}


def add_ui_routes(app: FastAPI, services: Services) -> None:
    """Add the routes of the page, unless `server.ui` is off."""
    if not services.settings.server.ui:
        return

    async def root(request: Request) -> Response:
        return await _answer(request, "index.html", "ui/")

    async def page(request: Request) -> Response:
        if request.path_params["page"] not in PAGES:
            raise NotFoundError("There is no such page.")
        return await _answer(request, "index.html", "")

    async def static(request: Request) -> Response:
        return await _answer(request, request.path_params["name"], "")

    app.router.routes += [
        PageRoute("/", root, browsers_only="ollama" in services.settings.server.dialects),
        PageRoute("/ui/{page}", page),
        PageRoute(STATIC_ROUTE, static),
    ]


async def _answer(request: Request, name: str, base: str) -> Response:
    if name not in _names():
        raise NotFoundError("The page has no such file.")
    # Reading and compressing the file takes milliseconds, once per file.
    file = await asyncio.to_thread(load, name, base)
    headers = dict(file.headers)
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.zipped, headers=headers | {"content-encoding": "gzip"})
    return Response(file.content, headers=headers)


@cache
def _names() -> frozenset[str]:
    """The names of all files that are served. No other path reaches the file system."""
    files = (each for each in STATIC.rglob("*") if each.suffix in _TYPES)
    return frozenset(each.relative_to(STATIC).as_posix() for each in files)


@cache
def load(name: str, base: str) -> StaticFile:
    """A file of `static/` with its headers. `base` is the URL of `/ui/` relative to the page."""
    content = (STATIC / name).read_bytes()
    headers = {**_SAFE, "content-type": _TYPES[Path(name).suffix]}
    if name == "index.html":
        text = content.decode().replace(_BASE, base)
        headers["content-security-policy"] = _POLICY.format(map_hash=_map_hash(text))
        content = text.encode()
    headers["etag"] = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return StaticFile(content, gzip.compress(content, 9, mtime=0), headers)


def _map_hash(page: str) -> str:
    found = _IMPORT_MAP.search(page)
    assert found is not None, "index.html has an import map"
    return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()


def _accepts_html(scope: Scope) -> bool:
    return "text/html" in Headers(scope=scope).get("accept", "")
