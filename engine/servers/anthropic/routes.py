"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's SDK and Claude Code speak them.

`anthropic-beta` needs no check: what a beta adds to a body is a field, and fields are refused by
name. Errors have Anthropic's shape (`servers/http/errors.py`). Answers carry the request id in the
header where its SDK looks for it.
"""

import secrets
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import GenerationContext, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.anthropic.convert import Prompt, parse, sampling_body, template_options
from engine.servers.anthropic.format import Answer, Envelope, MessageStream
from engine.servers.anthropic.schema import MessagesBody, PromptBody
from engine.servers.http.limits import read_parsed
from engine.servers.http.record import record_of
from engine.servers.serving.admission import Ticket
from engine.servers.serving.chats import check_tools, require_chat, require_grammar
from engine.servers.serving.event_pump import Generation
from engine.servers.serving.services import Services, answer_streaming, json_response, wait_whole

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
        context = services.context(request, card, sampling, params, envelope.id, prompt.grammar)
        source = services.backend.chat(prompt.chat_request(context, options))
        generation = await services.generate(ticket, params, [source])
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
        card, options = _prepare(services, request, body, prompt)
        request_id = record_of(request.scope).request_id
        context = GenerationContext(
            request_id=request_id, params=SamplingParams(), grammar=prompt.grammar
        )
        token_ids = await services.backend.tokenize(
            prompt.chat_request(context, options), model=card.id
        )
        return json_response({"input_tokens": len(token_ids)}, {"request-id": request_id})


async def _read(services: Services, request: Request, kind: type[Kind]) -> tuple[Kind, Prompt]:
    if request.headers.get("anthropic-version", VERSION) != VERSION:
        services.warn(request, "anthropic-version", f"answered as {VERSION}")
    max_bytes = services.settings.server.body_limit_mb * 2**20
    return await read_parsed(request, max_bytes, lambda raw: parse(kind, raw))


def _prepare(
    services: Services, request: Request, body: PromptBody, prompt: Prompt
) -> tuple[ModelCard, dict[str, Any]]:
    """The model, what its template is told, and warnings of what can't be done as asked."""
    card = services.choose_model(request, body.model)
    require_chat(services, card, "messages")
    require_grammar(services, card, prompt.grammar)
    check_tools(services, request, card, prompt.tools)
    for param, message in prompt.warnings.items():
        services.warn(request, param, message)
    return card, template_options(services, request, body, card)


async def _answer_whole(request: Request, generation: Generation, envelope: Envelope) -> Response:
    answer = Answer(envelope)
    await wait_whole(request, generation, answer.add)
    return Response(answer.body(generation.usage), media_type="application/json")
