"""Stores responses, so that a request can continue one with `previous_response_id`, even after a
restart.

A table row is one turn: its input, its response and the id of the previous turn. Only the tenant
who made a turn can see it. A turn expires some time after it was made or last continued, so all
turns of a conversation in use are kept. If there are too many turns or bytes, the least recently
used turns are deleted.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from engine.core.config_schema import StorageSettings
from engine.core.errors import InvalidRequestError, NotFoundError, ResourceError
from engine.servers.serving.storage import Database

FILE_NAME = "responses.db"
MAX_TURNS = 1_024
MAX_CONVERSATION_BYTES = 32 * 2**20

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
CREATE TRIGGER IF NOT EXISTS count_removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET num_responses = num_responses - 1, num_bytes = num_bytes - OLD.num_bytes;
END;
"""

_encode = msgspec.json.Encoder().encode
Item = dict[str, Any]


class Turn(msgspec.Struct, frozen=True):
    """One stored response with the input items of its request."""

    id: str
    previous_id: str | None
    input: list[Item]
    output: list[Item]

    @property
    def items(self) -> list[Item]:
        return self.input + self.output


class _Output(msgspec.Struct):
    """The part of a stored response that a conversation needs."""

    output: list[Item]


class ResponseStore:
    def __init__(self, settings: StorageSettings, now: Callable[[], float] = time.time) -> None:
        self._database = Database(settings.directory / FILE_NAME, _SCHEMA)
        self._ttl_s = settings.response_ttl_s
        self._max_responses = settings.max_responses
        self._max_bytes = settings.max_size_mb * 2**20
        self._now = now

    async def start(self) -> None:
        """Does nothing, because the database file is opened on first use."""

    async def stop(self) -> None:
        await self._database.close()

    async def check(self) -> None:
        """Check that the storage can be used. Raises `UnavailableError` if not."""
        await self._database.run(lambda connection: None)

    async def save(
        self, body: dict[str, Any], owner: str, input: Sequence[Item], ancestors: Sequence[str]
    ) -> None:
        """Store a finished response. `ancestors` are the ids of the earlier turns, whose expiry is
        extended to that of this response.
        """
        end = self._now() + self._ttl_s

        def work(connection: sqlite3.Connection) -> None:
            raw = (_encode(input), _encode(body))
            num_bytes = sum(len(each) for each in raw)
            if num_bytes > self._max_bytes:
                raise ResourceError(
                    f"The response has {num_bytes} bytes; in all, {self._max_bytes} are stored.",
                    param="store",
                )
            row = (body["id"], owner, body["previous_response_id"], end, num_bytes, *raw)
            connection.execute("DELETE FROM responses WHERE kept_until <= ?", (self._now(),))
            connection.executemany(
                "UPDATE responses SET kept_until = ? WHERE id = ?",
                [(end, each) for each in ancestors],
            )
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._make_room(connection)

        await self._database.run(work)

    async def body(self, response_id: str, owner: str) -> bytes:
        """The JSON bytes of a response, as it was sent to the client."""
        return bytes((await self._row(response_id, owner))["body"])

    async def input_items(self, response_id: str, owner: str) -> list[Item]:
        """The input items of the request that made this response, without those of earlier
        turns.
        """
        row = await self._row(response_id, owner)
        return await asyncio.to_thread(msgspec.json.decode, row["input"], type=list[Item])

    async def delete(self, response_id: str, owner: str) -> None:
        def work(connection: sqlite3.Connection) -> None:
            if self._find(connection, response_id, owner) is None:
                raise _not_found(response_id)
            connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))

        await self._database.run(work)

    async def conversation(self, response_id: str, owner: str) -> list[Turn]:
        """The turn `response_id` and all earlier turns of its conversation, oldest first."""

        def work(connection: sqlite3.Connection) -> list[Turn]:
            turns: list[Turn] = []
            num_bytes = 0
            next_id: str | None = response_id
            while next_id is not None:
                row = self._find(connection, next_id, owner)
                if row is None:
                    raise _broken_conversation(response_id, next_id)
                num_bytes += row["num_bytes"]
                _check_size(len(turns) + 1, num_bytes, "previous_response_id")
                turns.append(_turn(row))
                next_id = row["previous_id"]
            return turns[::-1]

        return await self._database.run(work)

    async def turns(self, ids: Iterable[str], owner: str) -> dict[str, Turn]:
        """Maps each of `ids` to its turn. Ids that don't exist are left out."""

        def work(connection: sqlite3.Connection) -> dict[str, Turn]:
            found: dict[str, Turn] = {}
            num_bytes = 0
            for each in ids:
                row = self._find(connection, each, owner)
                if row is not None:
                    num_bytes += row["num_bytes"]
                    _check_size(len(found) + 1, num_bytes, "input")
                    found[each] = _turn(row)
            return found

        return await self._database.run(work)

    async def _row(self, response_id: str, owner: str) -> sqlite3.Row:
        row = await self._database.run(
            lambda connection: self._find(connection, response_id, owner)
        )
        if row is None:
            raise _not_found(response_id)
        return row

    def _find(
        self, connection: sqlite3.Connection, response_id: str, owner: str
    ) -> sqlite3.Row | None:
        found = connection.execute(
            "SELECT * FROM responses WHERE id = ? AND owner = ? AND kept_until > ?",
            (response_id, owner, self._now()),
        ).fetchone()
        assert found is None or isinstance(found, sqlite3.Row)
        return found

    def _make_room(self, connection: sqlite3.Connection) -> None:
        while True:
            total = connection.execute("SELECT num_responses, num_bytes FROM totals").fetchone()
            is_within_number = total["num_responses"] <= self._max_responses
            if is_within_number and total["num_bytes"] <= self._max_bytes:
                return
            connection.execute(
                "DELETE FROM responses WHERE rowid ="
                " (SELECT rowid FROM responses ORDER BY kept_until, rowid LIMIT 1)"
            )


def _turn(row: sqlite3.Row) -> Turn:
    return Turn(
        id=row["id"],
        previous_id=row["previous_id"],
        input=msgspec.json.decode(row["input"], type=list[Item]),
        output=msgspec.json.decode(row["body"], type=_Output).output,
    )


def _check_size(num_turns: int, num_bytes: int, param: str) -> None:
    """Raise if a conversation has too many turns or bytes. Without this limit, a short request
    could make the server read any amount of data.
    """
    if num_turns > MAX_TURNS or num_bytes > MAX_CONVERSATION_BYTES:
        raise InvalidRequestError(
            f"The conversation is longer than {MAX_TURNS} turns or {MAX_CONVERSATION_BYTES} bytes."
            " Begin a new one, with what matters of this one as input.",
            param=param,
        )


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"There is no response {response_id[:64]!r}: it was never stored, has expired or was"
        " deleted.",
        param="response_id",
        code="response_not_found",
    )


def _broken_conversation(asked: str, missing: str) -> NotFoundError:
    what = f"There is no response {asked[:64]!r}"
    if missing != asked:
        what = f"{asked[:64]!r} can't be continued: {missing[:64]!r}, earlier in it, is gone"
    return NotFoundError(
        f"{what}; it was never stored, has expired or was deleted. Send the conversation as input.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
