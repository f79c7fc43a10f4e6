"""Stored files: bytes in a private directory, metadata in SQLite.

A file on disk is named by its id, which the server makes. Its database row is added when the bytes
are complete, and deleted before the bytes are deleted. So a file without a row was left by a killed
process, and `sweep` deletes it when it is old. Functions that take a database connection are for
callers that make more changes in the same transaction.
"""

import asyncio
import contextlib
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from engine.core.errors import ConflictError, InvalidRequestError, NotFoundError, ResourceError
from engine.core.forecast import may_take
from engine.servers.files.draft import Draft, storage_errors
from engine.servers.files.expiry import unix_now
from engine.servers.http.listing import Order
from engine.servers.storage.database import Database
from engine.servers.storage.tables import Db, Store, Table, transaction

# Min size at which a file counts towards the storage limit, because every file uses at least this
# much disk space.
MIN_CHARGE_BYTES = 4_096
# Files of each tenant, parts of uploads and results of batches included. The rows of all files are
# added up when one grows.
MAX_FILES = 10_000
# No upload takes this many seconds. So an older file without a database row is not an upload in
# progress.
ORPHAN_AGE_S = 3_600.0
# The purpose of a file that is one part of an upload in parts (see `uploads.py`).
PART = "upload_part"

# `is_ready` is 0 if the file is a part of an upload, or is only reserved for results of a batch
# that still runs. `num_holds` is the number of batches that read the file.
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    is_ready INTEGER NOT NULL,
    num_holds INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, seq);
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int

    def body(self) -> dict[str, Any]:
        """The file object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class StorageFullError(ResourceError):
    """The configured storage limit is reached. The disk itself may still have room."""

    code = "STORAGE_FULL"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


FILES = Table("files", StoredFile, noun="file", param="file_id", code="file_not_found")


def find_file(db: Db, owner: str, file_id: str) -> StoredFile:
    condition = "is_ready AND (expires_at > ? OR num_holds > 0)"
    return FILES.find(db, file_id, owner, condition, (unix_now(),))


def check_input(db: Db, owner: str, file_id: str, purpose: str, param: str) -> None:
    """Raise unless the owner has this file, for this purpose."""
    try:
        file = find_file(db, owner, file_id)
    except NotFoundError:
        raise InvalidRequestError(
            "There is no such file; upload it to /v1/files first.",
            param=param,
            code="file_not_found",
        ) from None
    if file.purpose != purpose:
        raise InvalidRequestError(
            f"The file's purpose is {file.purpose}; it must be {purpose}.", param=param
        )


def hold_file(db: Db, file_id: str, change: Literal[1, -1]) -> None:
    """Add `change` to the number of batches that read the file. A file that a batch reads is not
    deleted, even if it has expired.
    """
    db.execute("UPDATE files SET num_holds = num_holds + ? WHERE id = ?", (change, file_id))


def check_num_files(db: Db, owner: str, num_new: int) -> None:
    """Raise if the owner can't have this many files more."""
    num_files = FILES.count(db, owner)
    if num_files + num_new > MAX_FILES:
        raise StorageFullError(
            f"You have {num_files} files, with parts of uploads and results of batches; a tenant"
            f" may have {MAX_FILES}. Delete some.",
            param="file",
        )


class FileStore(Store):
    def __init__(self, directory: Path, database: Database, max_bytes: int) -> None:
        super().__init__(database)
        self._directory = directory
        self._max_bytes = max_bytes
        # Bytes of each owner's unfinished uploads, which have no row yet
        self.num_arriving: Counter[str] = Counter()

    def path_of(self, file_id: str) -> Path:
        """The path of a file on disk. `file_id` must come from `new_file_id`, never from a
        client.
        """
        return self._directory / file_id

    @asynccontextmanager
    async def upload(
        self, owner: str, file_id: str | None = None, num_freed: int = 0
    ) -> AsyncIterator["Upload"]:
        """Begin an upload. At the end of the block, the file is deleted unless `Upload.keep` was
        called. `num_freed` bytes of the owner's other files are deleted when the upload is kept, so
        they don't count.
        """
        used = await self.database.run(lambda db: _used(db, owner)) - num_freed
        file_id = file_id or new_file_id()
        async with Draft(self.path_of(file_id)) as draft:
            upload = Upload(self, owner, file_id, draft, used)
            try:
                yield upload
            finally:
                self.num_arriving[owner] -= draft.num_bytes
                if not self.num_arriving[owner]:
                    del self.num_arriving[owner]

    @transaction
    def find(self, db: Db, owner: str, file_id: str) -> StoredFile:
        return find_file(db, owner, file_id)

    async def open(self, owner: str, file_id: str) -> tuple[StoredFile, BinaryIO]:
        file = await self.find(owner, file_id)
        with storage_errors():
            try:
                return file, await asyncio.to_thread(open, self.path_of(file.id), "rb")
            except FileNotFoundError:
                raise NotFoundError("The file's content is gone.", param="file_id") from None

    @transaction
    def page(
        self, db: Db, owner: str, purpose: str | None, after: str | None, order: Order, limit: int
    ) -> list[StoredFile]:
        """A page of the owner's files: up to `limit` files that follow the file `after`. `order` is
        by creation time.
        """
        if after is not None:
            find_file(db, owner, after)
        condition = "is_ready AND expires_at > ? AND purpose = COALESCE(?, purpose)"
        values = (unix_now(), purpose)
        return FILES.page(db, owner, limit, condition, values, order=order, after=after)

    async def delete(self, owner: str, file_id: str) -> None:
        await self.remove(await self._delete_row(owner, file_id))

    @transaction
    def _delete_row(self, db: Db, owner: str, file_id: str) -> list[str]:
        deleted = FILES.delete(db, "id = ? AND num_holds = 0", (find_file(db, owner, file_id).id,))
        if not deleted:
            raise ConflictError(
                "A batch or a fine-tuning job reads this file; cancel it or wait for its end.",
                param="file_id",
            )
        return deleted

    async def sweep(self) -> None:
        """Delete expired files, and old files on disk that have no database row."""
        expired, known = await self._delete_expired()
        await self.remove(expired)
        await asyncio.to_thread(self._remove_orphans, known)

    @transaction
    def _delete_expired(self, db: Db) -> tuple[list[str], set[str]]:
        """Returns the ids of deleted files, and those of all others."""
        condition = "(is_ready OR purpose = ?) AND expires_at <= ? AND num_holds = 0"
        expired = FILES.delete(db, condition, (PART, unix_now()))
        return expired, {each["id"] for each in db.execute("SELECT id FROM files")}

    def grow(self, db: Db, file_id: str, num_bytes: int) -> None:
        """Count `num_bytes` more for a reserved file. Raises `StorageFullError` if the limit is
        exceeded.
        """
        found = db.execute("SELECT owner FROM files WHERE id = ?", (file_id,)).fetchone()
        owner = "" if found is None else found["owner"]
        self.check_room(owner, _used(db, owner), num_bytes)
        db.execute("UPDATE files SET num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, file_id))

    def check_room(self, owner: str, used: "Used", num_wanted: int) -> None:
        """Raise if there is no room for this many bytes more of the owner. Each tenant leaves room
        to others.
        """
        if not may_take(owner, used.own, used.all, self._max_bytes, num_wanted):
            raise StorageFullError(
                f"The server's storage for files is full: {self._max_bytes // 2**20} MiB in all,"
                f" of which your files have {used.own // 2**20}. Delete files, or raise"
                " storage.max_size_mb.",
                param="file",
            )

    async def remove(self, file_ids: Sequence[str]) -> None:
        """Delete the bytes of files whose database rows are gone."""

        def work() -> None:
            with storage_errors():
                for file_id in file_ids:
                    self.path_of(file_id).unlink(missing_ok=True)

        await asyncio.to_thread(work)

    def _remove_orphans(self, known: set[str]) -> None:
        oldest = unix_now() - ORPHAN_AGE_S
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                is_known = entry.name.removesuffix(".part") in known
                if not is_known and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)


class Upload:
    """A file that a client is uploading. Its bytes count towards the storage limit as soon as they
    arrive.
    """

    def __init__(
        self, store: FileStore, owner: str, file_id: str, draft: Draft, used: "Used"
    ) -> None:
        self._store = store
        self._owner = owner
        self._file_id = file_id
        self._draft = draft
        self._used = used

    async def write(self, data: bytes) -> None:
        arriving = self._store.num_arriving
        num_own, num_all = self._used.own + arriving[self._owner], self._used.all + arriving.total()
        self._store.check_room(self._owner, Used(num_own, num_all), len(data))
        arriving[self._owner] += len(data)
        await self._draft.write(data)

    @property
    def num_bytes(self) -> int:
        return self._draft.num_bytes

    async def keep(
        self,
        purpose: str,
        filename: str,
        expires_at: int,
        also: Callable[[sqlite3.Connection, StoredFile], None] | None = None,
        is_ready: bool = True,
    ) -> StoredFile:
        """Keep the file. `also` makes more changes in the transaction that adds its row. If not
        `is_ready`, the file is hidden from its owner.
        """
        owner = self._owner
        file = StoredFile(
            self._file_id, owner, purpose, filename, self.num_bytes, unix_now(), expires_at
        )

        def work(db: Db) -> None:
            check_num_files(db, owner, 1)
            FILES.insert(db, file, is_ready=is_ready)
            if also is not None:
                also(db, file)
            self._store.check_room(owner, _used(db, owner), 0)

        await self._draft.publish()
        await self._store.database.run(work)
        self._draft.keep()
        return file


class Used(NamedTuple):
    """Stored bytes: those of one owner, and those of all."""

    own: int
    all: int

    def __sub__(self, num_freed: int) -> "Used":
        return Used(self.own - num_freed, self.all - num_freed)


def _used(connection: sqlite3.Connection, owner: str) -> Used:
    row = connection.execute(
        "SELECT COALESCE(SUM(MAX(num_bytes, ?)) FILTER (WHERE owner = ?), 0),"
        " COALESCE(SUM(MAX(num_bytes, ?)), 0) FROM files",
        (MIN_CHARGE_BYTES, owner, MIN_CHARGE_BYTES),
    ).fetchone()
    return Used(int(row[0]), int(row[1]))
