"""POST /v1/chat/completions."""

from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import ChatRequest
from engine.servers.lifecycle import Ticket
from engine.servers.openai.format import ChatStream, chat_body, new_envelope
from engine.servers.openai.schema import ChatBody
from engine.servers.services import (
    Services,
    answer_streaming,
    answer_whole,
    new_completion_id,
)


def add_chat_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/chat/completions")
    async def chat(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, ChatBody)
        card = services.find_model(body.model)
        params = body.params(card)
        envelope = new_envelope(new_completion_id("chatcmpl"), card)
        context = services.context(request, body, params, envelope.id)
        source = services.backend.chat(ChatRequest(context=context, messages=body.messages))
        generation = services.generate(ticket, params, [source])
        if body.stream:
            stream = ChatStream(envelope, params.n, body.include_usage)
            return await answer_streaming(request, generation, stream)
        return await answer_whole(
            request,
            generation,
            params.n,
            lambda collected, usage: chat_body(envelope, collected, usage, bool(body.logprobs)),
        )
