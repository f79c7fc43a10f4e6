"""The database under everything that outlives a request."""

import logging
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.core.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from engine.servers.files import store as file_store
from engine.servers.files.store import FileStore, StorageFullError, hold_file
from engine.servers.storage.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS notes (text TEXT NOT NULL)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage" / "notes.db"


@pytest.fixture
async def database(path: Path) -> AsyncIterator[Database]:
    made = Database(path, SCHEMA)
    yield made
    await made.stop()


def add(text: str | None, connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO notes VALUES (?)", (text,))


def read(connection: sqlite3.Connection) -> list[str]:
    return [row["text"] for row in connection.execute("SELECT text FROM notes")]


async def test_the_database_is_created_privately_at_the_first_write(
    database: Database, path: Path
) -> None:
    assert not path.parent.exists()
    await database.run(lambda connection: add("one", connection))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_the_database_survives_a_restart(database: Database, path: Path) -> None:
    await database.run(lambda connection: add("one", connection))
    await database.stop()
    later = Database(path, SCHEMA)
    assert await later.run(read) == ["one"]
    await later.stop()
    assert not list(path.parent.glob("*-wal"))  # closed in order, not recovered from a log


@pytest.mark.parametrize("error", [InvalidRequestError("no"), sqlite3.OperationalError("disk")])
async def test_database_transactions_are_atomic(database: Database, error: Exception) -> None:
    def work(connection: sqlite3.Connection) -> None:
        add("half", connection)
        raise error

    with pytest.raises((InvalidRequestError, UnavailableError)):
        await database.run(work)
    assert await database.run(read) == []


async def test_two_servers_can_share_a_database_file(database: Database, path: Path) -> None:
    other = Database(path, SCHEMA)
    await other.run(lambda connection: add("theirs", connection))
    await database.run(lambda connection: add("ours", connection))
    assert await other.run(read) == ["theirs", "ours"]
    await other.stop()


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" * 400])
async def test_a_damaged_database_is_moved_aside(
    database: Database, path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        assert await database.run(read) == []
    assert "is damaged" in caplog.text
    aside = path.with_name("notes.db.damaged")
    assert aside.read_bytes() == content
    await database.run(lambda connection: add("new", connection))
    assert await database.run(read) == ["new"]


async def test_a_database_found_damaged_while_running_is_replaced(
    database: Database, path: Path
) -> None:
    await database.run(lambda connection: add("x" * 100_000, connection))
    await database.stop()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    again = Database(path, SCHEMA)
    with pytest.raises(UnavailableError):
        await again.run(read)
    assert await again.run(read) == []
    assert path.with_name("notes.db.damaged").exists()
    await again.stop()


async def test_a_failing_disk_is_503_and_may_recover(
    database: Database, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.parent.joinpath("storage").write_text("a file where the directory should be")
    with pytest.raises(UnavailableError) as raised:
        await database.run(read)
    assert str(path) not in raised.value.message
    (record,) = caplog.records  # one line: every request would repeat a traceback
    assert "NotADirectoryError" in record.message or "FileExistsError" in record.message
    assert not record.exc_info
    path.parent.unlink()
    assert await database.run(read) == []


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_removed_database_file_is_recreated(
    database: Database, path: Path, is_replaced: bool
) -> None:
    await database.run(lambda connection: add("lost", connection))
    path.parent.rename(path.parent.with_name("elsewhere"))
    if is_replaced:
        other = Database(path, SCHEMA)
        await other.run(lambda connection: add("another's", connection))
        await other.stop()
    await database.run(lambda connection: add("kept", connection))
    await database.stop()
    again = Database(path, SCHEMA)
    assert await again.run(read) == (["another's"] if is_replaced else []) + ["kept"]
    await again.stop()


async def test_concurrent_uploads_share_the_storage_limit(tmp_path: Path) -> None:
    database = Database(tmp_path / "files.db", file_store.SCHEMA)
    files = FileStore(tmp_path, database, max_bytes=1000)
    async with files.upload("") as one, files.upload("") as two:
        await one.write(b"x" * 600)
        with pytest.raises(StorageFullError):
            await two.write(b"x" * 600)
        await two.write(b"x" * 400)
    assert not files.num_arriving
    await database.stop()


async def test_a_file_in_use_by_a_batch_cannot_be_deleted(tmp_path: Path) -> None:
    database = Database(tmp_path / "files.db", file_store.SCHEMA)
    files = FileStore(tmp_path, database, max_bytes=2**20)
    async with files.upload("alice") as upload:
        await upload.write(b"{}")
        file = await upload.keep("batch", "in.jsonl", 2**40)
    await database.run(lambda db: hold_file(db, file.id, 1))
    with pytest.raises(ConflictError):
        await files.delete("alice", file.id)
    with pytest.raises(NotFoundError):
        await files.delete("bob", file.id)
    await database.run(lambda db: hold_file(db, file.id, -1))
    await files.delete("alice", file.id)
    assert not files.path_of(file.id).exists()
    await database.stop()
