"""Creates a response: builds the conversation, reads the backend's events, stores the result.

A response is stored when it has ended, whether it is complete or cut off by the length limit. It is
stored before the client gets the end of the answer, so the client can continue from it at once. A
response is not stored if it failed or if the client disconnected. Responses are stored by default,
but few clients need this. So if the storage fails, only requests with `store: true` fail. Other
requests get their answer with `store` set to false, and a warning.
"""

import asyncio
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from engine.core.errors import EngineError, NotFoundError
from engine.core.interfaces.backend import (
    Event,
    ModelCard,
    UsageEvent,
)
from engine.servers.access.auth import is_acting, principal_of
from engine.servers.http.errors import problem
from engine.servers.http.request_log import record_of
from engine.servers.responses.conversations import ConversationStore
from engine.servers.responses.format import finished, outline
from engine.servers.responses.items import Item, response_of, with_ids
from engine.servers.responses.messages import to_messages
from engine.servers.responses.output import Output
from engine.servers.responses.schema import (
    ENCRYPTED_REASONING,
    HistoryBody,
    PromptBody,
    ResponseBody,
)
from engine.servers.responses.store import PREFIX, ResponseStore, Turn
from engine.servers.schema.tools import not_run
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.generation import (
    ChatInput,
    chat_model,
    effort_options,
    open_chat,
    warn_of_cache_key,
)
from engine.servers.serving.services import Services

# Conversations of up to this many items are converted to messages on the event loop. Starting a
# thread for them would take longer.
INLINE_ITEMS = 64

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ResponsePrompt:
    messages: Messages
    input: Sequence[Item]  # items of this request, without references
    ancestors: Sequence[str]  # ids of the earlier responses, oldest first


# Stores a finished response and returns the response to send to the client.
Save = Callable[[Item], Awaitable[Item]]


class Recorder:
    """Passes on the events of a backend and builds the response from them. At the end, `save`
    stores the response and returns the response to send to the client.
    """

    def __init__(self, begun: Item, save: Save) -> None:
        self.output = Output(begun["id"])
        self._begun = begun
        self._save = save
        self._response: Item | None = None

    @property
    def response(self) -> Item:
        assert self._response is not None
        return self._response

    async def follow(self, source: AsyncIterator[Event]) -> AsyncIterator[Event]:
        usage: UsageEvent | None = None
        async for event in source:
            if isinstance(event, UsageEvent):
                usage = event
            else:
                self.output.push(event)
                yield event
        assert usage is not None
        self._response = await self._save(finished(self._begun, self.output, usage))
        yield usage


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response that the backend has begun to make. `begun` is the response without output."""

    begun: Item
    prompt: ResponsePrompt
    recorder: Recorder
    pump: EventPump


class ResponseMaker:
    def __init__(
        self, services: Services, store: ResponseStore, conversations: ConversationStore
    ) -> None:
        self._services = services
        self._store = store
        self._conversations = conversations

    async def begin(self, request: Request, body: ResponseBody, ticket: Ticket) -> NewResponse:
        services = self._services
        card = chat_model(services, request, body.model, "input")
        params = body.params(card)
        if body.background and is_acting(request.scope):
            raise problem("background", "a batch waits for its answers; leave it out")
        response_id = PREFIX + secrets.token_hex(16)
        owner = principal_of(request).name
        prompt = await self.prompt(body, owner)
        is_stored = body.store is not False and await self._can_store(request, body)
        if ENCRYPTED_REASONING in (body.include or ()):
            services.warn(request, "include", "reasoning is not encrypted; it is sent as text")
        if body.client_metadata:
            services.warn(request, "client_metadata", "is neither used nor stored")
        warn_of_cache_key(services, request, body.prompt_cache_key)
        ask = self.chat_ask(request, body, card, prompt.messages)
        begun = outline(body, response_id, card, is_stored)

        is_awaited = not body.background  # a background response is stored by `Background`
        recorder = Recorder(begun, self._saver(request, body, prompt, is_stored and is_awaited))
        pump = await open_chat(
            services,
            request,
            ticket,
            ask,
            body,
            params,
            response_id,
            recorder.follow,
            is_awaited=is_awaited,
        )
        return NewResponse(begun, prompt, recorder, pump)

    def _saver(
        self, request: Request, body: ResponseBody, prompt: ResponsePrompt, is_stored: bool
    ) -> Save:
        owner = principal_of(request).name

        async def save(response: Item) -> Item:
            items = with_ids(prompt.input, response["id"])
            if is_stored:
                try:
                    await self._store.save(response, owner, items, prompt.ancestors)
                except EngineError as error:
                    self._not_stored(request, body, error)
                    response = response | {"store": False}
            if body.conversation is not None:
                new = items + response["output"]
                await self._conversations.add(body.conversation, owner, new, is_answer=True)
            return response

        return save

    async def prompt(self, body: HistoryBody, owner: str) -> ResponsePrompt:
        """The whole conversation: earlier items from the store, then the items of this request.
        Instructions of earlier turns are left out.
        """
        turns: list[Turn] = []
        earlier: list[Item] = []
        source = "previous_response_id"
        if body.previous_response_id is not None:
            turns = await self._store.conversation(body.previous_response_id, owner)
            earlier = [item for turn in turns for item in turn.items]
        elif body.conversation is not None:
            source = "conversation"
            earlier = await self._conversations.items(body.conversation, owner)
            _check_new(body.input, earlier)
        own = await self._resolved(body.input, earlier, owner)
        convert = functools.partial(to_messages, body.instructions, earlier, own, source)
        if len(earlier) + len(own) <= INLINE_ITEMS:
            messages = convert()
        else:
            messages = await asyncio.to_thread(convert)
        return ResponsePrompt(messages, own, [turn.id for turn in turns])

    def chat_ask(
        self, request: Request, body: PromptBody, card: ModelCard, messages: Messages
    ) -> ChatInput:
        services = self._services
        if body.text_format.parsed.has_description:
            services.warn(request, "text.format.description", "is not shown to the model")
        if body.offered.left_out:
            services.warn(request, "tools", not_run(body.offered.left_out))
        choice, tools = body.choice_of_tools
        return ChatInput(
            card,
            messages,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            grammar=body.grammar,
            template_options=self._template_options(request, body, card),
        )

    def _template_options(
        self, request: Request, body: PromptBody, card: ModelCard
    ) -> dict[str, Any]:
        """Chat template options for `reasoning`. Warns the client about what the model's template
        does not support.
        """
        services, reasoning = self._services, body.reasoning
        if body.text is not None and body.text.verbosity is not None:
            services.warn(request, "text.verbosity", "can't be set for this model")
        if reasoning is None:
            return {}
        if reasoning.summary or reasoning.generate_summary:
            services.warn(request, "reasoning.summary", "there is no summary, only the reasoning")
        if reasoning.context not in (None, "auto"):
            services.warn(request, "reasoning.context", "is decided by the model's template")
        return effort_options(services, request, card, reasoning.effort, "reasoning.effort")

    async def _resolved(
        self, items: Sequence[Item], earlier: Sequence[Item], owner: str
    ) -> list[Item]:
        """Replace references to stored items by these items, which may be among the `earlier` ones.
        Raises if a stored item does not exist.
        """
        wanted = {response_of(item["id"]) for item in items if item["type"] == "item_reference"}
        if not wanted:
            return list(items)
        turns = await self._store.turns(wanted, owner)
        known = {item["id"]: item for item in earlier}
        known |= {item["id"]: item for turn in turns.values() for item in turn.items}
        resolved = []
        for position, item in enumerate(items):
            if item["type"] == "item_reference":
                if item["id"] not in known:
                    raise NotFoundError(
                        f"input[{position}]: there is no stored item of that id. Send the item"
                        " itself.",
                        param=f"input[{position}].id",
                        code="item_not_found",
                    )
                item = known[item["id"]]
            resolved.append(item)
        return resolved

    async def _can_store(self, request: Request, body: ResponseBody) -> bool:
        try:
            await self._store.check()
        except EngineError as error:
            self._not_stored(request, body, error)
            return False
        return True

    def _not_stored(self, request: Request, body: ResponseBody, error: EngineError) -> None:
        """Warn the client that its response is not stored. Raises `error` instead if the client set
        `store: true`, if the response is made in the background or if the server is strict.
        """
        if body.store or body.background or self._services.settings.server.strict:
            raise error
        record_of(request.scope).warnings.append("store: the response could not be stored")


def _check_new(items: Sequence[Item], earlier: Sequence[Item]) -> None:
    """Raise if a client sends an item that the conversation has already."""
    known = {item["id"] for item in earlier}
    for position, item in enumerate(items):
        if item["type"] != "item_reference" and item.get("id") in known:
            raise problem(f"input[{position}].id", "is the id of an item in the conversation")
