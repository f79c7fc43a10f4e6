"""/v1/responses: create a response (whole or streamed), read it, list its input items, delete it,
and count the tokens of a prompt.
"""

from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import GenerationContext
from engine.core.interfaces.request import SamplingParams
from engine.servers.access.auth import principal_of
from engine.servers.http.listing import following, list_body, parse_query
from engine.servers.responses.conversations import ConversationStore, add_conversations_routes
from engine.servers.responses.create import ResponseMaker
from engine.servers.responses.format import ResponseStream
from engine.servers.responses.schema import (
    ItemsQuery,
    ResponseBody,
    ResponseQuery,
    TokenCountBody,
)
from engine.servers.responses.store import ResponseStore
from engine.servers.serving.admission import Ticket
from engine.servers.serving.chat import chat_model, chat_request
from engine.servers.serving.services import (
    Services,
    answer_streaming,
    json_response,
    new_completion_id,
)


def add_responses_routes(app: FastAPI, services: Services) -> None:
    store = ResponseStore(services.objects)
    conversations = ConversationStore(services.objects)
    maker = ResponseMaker(services, store, conversations)
    add_conversations_routes(app, services, conversations)

    @app.post("/v1/responses")
    async def create(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, ResponseBody)
        begun, recorder, pump = await maker.begin(request, body, ticket)
        if body.stream:
            return await answer_streaming(pump, ResponseStream(begun, lambda: recorder.response))
        await pump.wait_whole()
        return json_response(recorder.response)

    @app.post("/v1/responses/input_tokens")
    async def count_tokens(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, TokenCountBody)
        card = chat_model(services, request, body.model, "input")
        prompt = await maker.prompt(body, principal_of(request).name)
        context = GenerationContext(
            request_id=new_completion_id("count"), params=SamplingParams(), grammar=body.grammar
        )
        ask = maker.chat_ask(request, body, card, prompt.messages)
        chat = await chat_request(services, request, ask, context)
        token_ids = await services.backend.tokenize(chat, model=card.id)
        return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        parse_query(ResponseQuery, request)
        body = await store.body(response_id, principal_of(request).name)
        return Response(body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        await store.delete(response_id, principal_of(request).name)
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
        await store.body(response_id, principal_of(request).name)
        raise InvalidRequestError(
            "Only a response that was asked for with background can be cancelled, and this server"
            " makes none. To cancel any other, close its connection.",
            param="response_id",
        )
