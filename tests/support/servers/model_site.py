"""A site that offers models for download, and fails as it is told."""

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine.core.store.model_store import (
    ModelStore,
)

GGUF = b"GGUF" + bytes(range(256)) * 1200
OTHER = b"GGUF" + bytes(reversed(range(256))) * 1200


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Page:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    etag: str | None = '"v1"'
    ranges: bool = True
    length: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes to send before hanging up, per answer


@dataclass
class Site:
    url: str = ""
    pages: dict[str, Page] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def ranges(self) -> list[str | None]:
        return [headers.get("range") for _, headers in self.requests]


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        seen = {key.lower(): value for key, value in self.headers.items()}
        self.site.requests.append((self.path, seen))
        page = self.site.pages.get(self.path.split("?")[0], Page(status=404))
        body, status, extra = page.body, page.status, dict(page.headers)
        wanted = re.fullmatch(r"bytes=(\d+)-", seen.get("range", ""))
        if (
            wanted
            and page.ranges
            and status == 200
            and seen.get("if-range", page.etag) == page.etag
        ):
            start = int(wanted[1])
            extra["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body, status = body[start:], 206
        self.send_response(status)
        if page.etag:
            extra["ETag"] = page.etag
        if page.length:
            extra["Content-Length"] = str(len(body))
        for key, value in extra.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[: page.cuts.pop(0)] if page.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve_site() -> tuple[Site, ThreadingHTTPServer]:
    site = Site()
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    site.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return site, server


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def parts(store: ModelStore) -> list[Path]:
    return list(store.root.glob(".partial/*/.*.part"))
