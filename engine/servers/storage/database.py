"""Asynchronous access to a SQLite file, with one connection in one thread.

The file is created on first use, so a server that stores nothing does not create it. Every call of
`run` is one atomic transaction. A corrupt file is renamed, so that it can be inspected, and a new
file is created. The stored data are lost then, but the server keeps running. If the file was
deleted or replaced while it was open, it is opened again. Otherwise writes would go to the old file
and be lost at the next start.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.core.errors import UnavailableError, disk_full_error, is_disk_full

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0
DAMAGED_SUFFIX = ".damaged"
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Suffixes of the files that SQLite keeps beside the database.
_COMPANIONS = ("-wal", "-shm")
T = TypeVar("T")
Column = tuple[str, str, str]


class Database:
    """A SQLite file. `schema` is SQL that creates the tables. It runs whenever the file is opened,
    so it must use `IF NOT EXISTS`. `added` has the columns that files of earlier versions lack,
    each as (table, name, declaration).
    """

    def __init__(self, path: Path, schema: str, added: Sequence[Column] = ()) -> None:
        self.path = path
        self._schema = schema
        self._added = added
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # (device, inode) of the open file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction. Raises `ResourceError` if the disk is full, and
        `UnavailableError` on another error of it.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, work)

    async def start(self) -> None:
        """Does nothing, because the file is opened on first use."""

    async def stop(self) -> None:
        """Flush the data to disk and close the file. Idempotent. A later `run` opens the file
        again.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._close)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return self._transact(work)
        except (sqlite3.Error, OSError) as error:
            # The text of an `OSError` says enough. A SQL error may be our bug, so its traceback is
            # logged.
            is_sql = isinstance(error, sqlite3.Error)
            logger.error("the storage in %s failed: %r", self.path.parent, error, exc_info=is_sql)
            # After an error, the connection may be in any state. So the next call opens a new
            # connection.
            self._close()
            if _is_damage(error):
                self._set_aside()
            if is_disk_full(error) or _code(error) == sqlite3.SQLITE_FULL:
                raise disk_full_error() from error
            raise UnavailableError("The server's storage failed; its log says why.") from error

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is not None and self._identity != _identity(self.path):
            logger.error("the database %s is gone; a new one is begun", self.path)
            self._close()
        connection = self._connection = self._connection or self._connect()
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            return work(connection)

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
            self._set_aside()
            return self._open()

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.executescript(self._schema)
            self._add_columns(connection)
            self._identity = _identity(self.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _add_columns(self, connection: sqlite3.Connection) -> None:
        for table, name, declaration in self._added:
            known = {row["name"] for row in connection.execute(f"PRAGMA table_info({table})")}
            if name not in known:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {declaration}")

    def _set_aside(self) -> None:
        """Rename the corrupt file, overwriting a corrupt file that was renamed earlier."""
        aside = self.path.with_name(self.path.name + DAMAGED_SUFFIX)
        for companion in ("", *_COMPANIONS):
            damaged = self.path.with_name(self.path.name + companion)
            if damaged.exists():
                damaged.replace(aside.with_name(aside.name + companion))
        logger.error("the database %s is damaged; it is now %s", self.path, aside.name)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _identity(path: Path) -> tuple[int, int] | None:
    """(device, inode) of the file, which change if the file is replaced. None if there is no
    file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _is_damage(error: Exception) -> bool:
    return _code(error) in _DAMAGE


def _code(error: Exception) -> int | None:
    """SQLite's primary code of an error, which is the low byte of the extended one. None if the
    error is not SQLite's. Errors that Python's module raises itself have no code.
    """
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
