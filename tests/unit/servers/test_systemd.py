"""What a service manager hears of a server."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.servers.run import ServiceManager
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.servers.live_server import live_server, wait_until


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock


def heard(manager: socket.socket) -> list[str]:
    """All that has been said so far."""
    manager.setblocking(False)
    said = []
    while True:
        try:
            said.append(manager.recv(100).decode())
        except BlockingIOError:
            return said


def test_systemd_is_notified_of_ready_watchdog_and_stopping(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    backend = FakeBackend()
    with live_server(backend) as server:
        assert "NOTIFY_SOCKET" not in os.environ
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 200)
        said: list[str] = []
        wait_until(lambda: bool(said.extend(heard(manager))) or said.count("WATCHDOG=1") > 2)
        assert said.count("READY=1") == 1
        backend.ready = False
        asyncio.run(asyncio.sleep(0.1))
        heard(manager)
        asyncio.run(asyncio.sleep(0.2))
        assert heard(manager) == [], "a sign of life of a backend that is not well"
        server.signal()
        wait_until(lambda: "STOPPING=1" in heard(manager))


@pytest.mark.parametrize("path", [None, "/nowhere/notify", "@nobody-listens"])
async def test_a_missing_notify_socket_is_ignored(path: str | None) -> None:
    told = ServiceManager(path, 0.01)
    told.tell("READY=1")
    looks: list[None] = []

    def is_well() -> bool:
        looks.append(None)
        return True

    watching = asyncio.create_task(told.watch(is_well))
    while not watching.done() and len(looks) < 3:
        await asyncio.sleep(0.001)
    assert watching.done() is (path is None)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_a_watchdog_for_another_pid_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert ServiceManager.from_environment()._watchdog_s is None
