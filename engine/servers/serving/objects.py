"""Stores what tenants keep on the server: responses, conversations and chat completions.

Each object is a row of one table, whose id says by its prefix what it is. Only the tenant who made
an object can see it. An object expires some time after its last use. If there are too many objects
or bytes, the least recently used objects are deleted.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from engine.core.config_storage import StorageSettings
from engine.core.errors import ResourceError
from engine.servers.serving.storage import Database

FILE_NAME = "responses.db"
T = TypeVar("T")

# All objects are in the table `responses`. `input` is what the client sent, `body` is the answer.
# `previous_id` is the response that a response continues.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous_id TEXT,
    kept_until REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_end ON responses (kept_until);
CREATE TABLE IF NOT EXISTS totals (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    num_responses INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0);
CREATE TRIGGER IF NOT EXISTS count_added AFTER INSERT ON responses BEGIN
    UPDATE totals SET num_responses = num_responses + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS count_changed AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE totals SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS count_removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET num_responses = num_responses - 1, num_bytes = num_bytes - OLD.num_bytes;
END;
CREATE TABLE IF NOT EXISTS background (
    id TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE,
    server TEXT NOT NULL,
    events BLOB
);
CREATE TABLE IF NOT EXISTS conversation_items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (conversation_id, id)
);
CREATE TABLE IF NOT EXISTS chat_completions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE REFERENCES responses (id) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    metadata TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS chat_completions_of_owner ON chat_completions (owner, seq);
"""


class ObjectStore:
    """The table of objects. Its methods that take a connection are called in a transaction, that
    is, in a function that `run` runs.
    """

    def __init__(self, settings: StorageSettings, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self._database = Database(settings.directory / FILE_NAME, _SCHEMA)
        self._ttl_s = settings.response_ttl_s
        self._max_objects = settings.max_responses
        self._max_bytes = settings.max_size_mb * 2**20

    async def start(self) -> None:
        """Does nothing, because the database file is opened on first use."""

    async def stop(self) -> None:
        await self._database.close()

    async def check(self) -> None:
        """Check that the storage can be used. Raises `UnavailableError` if not."""
        await self._database.run(lambda connection: None)

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.run(work)

    def find(
        self, connection: sqlite3.Connection, object_id: str, owner: str
    ) -> sqlite3.Row | None:
        found = connection.execute(
            "SELECT * FROM responses WHERE id = ? AND owner = ? AND kept_until > ?",
            (object_id, owner, self.now()),
        ).fetchone()
        assert found is None or isinstance(found, sqlite3.Row)
        return found

    def add(
        self,
        connection: sqlite3.Connection,
        object_id: str,
        owner: str,
        input: bytes,
        body: bytes,
        *,
        previous_id: str | None = None,
        ancestors: Sequence[str] = (),
    ) -> None:
        """Add an object. The expiry of its `ancestors` is extended to that of this object."""
        num_bytes = len(input) + len(body)
        self._check_size(num_bytes)
        connection.execute("DELETE FROM responses WHERE kept_until <= ?", (self.now(),))
        row = (object_id, owner, previous_id, 0.0, num_bytes, input, body)
        connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self.keep(connection, [*ancestors, object_id])

    def set_body(self, connection: sqlite3.Connection, object_id: str, body: bytes) -> None:
        """Replace the body of an object, if the object still exists."""
        connection.execute(
            "UPDATE responses SET num_bytes = num_bytes + ? - length(body), body = ? WHERE id = ?",
            (len(body), body, object_id),
        )
        self.keep(connection, [object_id])

    def grow(self, connection: sqlite3.Connection, object_id: str, num_bytes: int) -> None:
        """Count `num_bytes` more for an object, for its rows in other tables."""
        sizes = connection.execute(
            "UPDATE responses SET num_bytes = num_bytes + ? WHERE id = ? RETURNING num_bytes",
            (num_bytes, object_id),
        ).fetchall()
        self._check_size(*(size["num_bytes"] for size in sizes))
        self.keep(connection, [object_id])

    def keep(self, connection: sqlite3.Connection, object_ids: Iterable[str]) -> None:
        """Extend the expiry of objects that were used, and make room if necessary."""
        end = self.now() + self._ttl_s
        connection.executemany(
            "UPDATE responses SET kept_until = ? WHERE id = ?", [(end, each) for each in object_ids]
        )
        self._make_room(connection)

    def delete(self, connection: sqlite3.Connection, object_id: str) -> None:
        connection.execute("DELETE FROM responses WHERE id = ?", (object_id,))

    def _check_size(self, *sizes: int) -> None:
        """Raise if an object alone is larger than all objects may be."""
        for num_bytes in sizes:
            if num_bytes > self._max_bytes:
                raise ResourceError(
                    f"This has {num_bytes} bytes; in all, {self._max_bytes} are stored.",
                    param="store",
                )

    def _make_room(self, connection: sqlite3.Connection) -> None:
        while True:
            total = connection.execute("SELECT num_responses, num_bytes FROM totals").fetchone()
            is_within_number = total["num_responses"] <= self._max_objects
            if is_within_number and total["num_bytes"] <= self._max_bytes:
                return
            connection.execute(
                "DELETE FROM responses WHERE rowid ="
                " (SELECT rowid FROM responses ORDER BY kept_until, rowid LIMIT 1)"
            )
