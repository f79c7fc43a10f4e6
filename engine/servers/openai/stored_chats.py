"""Chat completions that clients store with `store: true`: list, read, change and delete them."""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import NotFoundError
from engine.core.interfaces.backend import Event, UsageEvent
from engine.servers.access.auth import principal_of
from engine.servers.http.limits import read_parsed
from engine.servers.http.listing import Cursor, Order, Query, following, list_body, parse_query
from engine.servers.openai.format import Collected, Envelope, chat_body
from engine.servers.openai.schema import ChatBody
from engine.servers.schema import fields
from engine.servers.schema.body import validated
from engine.servers.serving.generation import Follow
from engine.servers.serving.services import Services, json_bytes, json_response
from engine.servers.storage.objects import ObjectStore
from engine.servers.storage.tables import Db, Store, having, page_of, transaction

PREFIX = "chatcmpl-"
MAX_BODY_BYTES = 65_536
_encode = msgspec.json.Encoder().encode
Limit = Annotated[int, Field(ge=1, le=100)]


class StoredChatUpdate(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    metadata: fields.Metadata


class StoredChatsQuery(Query):
    after: Cursor | None = None
    limit: Limit = 20
    order: Order = "asc"
    model: fields.ModelName | None = None
    metadata: fields.Metadata = {}  # sent as metadata[KEY]=VALUE


class StoredMessagesQuery(Query):
    after: Cursor | None = None
    limit: Limit = 20
    order: Order = "asc"


class ChatStore(Store):
    def __init__(self, objects: ObjectStore) -> None:
        super().__init__(objects.database)
        self._objects = objects

    @transaction
    def save(self, db: Db, owner: str, messages: Sequence[dict[str, Any]], body: bytes) -> None:
        chat = msgspec.json.decode(body)
        metadata = chat.setdefault("metadata", {})
        self._objects.add(db, chat["id"], owner, _encode(messages), _encode(chat))
        db.execute(
            "INSERT INTO chat_completions (id, owner, model, metadata) VALUES (?, ?, ?, ?)",
            (chat["id"], owner, chat["model"], _encode(metadata).decode()),
        )

    @transaction
    def row(self, db: Db, chat_id: str, owner: str) -> sqlite3.Row:
        return self._find(db, chat_id, owner)

    @transaction
    def page(self, db: Db, owner: str, query: StoredChatsQuery) -> list[dict[str, Any]]:
        """A page of the owner's chats, and one chat more if there are more."""
        after = None
        if query.after is not None:
            self._find(db, query.after, owner, "after")
            cursor = "SELECT seq FROM chat_completions WHERE id = ?"
            after = db.execute(cursor, (query.after,)).fetchone()["seq"]
        condition, pairs = having(query.metadata)
        sql = (
            "SELECT body FROM chat_completions JOIN responses USING (id)"
            " WHERE chat_completions.owner = ? AND kept_until > ?"
            f" AND model = COALESCE(?, model) AND {condition}"
        )
        values = (owner, self._objects.now(), query.model, *pairs)
        rows = page_of(db, sql, values, query.limit + 1, query.order, after)
        return [msgspec.json.decode(row["body"]) for row in rows]

    @transaction
    def update(self, db: Db, chat_id: str, owner: str, metadata: dict[str, str]) -> bytes:
        row = self._find(db, chat_id, owner)
        body = _encode(msgspec.json.decode(row["body"]) | {"metadata": metadata})
        self._objects.set_body(db, chat_id, body)
        encoded = _encode(metadata).decode()
        db.execute("UPDATE chat_completions SET metadata = ? WHERE id = ?", (encoded, chat_id))
        return body

    @transaction
    def delete(self, db: Db, chat_id: str, owner: str) -> None:
        self._objects.delete(db, self._find(db, chat_id, owner)["id"])

    def _find(self, db: Db, chat_id: str, owner: str, param: str = "completion_id") -> sqlite3.Row:
        row = self._objects.find(db, chat_id, owner, PREFIX)
        if row is None:
            raise NotFoundError(
                f"There is no chat completion {chat_id[:64]!r}: it was never stored, has expired or"
                " was deleted.",
                param=param,
                code="completion_not_found",
            )
        return row


async def storing(
    services: Services,
    request: Request,
    body: ChatBody,
    messages: Sequence[dict[str, Any]],
    envelope: Envelope,
    named_tool: bool,
    inner: Follow | None,
) -> Follow:
    """A wrapper of the stream of events that stores the answer at its end, before the client gets
    the end. `messages` are those of the request, as the client sent them. `inner` is another
    wrapper that the events pass first. Raises if the storage can't be used.
    """
    store, owner = ChatStore(services.objects), principal_of(request).name
    await services.objects.check()

    async def follow(source: AsyncIterator[Event]) -> AsyncIterator[Event]:
        collected = Collected(body.num_choices)
        async for event in source if inner is None else inner(source):
            if isinstance(event, UsageEvent):
                answer = chat_body(
                    envelope,
                    collected,
                    event,
                    tokens=body.tokens,
                    named_tool=named_tool,
                    metadata=body.metadata,
                )
                await store.save(owner, messages, answer)
            else:
                collected.add([event])
            yield event

    return follow


def _stored_message(chat_id: str, index: int, message: dict[str, Any]) -> dict[str, Any]:
    content, parts = message.get("content"), None
    if isinstance(content, list):
        parts = content
        texts = [part["text"] for part in parts if part.get("type") == "text"]
        content = "".join(texts)
    stored = {"id": f"{chat_id}-{index}", "content": content, "content_parts": parts}
    return message | stored | {"refusal": message.get("refusal")}


def add_stored_chats_routes(app: FastAPI, services: Services) -> None:
    store = ChatStore(services.objects)
    path = "/v1/chat/completions"

    @app.get(path)
    async def list_chats(request: Request) -> Response:
        query = parse_query(StoredChatsQuery, request)
        chats = await store.page(principal_of(request).name, query)
        return json_response(list_body(chats, query.limit))

    @app.get(path + "/{completion_id}")
    async def retrieve_chat(request: Request, completion_id: str) -> Response:
        row = await store.row(completion_id, principal_of(request).name)
        return json_bytes(bytes(row["body"]))

    @app.post(path + "/{completion_id}")
    async def update_chat(request: Request, completion_id: str) -> Response:
        body = await read_parsed(request, MAX_BODY_BYTES, partial(validated, StoredChatUpdate))
        owner = principal_of(request).name
        return json_bytes(await store.update(completion_id, owner, body.metadata))

    @app.delete(path + "/{completion_id}")
    async def delete_chat(request: Request, completion_id: str) -> Response:
        await store.delete(completion_id, principal_of(request).name)
        deleted = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
        return json_response(deleted)

    @app.get(path + "/{completion_id}/messages")
    async def list_messages(request: Request, completion_id: str) -> Response:
        query = parse_query(StoredMessagesQuery, request)
        row = await store.row(completion_id, principal_of(request).name)
        sent = msgspec.json.decode(row["input"])
        messages = [_stored_message(completion_id, i, each) for i, each in enumerate(sent)]
        if query.order == "desc":
            messages.reverse()
        return json_response(list_body(following(messages, query.after), query.limit))
