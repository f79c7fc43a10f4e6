"""POST /embedding and /embeddings, in llama.cpp's form: a list with the vectors of each input."""

import asyncio
from typing import Annotated

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import ModelCard
from engine.servers.llamacpp.completion import joined
from engine.servers.llamacpp.schema import EmbeddingsBody, Parts
from engine.servers.openai.embeddings import check_embeddings, embed
from engine.servers.serving.admission import Ticket
from engine.servers.serving.services import Services, json_bytes


def add_vectors_routes(app: FastAPI, services: Services) -> None:
    @app.post("/embeddings")
    @app.post("/embedding")
    async def embeddings(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Compute the vectors of texts or token ids."""
        body = await services.read(request, EmbeddingsBody)
        card = services.choose_model(request, body.model)
        check_embeddings(services, request, card, None)
        inputs = [await _one(services, card, parts) for parts in body.inputs]
        made = await embed(services, request, ticket, card, body, "embd", inputs)

        def encoded() -> bytes:
            rows = enumerate(made.vectors)
            return msgspec.json.encode(
                [{"index": index, "embedding": [row.tolist()]} for index, row in rows]
            )

        return json_bytes(await asyncio.to_thread(encoded))


async def _one(services: Services, card: ModelCard, parts: Parts) -> str | tuple[int, ...]:
    """An input of the backend: text, which gets the model's own prompt, or token ids."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return await joined(services, card, parts)
