"""`engine docs`: shows the documentation of this installation in a browser, without a network."""

import contextlib
import os
import sys
import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.core.errors import ConfigError

HOST = "127.0.0.1"
# `make docs` builds it, and wheels have it.
SITE = Path(__file__).parents[2] / "site"
# The theme has scripts and styles in its pages. Nothing may come from, or go to, another host.
POLICY = "default-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'"


class SiteHandler(SimpleHTTPRequestHandler):
    """The files of the site. A new build is shown at once, and requests are not logged."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def docs(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in a browser.")
    ] = True,
) -> None:
    """Serve the documentation to browsers of this machine until Ctrl-C. It needs no network."""
    if not (SITE / "index.html").exists():
        raise ConfigError(what_is_missing())
    try:
        server = ThreadingHTTPServer((HOST, port), partial(SiteHandler, directory=str(SITE)))
    except OSError as error:
        advice = "choose another one with --port, or leave it out"
        raise ConfigError(f"Port {port} can't be used ({error.strerror}): {advice}") from error
    url = f"http://{HOST}:{server.server_port}"
    print(f"The documentation is at {url} (Ctrl-C ends)", flush=True)
    # Without a display, a browser of the terminal would take this one.
    if browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)):
        webbrowser.open(url)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def what_is_missing() -> str:
    checkout = SITE.parents[1]
    if (checkout / "Makefile").exists():
        return f"The documentation is not built yet. Build it: make -C {checkout} docs"
    urls = dict(each.split(", ") for each in metadata("engine").get_all("Project-URL", []))
    return (
        "This installation was made without the documentation. Read it at "
        f"{urls['Documentation']}, or install a wheel of the project, which has it."
    )
