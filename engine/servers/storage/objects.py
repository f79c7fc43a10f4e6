"""Stores what tenants keep on the server: responses, conversations and chat completions.

Each object is a row of one table, whose id says by its prefix what it is. Only the tenant who made
an object can see it. An object expires some time after its last use. If there are too many objects
or bytes, the least recently used objects of the tenant who adds one are deleted, and never those of
another tenant. No tenant takes all of the room.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence

from engine.core.config_storage import StorageSettings
from engine.core.errors import ResourceError
from engine.core.forecast import may_take
from engine.servers.storage.database import Database
from engine.servers.storage.tables import Db, Store, transaction

FILE_NAME = "responses.db"

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
CREATE INDEX IF NOT EXISTS responses_of_owner ON responses (owner, kept_until, num_bytes);
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


class ObjectStore(Store):
    """The table of objects. Its methods that take a connection are called in a transaction."""

    def __init__(self, settings: StorageSettings, now: Callable[[], float] = time.time) -> None:
        super().__init__(Database(settings.directory / FILE_NAME, _SCHEMA))
        self.now = now
        self._ttl_s = settings.response_ttl_s
        self._max_objects = settings.max_responses
        self._max_bytes = settings.max_size_mb * 2**20

    @transaction
    def check(self, db: Db) -> None:
        """Check that the storage can be used. Raises `UnavailableError` if not."""

    def find(self, db: Db, object_id: str, owner: str, prefix: str) -> sqlite3.Row | None:
        """The object, if it is the owner's, has not expired, and is what `prefix` says."""
        found = db.execute(
            "SELECT * FROM responses WHERE id = ? AND owner = ? AND kept_until > ? AND id GLOB ?",
            (object_id, owner, self.now(), prefix + "*"),
        ).fetchone()
        assert found is None or isinstance(found, sqlite3.Row)
        return found

    def add(
        self,
        db: Db,
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
        db.execute("DELETE FROM responses WHERE kept_until <= ?", (self.now(),))
        self.keep(db, ancestors)  # so that they are not the first to make room
        self._make_room(db, owner, 1, num_bytes)
        row = (object_id, owner, previous_id, 0.0, num_bytes, input, body)
        db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self.keep(db, [*ancestors, object_id])

    def set_body(self, db: Db, object_id: str, body: bytes) -> None:
        """Replace the body of an object, if the object still exists."""
        sizes = db.execute(
            "SELECT owner, ? - length(body) AS more FROM responses WHERE id = ?",
            (len(body), object_id),
        ).fetchall()
        for each in sizes:
            self._make_room(db, each["owner"], 0, each["more"], object_id)
        db.execute(
            "UPDATE responses SET num_bytes = num_bytes + ? - length(body), body = ? WHERE id = ?",
            (len(body), body, object_id),
        )
        self.keep(db, [object_id])

    def grow(self, db: Db, object_id: str, num_bytes: int) -> None:
        """Count `num_bytes` more for an object, for its rows in other tables."""
        sizes = db.execute(
            "SELECT owner, num_bytes FROM responses WHERE id = ?", (object_id,)
        ).fetchall()
        for each in sizes:
            self._check_size(each["num_bytes"] + num_bytes)
            self._make_room(db, each["owner"], 0, num_bytes, object_id)
        db.execute(
            "UPDATE responses SET num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, object_id)
        )
        self.keep(db, [object_id])

    def keep(self, db: Db, object_ids: Iterable[str]) -> None:
        """Extend the expiry of objects that were used."""
        end = self.now() + self._ttl_s
        db.executemany(
            "UPDATE responses SET kept_until = ? WHERE id = ?", [(end, each) for each in object_ids]
        )

    def delete(self, db: Db, object_id: str) -> None:
        db.execute("DELETE FROM responses WHERE id = ?", (object_id,))

    def _check_size(self, num_bytes: int) -> None:
        """Raise if an object alone is larger than all objects may be."""
        if num_bytes > self._max_bytes:
            raise ResourceError(
                f"This has {num_bytes} bytes; in all, {self._max_bytes} are stored.", param="store"
            )

    def _make_room(
        self, db: Db, owner: str, num_objects: int, num_bytes: int, kept_id: str = ""
    ) -> None:
        """Delete the owner's least recently used objects, except `kept_id`, until there is room for
        this many more, or as many were deleted. Raises if that is not enough.
        """
        num_deleted = bytes_deleted = 0
        while not self._has_room(db, owner, num_objects, num_bytes, num_deleted, bytes_deleted):
            deleted = db.execute(
                "DELETE FROM responses WHERE rowid = (SELECT rowid FROM responses"
                " WHERE owner = ? AND id != ? ORDER BY kept_until, rowid LIMIT 1)"
                " RETURNING num_bytes",
                (owner, kept_id),
            ).fetchall()
            if not deleted:
                raise ResourceError(
                    f"The server's storage for responses and conversations is full: it keeps"
                    f" {self._max_objects} of them (storage.max_responses), and"
                    f" {self._max_bytes // 2**20} MiB (storage.max_size_mb), for all tenants"
                    " together. Send store: false, or delete some of yours.",
                    param="store",
                )
            num_deleted += 1
            bytes_deleted += deleted[0]["num_bytes"]

    def _has_room(
        self,
        db: Db,
        owner: str,
        num_objects: int,
        num_bytes: int,
        num_deleted: int,
        bytes_deleted: int,
    ) -> bool:
        total = db.execute("SELECT num_responses, num_bytes FROM totals").fetchone()
        own = db.execute(
            "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM responses WHERE owner = ?", (owner,)
        ).fetchone()
        needs = (
            (own[0], total["num_responses"], self._max_objects, num_objects, num_deleted),
            (own[1], total["num_bytes"], self._max_bytes, num_bytes, bytes_deleted),
        )
        # What a tenant has, it may have for ever: it replaces that by as much, even if others
        # have come meanwhile, and it could not grow.
        return all(
            count <= 0
            or may_take(owner, held, taken, most, count)
            or (freed >= count and taken + count <= most)
            for held, taken, most, count, freed in needs
        )
