"""/v1/files as the official client uses it: upload, list, read, delete, expire, run out of room."""

import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.servers.files import expiry, store
from tests.support.servers.live_server import LiveServer, live_server, wait_until

MEGABYTE = 2**20
HTTP = httpx.Client(timeout=60)  # one for all: a client is slow to make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(storage={"path": tmp_path, "max_size_mb": 2}) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    base = f"{server.url}/v1"
    return openai.OpenAI(base_url=base, api_key="unused", max_retries=0, http_client=HTTP)


def upload(client: openai.OpenAI, content: bytes = b"{}\n", name: str = "in.jsonl", **more: Any):
    return client.files.create(file=(name, content), purpose="batch", **more)


def on_disk(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "files").iterdir())


def test_a_file_is_uploaded_and_downloaded(client: openai.OpenAI, tmp_path: Path) -> None:
    content = b'{"custom_id": "\xc3\xa9"}\n' * 50_000  # more than one piece each way
    file = upload(client, content, "résumé.jsonl")
    assert (file.object, file.purpose, file.bytes) == ("file", "batch", len(content))
    assert file.filename == "résumé.jsonl"
    assert file.status == "processed"
    assert file.expires_at == file.created_at + 30 * 86400
    assert client.files.retrieve(file.id) == file
    answer = client.files.content(file.id)
    assert answer.content == content
    assert answer.response.headers["x-content-type-options"] == "nosniff"
    assert on_disk(tmp_path) == [file.id]
    assert (tmp_path / "files" / file.id).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    assert client.files.delete(file.id).deleted
    assert on_disk(tmp_path) == []
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    ids = [upload(client).id for _ in range(5)]
    assert [each.id for each in client.files.list()] == ids[::-1]
    first = client.files.list(limit=2, order="asc")
    assert [each.id for each in first.data] == ids[:2]
    assert first.has_more
    assert [each.id for each in first] == ids  # the client turns the pages
    assert [each.id for each in client.files.list(after=ids[2])] == ids[1::-1]
    assert list(client.files.list(purpose="batch_output")) == []
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"extra_query": {"x": "1"}}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**wrong)
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-unknown")


@pytest.mark.parametrize("purpose", ["assistants", "vision", "user_data", "evals"])
def test_unsupported_file_purposes_are_refused_by_name(client: openai.OpenAI, purpose: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=purpose) as caught:
        client.files.create(file=b"{}\n", purpose=purpose)
    assert caught.value.param == "purpose"


def test_files_expire_after_the_given_seconds(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    for wrong in (
        {"anchor": "created_at", "seconds": 3599},
        {"anchor": "last_active_at", "seconds": 3600},
        {"anchor": "created_at"},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            upload(client, expires_after=wrong)
        assert str(caught.value.param).startswith("expires_after.")
    later = expiry.unix_now() + 3600
    monkeypatch.setattr(store, "unix_now", lambda: later)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert list(client.files.list()) == []


def test_an_expiry_beyond_the_limit_is_lowered_with_a_warning(tmp_path: Path) -> None:
    with live_server(storage={"path": tmp_path, "file_ttl_s": 7200}) as server:
        form = {
            "purpose": "batch",
            "expires_after[anchor]": "created_at",
            "expires_after[seconds]": "86400",
        }
        answer = HTTP.post(f"{server.url}/v1/files", data=form, files={"file": b"{}"})
        body = answer.json()
        assert body["expires_at"] == body["created_at"] + 7200
        assert "expires_after" in answer.headers["x-engine-warnings"]


def test_the_sweep_removes_expired_and_orphaned_files(tmp_path: Path) -> None:
    with live_server(storage={"path": tmp_path}) as server:
        url = f"{server.url}/v1/files"
        send = {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
        old, young = (HTTP.post(url, **send).json()["id"] for _ in range(2))
    with sqlite3.connect(tmp_path / "batches.db") as connection:
        connection.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (old,))
    orphan, arriving = tmp_path / "files" / "file-0", tmp_path / "files" / "file-1.part"
    for path in (orphan, arriving):
        path.touch()
    os.utime(orphan, (1, 1))
    with live_server(storage={"path": tmp_path}):
        wait_until(lambda: on_disk(tmp_path) == sorted([young, arriving.name]))


def test_a_full_storage_refuses_uploads_and_keeps_nothing(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    kept = upload(client, b"x" * MEGABYTE)
    with pytest.raises(openai.APIStatusError, match=r"storage.max_size_mb") as caught:
        upload(client, b"x" * (MEGABYTE + 1))
    assert caught.value.status_code == 507
    assert caught.value.code == "STORAGE_FULL"
    assert on_disk(tmp_path) == [kept.id]
    client.files.delete(kept.id)
    upload(client, b"x" * (MEGABYTE + 1))


def test_small_files_are_charged_a_minimum_size(client: openai.OpenAI) -> None:
    upload(client, b"x" * (2 * MEGABYTE - 2 * store.MIN_CHARGE_BYTES))
    upload(client)
    upload(client)
    with pytest.raises(openai.APIStatusError, match="full"):
        upload(client)


def test_a_full_disk_is_507_and_leaves_nothing(client: openai.OpenAI, tmp_path: Path) -> None:
    upload(client)  # the database has its size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, hard))
    try:
        with pytest.raises(openai.APIStatusError, match="disk is full") as caught:
            upload(client, b"x" * (MEGABYTE + MEGABYTE // 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.status_code == 507
    assert str(tmp_path) not in str(caught.value.body)
    assert len(on_disk(tmp_path)) == 1
    assert upload(client, b"x" * MEGABYTE).bytes == MEGABYTE


def test_a_failing_database_leaves_no_file(
    client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    upload(client)
    monkeypatch.setattr(store.FILES, "insert", fail)
    with pytest.raises(openai.InternalServerError) as caught:
        upload(client)
    assert caught.value.status_code == 503
    assert len(on_disk(tmp_path)) == 1


def test_a_server_without_stored_objects_writes_nothing(tmp_path: Path) -> None:
    with live_server(storage={"path": tmp_path / "none"}):
        pass
    assert list(tmp_path.iterdir()) == []
