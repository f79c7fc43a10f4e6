"""A real server on a real socket, in a thread, over a backend that the test controls.

In-process HTTP clients buffer whole responses. Ordering in time, disconnects and draining can only
be tested over a socket.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from engine.core.config_schema import Settings
from engine.core.listening import address_of, bind_probes, bind_socket
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.http_workers.pool import HttpWorkers
from engine.servers.run import HttpServer
from engine.servers.serving.services import Services
from tests.support.fakes.fake_backend import MODEL, FakeBackend


def make_settings(**sections: dict[str, Any]) -> Settings:
    """Settings with a free port, and with the given sections."""
    return Settings(**{**sections, "server": {"port": 0} | sections.get("server", {})})


class LiveServer:
    def __init__(self, backend: FakeBackend, settings: Settings) -> None:
        self.backend = backend
        app = create_app(settings, backend, Metrics(MODEL))
        services = app.state.services
        assert isinstance(services, Services)
        self.services = services
        self._sock = bind_socket(settings)
        self.url = address_of(self._sock)
        self.port = int(self.url.rpartition(":")[2])
        probe_sock = bind_probes(settings)
        self.probe_url = "" if probe_sock is None else address_of(probe_sock)
        self._server = HttpServer(app, self._sock, probe_sock=probe_sock)
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_until(lambda: self._is_up())
        if settings.server.frontends not in ("auto", 1):
            wait_until(lambda: self.http_workers is not None and self.http_workers.num_ready > 0)

    def _run(self) -> None:
        self._loop.run_until_complete(self._server.serve())
        self._loop.close()

    def _is_up(self) -> bool:
        try:
            return httpx.get(self.url + "/livez").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def http_workers(self) -> HttpWorkers | None:
        return self._server.http_workers

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Block the server's event loop meanwhile."""
        begun, ended = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            ended.wait(30)

        self._loop.call_soon_threadsafe(hold)
        assert begun.wait(10)
        try:
            yield
        finally:
            ended.set()

    def signal(self) -> None:
        """Do what SIGTERM does."""
        self._loop.call_soon_threadsafe(self._server.handle_signal)

    def stop(self) -> None:
        for _ in range(2):
            if self.thread.is_alive():
                self.signal()
        self.thread.join(10)
        assert not self.thread.is_alive()

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            yield connection

    def post_raw(self, connection: socket.socket, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)


@contextmanager
def live_server(
    backend: FakeBackend | None = None, **sections: dict[str, Any]
) -> Iterator[LiveServer]:
    server = LiveServer(backend or FakeBackend(), make_settings(**sections))
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition. The limit is generous, so this fails only if it never becomes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "say hello"}]} | fields


def events_of(text: str) -> list[Any]:
    """The payloads of an SSE body, without comments; `[DONE]` stays a string."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), blocks
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [each if each == "[DONE]" else json.loads(each) for each in payloads]
