"""A refused request gets its answer, even if its client still sends, and a client that goes on
sending gains nothing by it (SEC-20; T2). Over plain connections and TLS, with both event loops.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.servers.http import protocol
from engine.servers.http.protocol import direct_body
from tests.support.servers.live_server import live_server, wait_until
from tests.support.servers.node_processes import certify

BODY = b"x" * (3 * 2**20)
HOUR = 3600
JSON = {"content-type": "application/json"}
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def answer(send: Send, status: int, *headers: tuple[bytes, bytes]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-length", b"7"), *headers],
        }
    )
    await send({"type": "http.response.body", "body": b"refused"})


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request, and closes the connection. What it does before is in the path."""
    if scope["path"] == "/late":
        while not direct_body(scope)._flow.read_paused:
            await asyncio.sleep(0.001)
    elif scope["path"] == "/whole":
        while (await receive()).get("more_body"):
            pass
    kept = () if scope["path"] == "/kept" else ((b"connection", b"close"),)
    await answer(send, 413, *kept)


class Served:
    def __init__(self, app: ASGIApp, loop: str, tls: tuple[str, str] | None) -> None:
        self.server = protocol.http_server(app, HOUR, tls)
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = self._sock.getsockname()
        self._loop: asyncio.AbstractEventLoop = LOOPS[loop]()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def _run(self) -> None:
        self._loop.run_until_complete(self.server.serve(sockets=[self._sock]))
        self._loop.close()

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.address, timeout=30) as connection:
            yield connection

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def served(
    loop: str = "uvloop", tls: tuple[str, str] | None = None, app: ASGIApp = application
) -> Iterator[Served]:
    server = Served(app, loop, tls)
    try:
        yield server
    finally:
        server.stop()


def head(path: str, length: int = len(BODY)) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def send_until_cut(connection: socket.socket, data: bytes) -> int:
    """Send until the connection is lost. Returns the number of bytes."""
    sent = 0
    try:
        while True:
            connection.sendall(data)
            sent += len(data)
    except ConnectionError:
        return sent


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", ["/", "/late"])
def test_a_client_that_sends_its_whole_body_first_gets_the_refusal(loop: str, path: str) -> None:
    with served(loop) as server:
        for _ in range(20):
            with server.connect() as connection:
                connection.sendall(head(path))
                connection.sendall(BODY)
                assert read_all(connection).startswith(b"HTTP/1.1 413")
        wait_until(lambda: server.num_connections == 0)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_refusal_arrives_over_tls(loop: str, tmp_path: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with served(loop, certify(tmp_path, "server")) as server:
        for _ in range(5):
            with server.connect() as plain, context.wrap_socket(plain) as connection:
                connection.sendall(head("/"))
                connection.sendall(BODY)
                assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        wait_until(lambda: server.num_connections == 0)


@pytest.mark.parametrize("frontends", [1, 2])
def test_an_oversized_body_is_told_that_it_is_too_large(frontends: int) -> None:
    with live_server(server={"body_limit_mb": 1, "frontends": frontends}) as server:
        for _ in range(20):
            response = httpx.post(f"{server.url}/v1/completions", content=BODY, headers=JSON)
            assert response.status_code == 413


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_sends_for_ever_is_cut(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", HOUR)
    monkeypatch.setattr(protocol, "MAX_LINGER_BYTES", 4 * 2**20)
    with served(loop) as server, server.connect() as connection:
        connection.sendall(head("/", 10**12))
        assert send_until_cut(connection, b"x" * 65536) < 64 * 2**20
        wait_until(lambda: server.num_connections == 0)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_sends_slowly_is_cut(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    with served(loop) as server, server.connect() as connection:
        connection.sendall(head("/", 10**12))
        assert connection.recv(65536)
        send_until_cut(connection, b"x")
        wait_until(lambda: server.num_connections == 0)


def test_few_connections_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", HOUR)
    monkeypatch.setattr(protocol, "MAX_LINGERING", 2)
    with served() as server:
        connections = [socket.create_connection(server.address, timeout=30) for _ in range(5)]
        for connection in connections:
            connection.sendall(head("/"))
        for connection in connections:
            assert connection.recv(65536)
        wait_until(lambda: server.num_connections == 2)
        for connection in connections:
            connection.close()
        wait_until(lambda: server.num_connections == 0)


def test_a_connection_whose_body_has_arrived_does_not_linger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", HOUR)
    with served() as server, server.connect() as connection:
        connection.sendall(head("/whole") + BODY)
        assert read_all(connection).startswith(b"HTTP/1.1 413")
        wait_until(lambda: server.num_connections == 0)


def test_a_stop_does_not_wait_for_connections_that_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", HOUR)
    entered, may_refuse = threading.Event(), threading.Event()

    async def slowly(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            entered.set()
            await asyncio.to_thread(may_refuse.wait, 30)
        await application(scope, receive, send)

    with served(app=slowly) as server, server.connect() as lingers, server.connect() as slow:
        lingers.sendall(head("/"))
        assert lingers.recv(65536)
        slow.sendall(head("/slow"))
        assert entered.wait(30)
        server.server.should_exit = True
        assert send_until_cut(lingers, b"x" * 65536) >= 0  # the server has begun to stop
        may_refuse.set()
        server.stop()


def test_the_rest_of_an_unwanted_body_keeps_no_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "KEEP_ALIVE_TIMEOUT_S", 1)
    with served() as server, server.connect() as connection:
        connection.sendall(head("/kept", 2))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        connection.sendall(b"xx")
        assert connection.recv(65536) == b""
        with server.connect() as second:
            second.sendall(head("/kept", 10**12))
            assert second.recv(65536).startswith(b"HTTP/1.1 413")
            send_until_cut(second, b"x")
        wait_until(lambda: server.num_connections == 0)
