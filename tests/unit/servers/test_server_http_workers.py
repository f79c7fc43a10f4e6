"""Frontend processes that hold the connections of a server: what they pass on, and their deaths."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from engine.core.config import check_references
from engine.core.config_schema import ServerSettings
from engine.core.errors import ConfigError
from engine.core.listening import address_of, bind_socket
from engine.core.sandbox import liveness, processes
from engine.servers import run
from engine.servers.http_workers import pool, worker
from engine.servers.http_workers.pool import HttpWorkers
from engine.servers.run import num_frontends
from tests.support.servers.live_server import make_settings

LARGE = bytes(range(256)) * 2**13  # more than a socket buffer holds


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the request's head and body, by the path with a length, in parts or broken."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    if scope["path"] == "/large":
        body = LARGE
    head = (scope["method"], scope["query_string"].decode(), scope["client"][0], scope["scheme"])
    headers = [(b"x-head", " ".join(head).encode())]
    if scope["path"] != "/parts":
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 207, "headers": headers})
    if scope["path"] == "/broken":
        raise RuntimeError("an application that fails")
    half = len(body) // 2
    await send({"type": "http.response.body", "body": body[:half], "more_body": True})
    await send({"type": "http.response.body", "body": body[half:], "more_body": False})


@contextlib.asynccontextmanager
async def workers_of(
    count: int, app=echo, here: list[socket.socket] | None = None
) -> AsyncIterator[tuple[HttpWorkers, str]]:
    """HTTP workers of an application. `here` gets the connections that none of them takes."""
    settings = make_settings()
    sock = bind_socket(settings)
    sock.listen()
    url = address_of(sock)
    kept: list[socket.socket] = []
    workers = HttpWorkers(
        app, sock, settings, (kept if here is None else here).append, lambda: None
    )
    await workers.start(count)
    try:
        await until(lambda: workers.num_ready == count)
        yield workers, url
    finally:
        await workers.stop(5)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_requests_and_answers_pass_through_http_workers_unchanged():
    async with workers_of(1) as (_, url), httpx.AsyncClient(base_url=url) as client:
        for path in ("/", "/parts"):
            answer = await client.post(f"{path}?q=%C3%BC", content=LARGE)
            assert answer.content == LARGE
            assert answer.status_code == 207
            assert answer.headers["x-head"] == "POST q=%C3%BC 127.0.0.1 http"
            assert "date" in answer.headers

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, 2**18, 2**16):
                yield LARGE[start : start + 2**16]
                await asyncio.sleep(0.01)

        answer = await client.put("/", content=parts())
        assert answer.content == LARGE[: 2**18]
        assert (await client.get("/large")).content == LARGE
        assert (await client.head("/large")).headers["content-length"] == str(len(LARGE))
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/broken", content=b"body")
        assert (await client.post("/", content=b"after")).content == b"after"


async def test_an_http_worker_requests_the_body_only_if_the_application_reads_it():
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 429, "headers": []})
        await send({"type": "http.response.body", "body": b"full"})

    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    for app, answers in ((echo, b"HTTP/1.1 100 Continue"), (refuse, b"HTTP/1.1 429 ")):
        async with workers_of(1, app) as (_, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2]))
            writer.write(head)
            assert (await reader.readline()).startswith(answers)
            writer.close()


async def test_http_workers_report_disconnects_and_a_slow_client_blocks_only_itself():
    left, blocked = asyncio.Event(), asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/short":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"short"})
            return
        watching = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = None
        while not watching.done():
            part = {"type": "http.response.body", "body": bytes(2**16), "more_body": True}
            sending = asyncio.create_task(send(part))
            _, late = await asyncio.wait([sending], timeout=0.5)
            if late:
                blocked.set()
            await asyncio.wait([sending, watching], return_when=asyncio.FIRST_COMPLETED)
        assert watching.result()["type"] == "http.disconnect"
        left.set()
        await sending  # it returns, though nobody reads

    async with workers_of(1, endless) as (_, url), asyncio.timeout(60):
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2]))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await blocked.wait()
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/short")).text == "short"
        await left.wait()


async def test_an_http_worker_that_dies_loses_only_its_connections_and_is_replaced():
    async def pid_of_worker(client: httpx.AsyncClient) -> int:
        return (await client.get("/")).status_code

    async with workers_of(2) as (workers, url):
        first, second = workers.pids
        async with httpx.AsyncClient(base_url=url) as one, httpx.AsyncClient(base_url=url) as two:
            assert [await pid_of_worker(one), await pid_of_worker(two)] == [207, 207]
            os.kill(first, signal.SIGKILL)
            await until(lambda: workers.num_ready == 2 and first not in workers.pids)
            assert second in workers.pids
            lost = 0
            for client in (one, two):
                try:
                    await client.get("/")
                except httpx.RemoteProtocolError:
                    lost += 1
            assert lost <= 1
            assert [await pid_of_worker(one), await pid_of_worker(two)] == [207, 207]


async def test_an_http_worker_that_cannot_be_started_is_retried(monkeypatch):
    """At the start of the server, and after a death."""
    faults = [OSError("too many processes")] * 2

    def start_child(*arguments):
        if faults:
            raise faults.pop()
        return processes.start_child(*arguments)

    monkeypatch.setattr(worker, "start_child", start_child)
    monkeypatch.setattr(pool, "RETRY_S", 0.01)
    async with workers_of(1) as (workers, _):
        assert not faults
        faults += [OSError("too many files")] * 2
        first = workers.pids[0]
        os.kill(first, signal.SIGKILL)
        await until(lambda: workers.num_ready == 1 and first not in workers.pids)
        assert not faults


async def test_a_frozen_http_worker_gets_sigcont_and_is_replaced_if_it_freezes_again(monkeypatch):
    """New connections wait at most until then. Those that it had not taken go elsewhere."""
    for name, seconds in (("FROZEN", 1.0), ("WAKE", 1.2), ("GIVE_UP", 9.0), ("RELAPSED", 1.2)):
        monkeypatch.setattr(liveness, f"{name}_AFTER_S", seconds)
    monkeypatch.setattr(pool, "CHECK_S", 0.1)
    async with workers_of(2) as (workers, url), contextlib.AsyncExitStack() as stack:

        async def connect() -> int:
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            return (await client.get("/")).status_code

        first, second = workers.pids
        for pids in ([first, second], [second]):
            os.kill(first, signal.SIGSTOP)
            assert await asyncio.gather(*(connect() for _ in range(6))) == [207] * 6
            await until(lambda: not any(each.is_frozen for each in workers._workers))
            assert [pid for pid in workers.pids if pid in (first, second)] == pids
        await until(lambda: workers.num_ready == 2)
        assert await connect() == 207
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)  # not even a zombie


async def test_a_frozen_http_worker_gets_no_connections(monkeypatch):
    monkeypatch.setattr(liveness, "FROZEN_AFTER_S", 1.0)
    here: list[socket.socket] = []
    async with workers_of(1, here=here) as (workers, url):
        os.kill(workers.pids[0], signal.SIGSTOP)
        await until(lambda: workers._workers[0].is_frozen)
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2]))):
            await until(lambda: len(here) == 1)
        here[0].close()
        os.kill(workers.pids[0], signal.SIGCONT)
        await until(lambda: not workers._workers[0].is_frozen)


async def test_the_main_process_accepts_connections_while_no_http_worker_can():
    here: list[socket.socket] = []
    async with workers_of(1, here=here) as (workers, url):
        os.kill(workers.pids[0], signal.SIGKILL)
        await until(lambda: workers.num_ready == 0)
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2]))):
            await until(lambda: len(here) == 1)
        here[0].close()


async def test_connections_go_to_the_http_worker_with_the_fewest():
    async with workers_of(2) as (workers, url), contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
            await client.get("/")
        assert sorted(each.num_connections for each in workers._workers) == [3, 3]


def test_the_number_of_frontends_for_auto(monkeypatch: pytest.MonkeyPatch):
    server = ServerSettings()
    monkeypatch.setattr(run.os, "cpu_count", lambda: 16)
    assert num_frontends(server, is_accelerated=False) == 1
    assert num_frontends(server, is_accelerated=True) == 3
    assert num_frontends(ServerSettings(node_token="t" * 32), is_accelerated=True) == 1
    assert num_frontends(ServerSettings(frontends="2"), is_accelerated=False) == 2
    monkeypatch.setattr(run.os, "cpu_count", lambda: 2)
    assert num_frontends(server, is_accelerated=True) == 1


@pytest.mark.parametrize(
    ("name", "expected"), [("nvidia0", True), ("kfd", True), ("nvidiactl", False), ("sda", False)]
)
def test_a_gpu_is_detected_by_its_device_file(
    name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / name).touch()
    monkeypatch.setattr(run, "DEVICES", tmp_path)
    assert run.has_gpu() == expected


def test_nodes_require_a_single_frontend():
    settings = make_settings(server={"node_token": "t" * 32, "frontends": 2})
    with pytest.raises(ConfigError, match="nodes join over"):
        check_references(settings)
