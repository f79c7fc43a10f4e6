"""POST /apply-template and /chat/completions/input_tokens, which render a conversation."""

from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import ModelCard
from engine.servers.llamacpp.schema import TemplateBody
from engine.servers.openai.tokenize import chat_of
from engine.servers.serving.admission import Ticket
from engine.servers.serving.services import Services, json_response


def add_text_routes(app: FastAPI, services: Services) -> None:
    async def ids_of(request: Request) -> tuple[ModelCard, tuple[int, ...]]:
        body = await services.read(request, TemplateBody)
        card = services.choose_model(request, body.model)
        chat = await chat_of(services, request, body, card)
        return card, await services.backend.tokenize(chat, model=card.id)

    @app.post("/apply-template")
    async def apply_template(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Return the prompt of a conversation, for `/completion`. A BOS is left out if
        `/completion` adds it.
        """
        card, ids = await ids_of(request)
        added = await services.backend.tokenize("", model=card.id)
        if added == ids[: len(added)]:
            ids = ids[len(added) :]
        prompt = await services.backend.detokenize(ids, model=card.id) if ids else ""
        return json_response({"prompt": prompt})

    @app.post("/chat/completions/input_tokens")
    @app.post("/v1/chat/completions/input_tokens")
    async def count(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Count the tokens of a conversation."""
        _, ids = await ids_of(request)
        return json_response({"input_tokens": len(ids)})
