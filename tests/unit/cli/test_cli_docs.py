"""`engine docs`: a site that is there, one that is not, and a port that is taken."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.cli.ops import docs


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "engine" / "site"
    folder.mkdir(parents=True)
    monkeypatch.setattr(docs, "SITE", folder)
    return folder


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Iterator[list[str]]:
    """Run the command in a thread until its server is closed. Yields the addresses it opens."""
    servers: list[ThreadingHTTPServer] = []
    urls: list[str] = []
    serving = threading.Event()

    class Server(ThreadingHTTPServer):
        def serve_forever(self, poll_interval: float = 0.01) -> None:
            servers.append(self)
            serving.set()
            super().serve_forever(poll_interval)

    monkeypatch.setattr(docs, "ThreadingHTTPServer", Server)
    monkeypatch.setattr(docs.webbrowser, "open", urls.append)
    thread = threading.Thread(target=CliRunner().invoke, args=(app, ["docs", *arguments]))
    thread.start()
    assert serving.wait(60)
    try:
        yield [*urls, f"http://127.0.0.1:{servers[0].server_port}"]
    finally:
        servers[0].shutdown()
        thread.join(60)


def test_a_browser_is_opened_at_the_site(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "index.html").write_text("<h1>Documentation</h1>")
    monkeypatch.setenv("DISPLAY", ":0")
    with opened(monkeypatch) as (opened_url, url):
        answer = httpx.get(url)
    assert opened_url == url
    assert answer.text == "<h1>Documentation</h1>"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("display", "arguments"), [("", []), (":0", ["--no-browser"])], ids=["no display", "unwanted"]
)
def test_no_browser_takes_the_terminal(
    site: Path, monkeypatch: pytest.MonkeyPatch, display: str, arguments: list[str]
) -> None:
    (site / "index.html").write_text("")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr(docs.sys, "platform", "linux")
    with opened(monkeypatch, *arguments) as urls:
        assert len(urls) == 1


def test_what_is_missing_says_what_to_do(site: Path) -> None:
    without = CliRunner().invoke(app, ["docs"])
    assert without.exit_code != 0
    assert "Read it at https://" in without.stderr and "wheel" in without.stderr
    checkout = site.parents[1]
    (checkout / "Makefile").touch()
    assert f"make -C {checkout} docs" in CliRunner().invoke(app, ["docs"]).stderr


def test_a_taken_port_says_what_to_do(site: Path) -> None:
    (site / "index.html").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = CliRunner().invoke(app, ["docs", "--port", str(port)])
    assert refused.exit_code != 0
    assert f"Port {port}" in refused.stderr and "--port" in refused.stderr
