"""What a running server listens on: one address of this machine, and nothing that takes code
(SEC-10, SEC-11; T1, T6).
"""

import os
import pickle
import socket
import stat
from pathlib import Path

import httpx
import psutil

from tests.support.servers.served import ServedEngine


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.canary),)


def tree_of(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def sockets_of(pid: int) -> tuple[set[tuple[str, int]], list[str]]:
    """The addresses that a process and its children listen on, and what else of theirs somebody
    could reach: datagram sockets, and sockets in the file system that are not private.
    """
    listeners, others = set(), []
    for process in tree_of(pid):
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                listeners.add((connection.laddr.ip, connection.laddr.port))
            elif connection.status == psutil.CONN_NONE:
                others.append(f"datagrams at {connection.laddr}")
        for connection in process.net_connections(kind="unix"):
            if not connection.laddr or connection.laddr.startswith("\0"):
                continue  # a pair without a name, which nobody else can open
            path = Path(connection.laddr)
            modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)]
            if modes != [0o600, 0o700]:
                others.append(f"{path} with modes {modes}")
    return listeners, others


def test_a_server_has_one_tcp_listener_and_no_public_unix_sockets(server: ServedEngine) -> None:
    listeners, others = sockets_of(server.process.pid)
    assert listeners == {("127.0.0.1", httpx.URL(server.url).port)}
    assert not others


def test_the_engine_process_inherits_no_server_socket(server: ServedEngine) -> None:
    """The engine's process has none of the server's sockets: a client can't reach it."""
    _, engine, *_ = tree_of(server.process.pid)
    assert not engine.net_connections(kind="inet")


def test_a_pickle_in_a_request_is_never_unpickled(server: ServedEngine, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    address = httpx.URL(server.url)
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        bomb = pickle.dumps(Bomb(canary), protocol)
        framed = len(bomb).to_bytes(8, "little") + bomb
        post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        head = post + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(bomb)
        for payload in (bomb, framed, head + bomb):
            with socket.create_connection((address.host, address.port), timeout=60) as connection:
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(65536)
            assert answer[:12] in (b"", b"HTTP/1.1 400"), answer
    assert not canary.exists()
    assert httpx.get(f"{server.url}/health").status_code == 200
