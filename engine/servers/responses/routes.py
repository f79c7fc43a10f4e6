"""/v1/responses: create a response (whole, streamed or in the background), read it, cancel it, list
its input items, delete it, summarize a conversation, and count the tokens of a prompt.
"""

from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import GenerationContext
from engine.core.interfaces.request import SamplingParams
from engine.servers.access.auth import principal_of
from engine.servers.http.listing import following, list_body, parse_query
from engine.servers.responses.background import Background, follow_job
from engine.servers.responses.compact import compact
from engine.servers.responses.conversations import ConversationStore, add_conversations_routes
from engine.servers.responses.create import ResponseMaker
from engine.servers.responses.format import ResponseStream
from engine.servers.responses.schema import (
    CompactBody,
    ItemsQuery,
    ResponseBody,
    ResponseQuery,
    TokenCountBody,
)
from engine.servers.responses.store import ResponseStore
from engine.servers.serving.admission import Ticket
from engine.servers.serving.generation import chat_model, chat_prompt
from engine.servers.serving.services import (
    Services,
    json_bytes,
    json_response,
    new_completion_id,
)
from engine.servers.serving.sse import answer_streaming


def add_responses_routes(app: FastAPI, services: Services) -> None:
    store = ResponseStore(services.objects)
    conversations = ConversationStore(services.objects)
    maker = ResponseMaker(services, store, conversations)
    background = Background(store)
    services.components.append(background)
    add_conversations_routes(app, services, conversations)

    @app.post("/v1/responses")
    async def create(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, ResponseBody)
        made = await maker.begin(request, body, ticket)
        if body.background:
            owner = principal_of(request).name
            job = await background.accept(made, owner, bool(body.stream), ticket)
            if not body.stream:
                return json_response(job.response)
            return follow_job(request, job, job.follow())
        recorder = made.recorder
        if body.stream:
            stream = ResponseStream(made.begun, lambda: recorder.response)
            return await answer_streaming(made.pump, stream)
        await made.pump.wait_whole()
        return json_response(recorder.response)

    @app.post("/v1/responses/input_tokens")
    async def count_tokens(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, TokenCountBody)
        count = await _count_tokens(services, maker, request, body)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    @app.post("/v1/responses/compact")
    async def compact_conversation(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, CompactBody)
        return json_response(await compact(services, maker, request, body, ticket))

    _add_stored_routes(app, store, background)


def _add_stored_routes(app: FastAPI, store: ResponseStore, background: Background) -> None:
    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        query = parse_query(ResponseQuery, request)
        owner = principal_of(request).name
        if query.stream:
            after = -1 if query.starting_after is None else query.starting_after
            return await background.stream(request, response_id, owner, after)
        return json_bytes(await background.current(response_id, owner))

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        await background.delete(response_id, principal_of(request).name)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        query = parse_query(ItemsQuery, request)
        items = await store.input_items(response_id, principal_of(request).name)
        if query.order == "desc":
            items.reverse()
        return json_response(list_body(following(items, query.after), query.limit))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        return json_bytes(await background.cancel(response_id, principal_of(request).name))


async def _count_tokens(
    services: Services, maker: ResponseMaker, request: Request, body: TokenCountBody
) -> int:
    card = chat_model(services, request, body.model, "input")
    prompt = await maker.prompt(body, principal_of(request).name)
    context = GenerationContext(
        request_id=new_completion_id("count"), params=SamplingParams(), grammar=body.grammar
    )
    ask = maker.chat_ask(request, body, card, prompt.messages)
    chat = (await chat_prompt(services, request, ask))(context=context)
    return len(await services.backend.tokenize(chat, model=card.id))
