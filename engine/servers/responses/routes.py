"""/v1/responses: create (whole or streamed), read, list inputs, delete, count tokens."""

from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import GenerationContext
from engine.core.interfaces.request import SamplingParams
from engine.servers.auth import principal_of
from engine.servers.errors import describe, problem
from engine.servers.generation import Generation
from engine.servers.lifecycle import Ticket
from engine.servers.responses.create import Recorder, ResponseMaker
from engine.servers.responses.items import Item
from engine.servers.responses.schema import LOGPROBS, ResponseBody, TokenCountBody
from engine.servers.responses.store import ResponseStore
from engine.servers.responses.stream import ResponseStream
from engine.servers.services import Services, answer_streaming, new_completion_id

DEFAULT_PAGE = 20
MAX_PAGE = 100

_encode = msgspec.json.Encoder().encode


def add_responses_routes(app: FastAPI, services: Services) -> None:
    store = ResponseStore(services.settings.storage)
    services.components.append(store)
    maker = ResponseMaker(services, store)

    @app.post("/v1/responses")
    async def create(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, ResponseBody)
        begun, recorder, generation = await maker.begin(request, body, ticket)
        if body.stream:
            stream = ResponseStream(begun, lambda: recorder.response)
            return await answer_streaming(request, generation, stream)
        return await _answer_whole(request, generation, recorder)

    @app.post("/v1/responses/input_tokens")
    async def count_tokens(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, TokenCountBody)
        card = services.find_model(body.model)
        prompt = await maker.prompt(body, principal_of(request).name)
        context = GenerationContext(
            request_id=new_completion_id("count"), params=SamplingParams(), grammar=body.grammar
        )
        chat = maker.chat_request(request, body, card, context, prompt.messages)
        token_ids = await services.backend.tokenize(chat)
        return _json({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        query = _query(request, ("stream", "starting_after", "include_obfuscation"))
        if query.get("stream", "false") != "false":
            raise problem("stream", "a stored response can't be streamed; read it whole")
        for name in ("starting_after", "include_obfuscation"):
            if name in query:
                raise problem(name, "is only for streams, and a stored response has none")
        body = await store.body(response_id, principal_of(request).name)
        return Response(body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        await store.delete(response_id, principal_of(request).name)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        query = _query(request, ("limit", "order", "after"))
        items = await store.input_items(response_id, principal_of(request).name)
        return _json(_page(items, query))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        await store.body(response_id, principal_of(request).name)
        raise InvalidRequestError(
            "Only a response that was asked for with background can be cancelled, and this server"
            " makes none. To cancel any other, close its connection.",
            param="response_id",
        )


async def _answer_whole(request: Request, generation: Generation, recorder: Recorder) -> Response:
    generation.watch(request.receive)
    while await generation.take():
        pass
    return _json(recorder.response)


def _query(request: Request, known: tuple[str, ...]) -> dict[str, str]:
    """The query's parameters, of which each is `known`, or `include` of what is always there."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in ("include", "include[]"):
            if value != LOGPROBS:
                raise problem("include", f"should be {LOGPROBS}, got {describe(value)}")
        elif name in known:
            query[name] = value
        else:
            raise problem(name[:64], "is not a parameter of this endpoint")
    return query


def _page(items: list[Item], query: dict[str, str]) -> dict[str, Any]:
    limit, order = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3):
        raise problem("limit", f"should be from 1 to {MAX_PAGE}, got {describe(limit)}")
    if not 1 <= int(limit) <= MAX_PAGE:
        raise problem("limit", f"should be from 1 to {MAX_PAGE}, got {limit}")
    if order not in ("asc", "desc"):
        raise problem("order", f"should be asc or desc, got {describe(order)}")
    ordered = items if order == "asc" else items[::-1]
    if "after" in query:
        ids = [item["id"] for item in ordered]
        if query["after"] not in ids:
            raise problem("after", "is the id of none of these items")
        ordered = ordered[ids.index(query["after"]) + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(_encode(body), media_type="application/json")
