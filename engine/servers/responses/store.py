"""Stores responses, so that a request can continue one with `previous_response_id`, even after a
restart.

A stored object is one turn: its input, its response and the id of the previous turn. A turn expires
some time after it was made or last continued, so all turns of a conversation in use are kept.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from engine.core.errors import ConflictError, InvalidRequestError, NotFoundError
from engine.servers.storage.objects import ObjectStore
from engine.servers.storage.tables import Db, Store, transaction

PREFIX = "resp_"
UNFINISHED = ("queued", "in_progress")
MAX_TURNS = 1_024
MAX_CONVERSATION_BYTES = 32 * 2**20

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
    status: str = "completed"


class ResponseStore(Store):
    def __init__(self, objects: ObjectStore) -> None:
        super().__init__(objects.database)
        self._objects = objects

    async def check(self) -> None:
        """Check that the storage can be used. Raises `UnavailableError` if not."""
        await self._objects.check()

    @transaction
    def save(
        self,
        db: Db,
        body: dict[str, Any],
        owner: str,
        input: Sequence[Item],
        ancestors: Sequence[str],
        *,
        server: str | None = None,
    ) -> None:
        """Store a response. `ancestors` are the ids of the earlier turns, whose expiry is extended
        to that of this response. If the response is made in the background, `server` is the server
        that makes it.
        """
        self._objects.add(
            db,
            body["id"],
            owner,
            _encode(input),
            _encode(body),
            previous_id=body["previous_response_id"],
            ancestors=ancestors,
        )
        if server is not None:
            sql = "INSERT INTO background (id, server) VALUES (?, ?)"
            db.execute(sql, (body["id"], server))

    @transaction
    def finish(self, db: Db, body: dict[str, Any], events: bytes | None = None) -> None:
        """Replace a background response by its final state, unless it was deleted meanwhile."""
        self._objects.set_body(db, body["id"], _encode(body))
        if events is not None:
            sql = "UPDATE background SET events = ? WHERE id = ?"
            db.execute(sql, (events, body["id"]))
            self._objects.grow(db, body["id"], len(events))

    @transaction
    def events(self, db: Db, response_id: str, owner: str) -> bytes | None:
        """The compressed events of a background response. None if they are not stored."""
        self._find(db, response_id, owner)
        row = _background(db, response_id)
        return None if row is None else row["events"]

    @transaction
    def server_of(self, db: Db, response_id: str) -> str | None:
        """The server that makes a background response. None if there is no such response."""
        row = _background(db, response_id)
        return None if row is None else row["server"]

    @transaction
    def body(self, db: Db, response_id: str, owner: str) -> bytes:
        """The JSON bytes of a response, as it was sent to the client."""
        return bytes(self._find(db, response_id, owner)["body"])

    @transaction
    def input_items(self, db: Db, response_id: str, owner: str) -> list[Item]:
        """The input items of the request that made this response, without those of earlier
        turns.
        """
        return msgspec.json.decode(self._find(db, response_id, owner)["input"], type=list[Item])

    @transaction
    def delete(self, db: Db, response_id: str, owner: str) -> None:
        self._objects.delete(db, self._find(db, response_id, owner)["id"])

    @transaction
    def conversation(self, db: Db, response_id: str, owner: str) -> list[Turn]:
        """The turn `response_id` and all earlier turns of its conversation, oldest first."""
        turns: list[Turn] = []
        num_bytes = 0
        next_id: str | None = response_id
        while next_id is not None:
            row = self._objects.find(db, next_id, owner, PREFIX)
            if row is None:
                raise _broken_conversation(response_id, next_id)
            num_bytes += row["num_bytes"]
            _check_size(len(turns) + 1, num_bytes, "previous_response_id")
            turns.append(_turn(row))
            next_id = row["previous_id"]
        return turns[::-1]

    @transaction
    def turns(self, db: Db, ids: Iterable[str], owner: str) -> dict[str, Turn]:
        """Maps each of `ids` to its turn. Ids that don't exist are left out."""
        found: dict[str, Turn] = {}
        num_bytes = 0
        for each in ids:
            row = self._objects.find(db, each, owner, PREFIX)
            if row is not None:
                num_bytes += row["num_bytes"]
                _check_size(len(found) + 1, num_bytes, "input")
                found[each] = _turn(row)
        return found

    def _find(self, db: Db, response_id: str, owner: str) -> sqlite3.Row:
        row = self._objects.find(db, response_id, owner, PREFIX)
        if row is None:
            raise NotFoundError(
                f"Response with id {response_id[:64]!r} not found. It was never stored, has expired"
                " or was deleted.",
                param="response_id",
                code="response_not_found",
            )
        return row


def _background(db: Db, response_id: str) -> Any:
    """How a response is made in the background. None if it is not."""
    return db.execute("SELECT * FROM background WHERE id = ?", (response_id,)).fetchone()


def _turn(row: sqlite3.Row) -> Turn:
    made = msgspec.json.decode(row["body"], type=_Output)
    if made.status in UNFINISHED:
        raise ConflictError(
            f"{row['id']!r} is {made.status}; it can be continued when it has ended.",
            param="previous_response_id",
        )
    return Turn(
        id=row["id"],
        previous_id=row["previous_id"],
        input=msgspec.json.decode(row["input"], type=list[Item]),
        output=made.output,
    )


def _check_size(num_turns: int, num_bytes: int, param: str) -> None:
    """Raise if a conversation has too many turns or bytes. Without this limit, a short request
    could make the server read any amount of data.
    """
    if num_turns > MAX_TURNS or num_bytes > MAX_CONVERSATION_BYTES:
        raise too_long(MAX_TURNS, "turns", param)


def too_long(max_parts: int, parts: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The conversation is longer than {max_parts} {parts} or {MAX_CONVERSATION_BYTES} bytes."
        " Begin a new one, with what matters of this one as input.",
        param=param,
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
