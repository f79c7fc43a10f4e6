"""POST /, /generate_stream and /embed, and GET /info. `/generate` is in `servers/generate.py`,
because other servers have this path too.
"""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine import __version__
from engine.servers.access.auth import principal_of
from engine.servers.huggingface.format import Answer
from engine.servers.huggingface.schema import EmbedBody, TextGenerationBody
from engine.servers.openai.embeddings import (
    check_embeddings,
    embed,
    prompt_names,
    shortened,
    unit_rows,
)
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump, OutputEvent
from engine.servers.serving.prompts import Prompts, open_prompts
from engine.servers.serving.services import Services, json_bytes, json_response
from engine.servers.serving.sse import answer_counted


def add_huggingface_routes(app: FastAPI, services: Services) -> None:
    admitted = Annotated[Ticket, Depends(services.admitted)]

    @app.post("/")
    async def infer(request: Request, ticket: admitted) -> Response:
        """What the model is for: text, which is a list of one answer here, or vectors."""

        def choose(raw: dict[str, Any]) -> type[TextGenerationBody | EmbedBody]:
            card = services.choose_model(request, _model_of(raw))
            return TextGenerationBody if "completions" in card.capabilities else EmbedBody

        body = await services.read_chosen(request, choose)
        if isinstance(body, EmbedBody):
            return await _vectors(services, request, ticket, body)
        return await answer(services, request, ticket, body, in_list=True)

    @app.post("/generate_stream")
    async def generate_stream(request: Request, ticket: admitted) -> Response:
        body = await services.read(request, TextGenerationBody)
        return await _stream(services, request, ticket, body)

    @app.post("/embed")
    async def embed_texts(request: Request, ticket: admitted) -> Response:
        body = await services.read(request, EmbedBody)
        return await _vectors(services, request, ticket, body)

    @app.get("/info")
    async def info(request: Request) -> Response:
        card = services.find_model(None, principal_of(request))
        return json_response(
            {
                "model_id": card.id,
                "max_input_tokens": card.max_model_len - 1,
                "max_total_tokens": card.max_model_len,
                "max_input_length": card.max_model_len,
                "version": __version__,
            }
        )


async def answer(
    services: Services,
    request: Request,
    ticket: Ticket,
    body: TextGenerationBody,
    *,
    in_list: bool = False,
) -> Response:
    if body.stream:
        return await _stream(services, request, ticket, body)
    pump = await _open(services, request, ticket, body)
    events: list[OutputEvent] = []
    await pump.wait_whole(events.extend)
    made = Answer(body, pump, (await pump.prompt_lengths(services.backend))[0])
    made.add(events)
    whole = msgspec.json.encode(made.whole())
    return json_bytes(b"[%b]" % whole if in_list else whole)


async def _stream(
    services: Services, request: Request, ticket: Ticket, body: TextGenerationBody
) -> Response:
    pump = await _open(services, request, ticket, body)
    pump.joins_ends = True
    return await answer_counted(
        pump, services.backend, lambda lengths: Answer(body, pump, lengths[0])
    )


async def _open(
    services: Services, request: Request, ticket: Ticket, body: TextGenerationBody
) -> EventPump:
    card = services.choose_model(request, body.model)
    if body.truncate is not None:
        body = body.model_copy(update={"truncate_prompt_tokens": body.truncate})
    prompts = Prompts(
        texts=[body.inputs],
        field="inputs",
        prefix="gen",
        params=body.params(card),
        grammar=body.grammar,
        parse_special=body.parse_special,
        echo=bool(body.decoder_input_details),
    )
    return await open_prompts(services, request, ticket, card, body, prompts)


async def _vectors(
    services: Services, request: Request, ticket: Ticket, body: EmbedBody
) -> Response:
    card = services.choose_model(request, body.model)
    check_embeddings(services, request, card, body.dimensions)
    if body.truncate:
        body = body.model_copy(update={"truncate_prompt_tokens": -1})  # to the model's context
    names = prompt_names(card, body.prompt_name, body.inputs)
    made = await embed(services, request, ticket, card, body, "embd", body.inputs, names)

    def encoded() -> bytes:
        vectors = shortened(made.vectors, body.dimensions)
        return msgspec.json.encode((unit_rows(vectors) if body.normalize else vectors).tolist())

    return json_bytes(await asyncio.to_thread(encoded))


def _model_of(raw: dict[str, Any]) -> str | None:
    model = raw.get("model")
    return model if isinstance(model, str) else None
