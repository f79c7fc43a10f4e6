"""/v1/conversations: lists of items that responses continue and extend."""

import secrets
import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import NotFoundError
from engine.servers.access.auth import principal_of
from engine.servers.files.expiry import unix_now
from engine.servers.http.errors import describe, problem
from engine.servers.http.limits import read_parsed
from engine.servers.http.listing import Query, list_body, parse_query
from engine.servers.responses.items import ID_PREFIXES, MAX_ITEMS, Item, parse_items
from engine.servers.responses.schema import AlwaysThere, ItemsQuery
from engine.servers.responses.store import MAX_CONVERSATION_BYTES, too_long
from engine.servers.schema import fields
from engine.servers.schema.body import validated
from engine.servers.serving.services import Services, json_bytes, json_response
from engine.servers.storage.objects import ObjectStore
from engine.servers.storage.tables import Db, Store, page_of, transaction

PREFIX = "conv_"
MAX_ADDED = 20
_encode = msgspec.json.Encoder().encode
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


def _parse_added(value: Any) -> tuple[Item, ...]:
    if not isinstance(value, list) or len(value) > MAX_ADDED:
        rule = f"should be a list of at most {MAX_ADDED} items"
        raise problem("items", f"{rule}, got {describe(value)}")
    items = parse_items(value, "items")
    seen: set[str] = set()
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            raise problem(f"items[{index}].type", "should be an item itself, not a reference")
        if item.get("id") in seen:
            raise problem(f"items[{index}].id", "is the id of an earlier item")
        seen.add(item.get("id", ""))
    return items


AddedItems = Annotated[
    tuple[Item, ...],
    PlainValidator(_parse_added),
    WithJsonSchema({"type": "array", "maxItems": MAX_ADDED, "items": {"type": "object"}}),
]


class ConversationBody(BaseModel):
    model_config = _STRICT

    items: AddedItems | None = None
    metadata: fields.Metadata = {}


class ConversationUpdate(BaseModel):
    model_config = _STRICT

    metadata: fields.Metadata


class NewItemsBody(BaseModel):
    model_config = _STRICT

    items: AddedItems


class NewItemsQuery(Query):
    include: AlwaysThere | None = None


class ConversationStore(Store):
    def __init__(self, objects: ObjectStore) -> None:
        super().__init__(objects.database)
        self._objects = objects

    @transaction
    def create(self, db: Db, owner: str, items: Sequence[Item], metadata: dict[str, str]) -> bytes:
        conversation_id = PREFIX + secrets.token_hex(24)
        body = _encode(
            {
                "id": conversation_id,
                "object": "conversation",
                "created_at": unix_now(),
                "metadata": metadata,
            }
        )
        self._objects.add(db, conversation_id, owner, b"", body)
        self._append(db, conversation_id, items)
        return body

    @transaction
    def body(self, db: Db, conversation_id: str, owner: str) -> bytes:
        return bytes(self._find(db, conversation_id, owner)["body"])

    @transaction
    def update(self, db: Db, conversation_id: str, owner: str, metadata: dict[str, str]) -> bytes:
        row = self._find(db, conversation_id, owner)
        body = _encode(msgspec.json.decode(row["body"]) | {"metadata": metadata})
        self._objects.set_body(db, conversation_id, body)
        return body

    @transaction
    def delete(self, db: Db, conversation_id: str, owner: str) -> None:
        self._objects.delete(db, self._find(db, conversation_id, owner)["id"])

    @transaction
    def items(self, db: Db, conversation_id: str, owner: str) -> list[Item]:
        """All items, for a prompt. Raises if there are too many for one."""
        row = self._find(db, conversation_id, owner, "conversation")
        _check_size(db, row, "conversation")
        rows = db.execute(
            "SELECT body FROM conversation_items WHERE conversation_id = ? ORDER BY seq",
            (conversation_id,),
        )
        return [msgspec.json.decode(each["body"]) for each in rows]

    @transaction
    def add(
        self,
        db: Db,
        conversation_id: str,
        owner: str,
        items: Sequence[Item],
        *,
        is_answer: bool = False,
    ) -> list[Item]:
        """Append items. Items of an answer that are there already are left out, because the model
        has written the answer meanwhile. Other such items are refused.
        """
        param = "conversation" if is_answer else "conversation_id"
        self._find(db, conversation_id, owner, param)
        for index, item in enumerate([] if is_answer else items):
            if "id" in item and self._item(db, conversation_id, item["id"]) is not None:
                raise problem(f"items[{index}].id", "is the id of an item in the conversation")
        added = self._append(db, conversation_id, items)
        if not is_answer:
            _check_size(db, self._find(db, conversation_id, owner), "items")
        return added

    @transaction
    def page(self, db: Db, conversation_id: str, owner: str, query: ItemsQuery) -> list[Item]:
        """A page of the items, and one item more if there are more."""
        self._find(db, conversation_id, owner)
        after = None
        if query.after is not None:
            after = self._item(db, conversation_id, query.after)
            if after is None:
                raise problem("after", "is the id of none of these items")
        sql = "SELECT body FROM conversation_items WHERE conversation_id = ?"
        position = None if after is None else after["seq"]
        rows = page_of(db, sql, (conversation_id,), query.limit + 1, query.order, position)
        return [msgspec.json.decode(row["body"]) for row in rows]

    @transaction
    def item(self, db: Db, conversation_id: str, owner: str, item_id: str) -> bytes:
        self._find(db, conversation_id, owner)
        return bytes(self._found_item(db, conversation_id, item_id)["body"])

    @transaction
    def delete_item(self, db: Db, conversation_id: str, owner: str, item_id: str) -> bytes:
        """Delete an item and return the conversation."""
        row = self._find(db, conversation_id, owner)
        item = self._found_item(db, conversation_id, item_id)
        db.execute("DELETE FROM conversation_items WHERE seq = ?", (item["seq"],))
        self._objects.grow(db, conversation_id, -len(item["body"]))
        return bytes(row["body"])

    def _append(self, db: Db, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        num_bytes = 0
        added = [{"id": ID_PREFIXES[each["type"]] + secrets.token_hex(24)} | each for each in items]
        for item in added:
            body = _encode(item)
            done = db.execute(
                "INSERT OR IGNORE INTO conversation_items (conversation_id, id, body)"
                " VALUES (?, ?, ?)",
                (conversation_id, item["id"], body),
            )
            num_bytes += len(body) * done.rowcount
        self._objects.grow(db, conversation_id, num_bytes)
        return added

    def _find(
        self, db: Db, conversation_id: str, owner: str, param: str = "conversation_id"
    ) -> sqlite3.Row:
        row = self._objects.find(db, conversation_id, owner, PREFIX)
        if row is None:
            raise NotFoundError(
                f"There is no conversation {conversation_id[:64]!r}: it was never created, has"
                " expired or was deleted.",
                param=param,
                code="conversation_not_found",
            )
        return row

    def _item(self, db: Db, conversation_id: str, item_id: str) -> sqlite3.Row | None:
        found = db.execute(
            "SELECT * FROM conversation_items WHERE conversation_id = ? AND id = ?",
            (conversation_id, item_id),
        ).fetchone()
        assert found is None or isinstance(found, sqlite3.Row)
        return found

    def _found_item(self, db: Db, conversation_id: str, item_id: str) -> sqlite3.Row:
        found = self._item(db, conversation_id, item_id)
        if found is None:
            raise NotFoundError(
                "There is no such item in this conversation.",
                param="item_id",
                code="item_not_found",
            )
        return found


def _check_size(db: Db, conversation: sqlite3.Row, param: str) -> None:
    """Raise if a conversation has too many items or bytes for a prompt."""
    num_items = db.execute(
        "SELECT COUNT(*) FROM conversation_items WHERE conversation_id = ?", (conversation["id"],)
    ).fetchone()[0]
    if num_items > MAX_ITEMS or conversation["num_bytes"] > MAX_CONVERSATION_BYTES:
        raise too_long(MAX_ITEMS, "items", param)


def add_conversations_routes(app: FastAPI, services: Services, store: ConversationStore) -> None:
    max_bytes = services.settings.server.body_limit_mb * 2**20

    @app.post("/v1/conversations")
    async def create_conversation(request: Request) -> Response:
        body = await read_parsed(request, max_bytes, partial(validated, ConversationBody))
        owner = principal_of(request).name
        return json_bytes(await store.create(owner, body.items or (), body.metadata))

    @app.get("/v1/conversations/{conversation_id}")
    async def retrieve_conversation(request: Request, conversation_id: str) -> Response:
        return json_bytes(await store.body(conversation_id, principal_of(request).name))

    @app.post("/v1/conversations/{conversation_id}")
    async def update_conversation(request: Request, conversation_id: str) -> Response:
        body = await read_parsed(request, max_bytes, partial(validated, ConversationUpdate))
        owner = principal_of(request).name
        return json_bytes(await store.update(conversation_id, owner, body.metadata))

    @app.delete("/v1/conversations/{conversation_id}")
    async def delete_conversation(request: Request, conversation_id: str) -> Response:
        await store.delete(conversation_id, principal_of(request).name)
        deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return json_response(deleted)

    @app.post("/v1/conversations/{conversation_id}/items")
    async def create_items(request: Request, conversation_id: str) -> Response:
        parse_query(NewItemsQuery, request)
        body = await read_parsed(request, max_bytes, partial(validated, NewItemsBody))
        owner = principal_of(request).name
        items = await store.add(conversation_id, owner, body.items)
        return json_response(list_body(items, MAX_ADDED))

    @app.get("/v1/conversations/{conversation_id}/items")
    async def list_items(request: Request, conversation_id: str) -> Response:
        query = parse_query(ItemsQuery, request)
        items = await store.page(conversation_id, principal_of(request).name, query)
        return json_response(list_body(items, query.limit))

    @app.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
        parse_query(NewItemsQuery, request)
        owner = principal_of(request).name
        return json_bytes(await store.item(conversation_id, owner, item_id))

    @app.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
        owner = principal_of(request).name
        return json_bytes(await store.delete_item(conversation_id, owner, item_id))
