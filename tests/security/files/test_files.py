"""Uploads are bounded and private, and their names lead nowhere (SEC-03, SEC-26, SEC-42; T1, T2,
T6).
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.observability.metrics import Metrics
from engine.servers.access.auth import Principal
from engine.servers.app import create_app
from engine.servers.batches.caller import Caller
from engine.servers.files import form
from engine.servers.files.routes import content_disposition, safe_name
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import (
    LiveServer,
    chat,
    live_server,
    make_settings,
    wait_until,
)

HTTP = httpx.Client(timeout=60)  # one for all: a client is slow to make
KEY = "correct-horse-battery-staple-0123"
BEARER = {"authorization": f"Bearer {KEY}"}
BOUNDARY = "edge"
HOSTILE_NAMES = [
    "../../etc/passwd",
    "..\\..\\windows\\system.ini",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a\x00b.jsonl",
    "line\r\nSet-Cookie: a=b",
    "bidi\u202etxt.exe",
    "sep\u2028arated",
    'quo"te.jsonl',
    "%2e%2e%2f",
    "x" * 5_000,
    "naïve \U0001f600.jsonl",
]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def server(storage: Path) -> Iterator[LiveServer]:
    with live_server(server={"api_key": KEY}, storage={"path": storage}) as server:
        yield server


def part(name: str, value: bytes, disposition: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{disposition}\r\n\r\n'
    return head.encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")
FILE = part("file", b"{}\n", '; filename="in.jsonl"')


def post(server: LiveServer, body: Any, **headers: str) -> httpx.Response:
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    return HTTP.post(f"{server.url}/v1/files", content=body, headers=BEARER | kind | headers)


def is_harmless(name: str) -> bool:
    return 0 < len(name) <= 255 and not set("/\\\r\n\x00\u202e\u2028") & set(name)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_file_name_is_shown_escaped_and_never_used_as_a_path(
    server: LiveServer, storage: Path, name: str
) -> None:
    assert is_harmless(safe_name(name))
    assert not set('"\r\n;\\') & set(content_disposition(name).split('"')[1])
    answer = post(server, PURPOSE + part("file", b"{}\n", f'; filename="{name}"') + END)
    if answer.status_code == 400:  # no header can have such a name
        return
    body = answer.json()
    assert is_harmless(body["filename"])
    outside = {path for path in storage.iterdir() if not path.name.startswith("batches")}
    assert outside == {storage / "files"}
    assert (storage / "files" / body["id"]).read_bytes() == b"{}\n"
    content = HTTP.get(f"{server.url}/v1/files/{body['id']}/content", headers=BEARER)
    assert content.content == b"{}\n"
    assert content.headers["content-disposition"] == content_disposition(body["filename"])
    assert content.headers["content-disposition"].startswith('attachment; filename="')
    assert "set-cookie" not in content.headers


@pytest.mark.parametrize(
    "path",
    ["../batches.db", "..%2fbatches.db", "%2e%2e/batches.db", "..%5c..%5cx", "file-%00", "x" * 900],
)
def test_file_ids_are_looked_up_and_never_used_as_paths(server: LiveServer, path: str) -> None:
    for method, suffix in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        with server.connect() as connection:
            head = f"{method} /v1/files/{path}{suffix} HTTP/1.1\r\nHost: localhost\r\n"
            authorization = f"Authorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
            connection.sendall((head + authorization).encode())
            answer = b""
            while data := connection.recv(65536):
                answer += data
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405")), answer[:200]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (PURPOSE + FILE, 400, None),  # no last boundary: the upload was cut off
        (PURPOSE + FILE[:-10], 400, None),
        (b"not multipart at all", 400, None),
        (PURPOSE + END, 400, "file"),
        (FILE + END, 400, "purpose"),
        (PURPOSE + part("file", b"", '; filename="x"') + END, 400, "file"),
        (PURPOSE + PURPOSE + FILE + END, 400, "purpose"),
        (PURPOSE + FILE + FILE + END, 400, "file"),
        (PURPOSE + FILE + part("chunking", b"1") + END, 400, "chunking"),
        (part("purpose", b"x" * 2_000) + FILE + END, 400, "purpose"),
        (PURPOSE + b"".join([part(f"f{n}", b"") for n in range(1_000)]) + END, 400, "f0"),
        (f"--{BOUNDARY}\r\n".encode() + b"X: y\r\n" * 1_000 + FILE + END, 400, None),
        (f"--{BOUNDARY}\r\nX: ".encode() + b"y" * 100_000 + b"\r\n" + FILE + END, 400, None),
    ],
)
def test_malformed_upload_forms_are_refused_and_store_nothing(
    server: LiveServer, storage: Path, body: bytes, status: int, param: str | None
) -> None:
    post(server, PURPOSE + FILE + END)
    before = set((storage / "files").iterdir())
    answer = post(server, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert set((storage / "files").iterdir()) == before


def test_upload_size_is_counted_and_not_taken_from_headers(
    server: LiveServer, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "MAX_FILE_BYTES", 1 << 20)
    big = PURPOSE + part("file", b"x" * (1 << 20), '; filename="x"') + END
    assert post(server, big).status_code == 200
    before = set((storage / "files").iterdir())
    bigger = PURPOSE + part("file", b"x" * ((1 << 20) + 1), '; filename="x"') + END
    chunks = (bigger[start : start + 65_536] for start in range(0, len(bigger), 65_536))
    announced, chunked = post(server, bigger), post(server, chunks)
    for answer in (announced, chunked):
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"
    assert set((storage / "files").iterdir()) == before


def test_an_upload_that_stops_sending_is_closed(
    server: LiveServer, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "IDLE_TIMEOUT_S", 0.1)
    before = set((storage / "files").iterdir())
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: 1000\r\n\r\n"
    )
    with server.connect() as connection:
        connection.sendall(head.encode() + PURPOSE)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    with server.connect() as connection:
        connection.sendall(head.encode() + PURPOSE + FILE[:40])
    wait_until(lambda: set((storage / "files").iterdir()) == before)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json"},
        {"content-type": "multipart/form-data"},
        {"content-type": "multipart/mixed; boundary=edge"},
        {"content-encoding": "gzip"},
    ],
)
def test_uploads_with_other_content_types_are_415(
    server: LiveServer, headers: dict[str, str]
) -> None:
    assert post(server, PURPOSE + FILE + END, **headers).status_code == 415


def test_no_client_can_impersonate_the_servers_own_requests(server: LiveServer) -> None:
    name = "engine.acting_for"
    principal = Principal("")
    for headers in (
        {name: ""},
        {name: repr(principal), "x-engine-acting-for": repr(principal)},
        {"x-forwarded-user": repr(principal), "state": json.dumps({name: ""})},
    ):
        url = f"{server.url}/v1/models?{name}={principal}&state[{name}]={principal}"
        answer = HTTP.request("GET", url, headers=headers)
        assert answer.status_code == 401


async def test_the_servers_own_requests_need_a_key_that_is_still_valid(tmp_path: Path) -> None:
    sections = {"server": {"api_key": KEY}, "storage": {"path": tmp_path}}
    backend = FakeBackend()
    app = create_app(make_settings(**sections), backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post("/v1/chat/completions", json=chat(), headers=BEARER)
    owner = backend.requests[0].context.salt
    content = json.dumps(chat()).encode()
    for principal, status in ((Principal(owner), 200), (Principal(""), 401), (Principal("x"), 401)):
        caller, gone = Caller(app), asyncio.Event()
        answer = await caller.post("/v1/chat/completions", content, principal, gone)
        assert answer.status == status
