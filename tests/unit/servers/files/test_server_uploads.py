"""/v1/uploads as the official client uses it: a file in parts becomes a file of /v1/files."""

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.servers.files import uploads
from tests.support.servers.live_server import LiveServer, live_server, wait_until

MEGABYTE = 2**20
CONTENT = b'{"custom_id": "a"}\n' * 100
HTTP = httpx.Client(timeout=60)  # one for all: a client is slow to make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(storage={"path": tmp_path, "max_size_mb": 2}) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    base = f"{server.url}/v1"
    return openai.OpenAI(base_url=base, api_key="unused", max_retries=0, http_client=HTTP)


def begin(client: openai.OpenAI, num_bytes: int = len(CONTENT), **more: Any) -> str:
    given: Any = {"filename": "in.jsonl", "mime_type": "text/jsonl", "purpose": "batch"} | more
    return client.uploads.create(bytes=num_bytes, **given).id


def send(client: openai.OpenAI, upload_id: str, data: bytes = CONTENT) -> str:
    return client.uploads.parts.create(upload_id, data=data).id


def on_disk(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "files").iterdir())


def test_uploaded_parts_become_one_file(client: openai.OpenAI, tmp_path: Path) -> None:
    digest = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    upload = client.uploads.upload_file_chunked(
        file=CONTENT,
        filename="a/in.jsonl",
        bytes=len(CONTENT),
        mime_type="text/jsonl",
        purpose="batch",
        part_size=300,
        md5=digest.upper(),
    )
    assert (upload.object, upload.status, upload.bytes) == ("upload", "completed", len(CONTENT))
    assert upload.expires_at == upload.created_at + 3600
    file = upload.file
    assert file is not None
    assert (file.filename, file.purpose, file.bytes) == ("in.jsonl", "batch", len(CONTENT))
    assert client.files.content(file.id).content == CONTENT
    assert on_disk(tmp_path) == [file.id]
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert batch.input_file_id == file.id


def test_parts_are_joined_in_the_clients_order_and_unlisted_ones_dropped(
    client: openai.OpenAI,
) -> None:
    upload_id = begin(client, 6)
    last, lost, first = (send(client, upload_id, each) for each in (b"def", b"xxx", b"abc"))
    assert list(client.files.list()) == []  # a part is no file yet
    with pytest.raises(openai.NotFoundError):
        client.files.content(lost)
    file = client.uploads.complete(upload_id, part_ids=[first, last]).file
    assert file is not None
    assert client.files.content(file.id).content == b"abcdef"


def test_a_failed_completion_leaves_the_upload_pending(client: openai.OpenAI) -> None:
    upload_id, other_id = begin(client), begin(client)
    part, other = send(client, upload_id), send(client, other_id)
    half = send(client, upload_id, CONTENT[:-1])
    for ids, md5, said in (
        ([other], None, "different parts of this upload"),
        ([part, part], None, "different parts of this upload"),
        ([half], None, "1899 bytes in all"),
        ([part], "0" * 32, "md5: should be"),
        ([part], "0", "md5"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.uploads.complete(upload_id, part_ids=ids, md5=md5 or openai.omit)
    with pytest.raises(openai.BadRequestError, match="no data"):
        send(client, upload_id, b"")
    assert client.uploads.complete(upload_id, part_ids=[part]).status == "completed"
    for call in (
        lambda: client.uploads.complete(upload_id, part_ids=[part]),
        lambda: client.uploads.cancel(upload_id),
        lambda: send(client, upload_id),
    ):
        with pytest.raises(openai.ConflictError, match="is completed"):
            call()


def test_a_cancelled_upload_keeps_nothing(client: openai.OpenAI, tmp_path: Path) -> None:
    upload_id = begin(client)
    part = send(client, upload_id)
    assert on_disk(tmp_path) == [part]
    assert client.uploads.cancel(upload_id).status == "cancelled"
    assert on_disk(tmp_path) == []
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        send(client, upload_id)
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_unknown")


def test_parts_count_once_towards_the_storage_limit(client: openai.OpenAI) -> None:
    num_bytes = 3 * MEGABYTE // 2
    upload_id = begin(client, num_bytes)
    part = send(client, upload_id, b"x" * num_bytes)
    with pytest.raises(openai.APIStatusError, match=r"storage.max_size_mb"):
        send(client, upload_id, b"x" * MEGABYTE)
    # The final file and its part don't fit together, and need not.
    assert client.uploads.complete(upload_id, part_ids=[part]).status == "completed"
    with pytest.raises(openai.APIStatusError, match=r"storage.max_size_mb"):
        client.files.create(file=b"x" * MEGABYTE, purpose="batch")


def test_uploads_parts_and_part_sizes_are_limited(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_OPEN_UPLOADS", 2)
    monkeypatch.setattr(uploads, "MAX_PARTS", 2)
    monkeypatch.setattr(uploads, "MAX_PART_BYTES", 10)
    upload_id, _ = begin(client), begin(client)
    with pytest.raises(openai.RateLimitError, match="2 of your uploads are not complete"):
        begin(client)
    for _ in range(2):
        send(client, upload_id, b"x")
    with pytest.raises(openai.BadRequestError, match="at most 2 parts"):
        send(client, upload_id, b"x")
    with pytest.raises(openai.APIStatusError, match="data may have at most") as caught:
        send(client, upload_id, b"x" * 11)
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        begin(client, purpose="assistants")
    client.uploads.cancel(upload_id)
    begin(client)


def test_an_upload_survives_a_restart_and_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client_of(server: LiveServer) -> openai.OpenAI:
        base = f"{server.url}/v1"
        return openai.OpenAI(base_url=base, api_key="unused", max_retries=0, http_client=HTTP)

    with live_server(storage={"path": tmp_path}) as server:
        upload_id, left = begin(client_of(server)), begin(client_of(server))
        part = send(client_of(server), upload_id)
        send(client_of(server), left)
    with live_server(storage={"path": tmp_path}) as server:
        done = client_of(server).uploads.complete(upload_id, part_ids=[part])
        assert done.file is not None
    with sqlite3.connect(tmp_path / "batches.db") as connection:
        connection.execute("UPDATE uploads SET expires_at = 1")
        connection.execute("UPDATE files SET expires_at = 1 WHERE purpose = 'upload_part'")
    with live_server(storage={"path": tmp_path}) as server:
        with pytest.raises(openai.ConflictError, match="is expired"):
            client_of(server).uploads.cancel(left)
        wait_until(lambda: on_disk(tmp_path) == [done.file.id])
