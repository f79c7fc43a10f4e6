"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's SDK and Claude Code speak them.

`anthropic-beta` needs no check: what a beta adds to a body is a field, and fields are refused by
name. Errors have Anthropic's shape here, see `servers/errors.py`; answers carry the request's id in
the header where its SDK looks for it.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import GenerationContext, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.anthropic.convert import Prompt, parse, sampling_body, template_options
from engine.servers.anthropic.format import Answer, Envelope, MessageStream
from engine.servers.anthropic.schema import MessagesBody, PromptBody
from engine.servers.generation import Generation
from engine.servers.lifecycle import Ticket
from engine.servers.limits import read_parsed
from engine.servers.records import record_of
from engine.servers.services import Services, answer_streaming

VERSION = "2023-06-01"

Kind = TypeVar("Kind", bound=PromptBody)


def add_anthropic_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/messages")
    async def create_message(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Answer a conversation, in Anthropic's form."""
        body, prompt = await _read(services, request, MessagesBody)
        card, options = _prepare(services, request, body, prompt)
        sampling = sampling_body(body)
        params = sampling.sampling(card, body.max_tokens, None)
        envelope = Envelope(
            id=f"msg_{secrets.token_hex(12)}",
            model=card.id,
            request_id=record_of(request.scope).request_id,
            shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        )
        context = services.context(request, sampling, params, envelope.id, prompt.grammar)
        source = services.backend.chat(prompt.chat_request(context, options))
        generation = services.generate(ticket, params, [source])
        if body.stream:
            response = await answer_streaming(request, generation, MessageStream(envelope))
        else:
            response = await _answer_whole(request, generation, envelope)
        response.headers["request-id"] = envelope.request_id
        return response

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """How many tokens a conversation is, without answering it."""
        body, prompt = await _read(services, request, PromptBody)
        _, options = _prepare(services, request, body, prompt)
        request_id = record_of(request.scope).request_id
        context = GenerationContext(
            request_id=request_id, params=SamplingParams(), grammar=prompt.grammar
        )
        token_ids = await services.backend.tokenize(prompt.chat_request(context, options))
        return Response(
            msgspec.json.encode({"input_tokens": len(token_ids)}),
            headers={"request-id": request_id},
            media_type="application/json",
        )


async def _read(services: Services, request: Request, kind: type[Kind]) -> tuple[Kind, Prompt]:
    if request.headers.get("anthropic-version", VERSION) != VERSION:
        services.warn(request, "anthropic-version", f"answered as {VERSION}")
    max_bytes = services.settings.server.body_limit_mb * 2**20
    return await read_parsed(request, max_bytes, lambda raw: parse(kind, raw))


def _prepare(
    services: Services, request: Request, body: PromptBody, prompt: Prompt
) -> tuple[ModelCard, dict[str, Any]]:
    """The model, what its template is told, and warnings of what can't be done as asked."""
    card = services.find_model(body.model)
    services.require(card, "chat", "messages", "has no chat template; use /v1/completions")
    if prompt.grammar is not None:
        what = "can't be held to a grammar by its backend"
        services.require(card, "json_schema", prompt.grammar.param, what)
    if prompt.tools:
        services.require(card, "tools", "tools", "can't call tools")
        if "tools" in card.emulated:
            what = "emulated with a prompt, the model was not made for them"
            services.warn(request, "tools", what)
    options, warnings = template_options(body, card)
    _warn_of_all(services, request, prompt.warnings)
    _warn_of_all(services, request, warnings)
    return card, options


def _warn_of_all(services: Services, request: Request, warnings: Mapping[str, str]) -> None:
    for param, message in warnings.items():
        services.warn(request, param, message)


async def _answer_whole(request: Request, generation: Generation, envelope: Envelope) -> Response:
    generation.watch(request.receive)
    answer = Answer(envelope)
    while events := await generation.take():
        answer.add(events)
    return Response(answer.body(generation.usage), media_type="application/json")
