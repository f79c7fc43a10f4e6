"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's SDK and Claude Code use them.

The header `anthropic-beta` is not checked: a beta adds fields to the body, and unknown fields are
refused anyway. Errors have Anthropic's format (`servers/http/errors.py`). Responses have the
request id in `request-id`, the header that Anthropic's SDK reads.
"""

import secrets
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import GenerationContext, ModelCard
from engine.core.interfaces.request import SamplingParams
from engine.servers.anthropic.format import MessageAnswer, MessageEnvelope, MessageStream
from engine.servers.anthropic.schema import (
    AnthropicPrompt,
    MessagesBody,
    PromptBody,
    parse,
    sampling_body,
    template_options,
)
from engine.servers.http.request_log import record_of
from engine.servers.serving.admission import Ticket
from engine.servers.serving.generation import ChatInput, chat_model, chat_prompt, open_chat
from engine.servers.serving.services import (
    Services,
    json_bytes,
    json_response,
)
from engine.servers.serving.sse import answer_counted

VERSION = "2023-06-01"

Kind = TypeVar("Kind", bound=PromptBody)


def add_anthropic_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/messages")
    async def create_message(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Answer a conversation, in Anthropic's format."""
        body, prompt = await _read(services, request, MessagesBody)
        card = chat_model(services, request, body.model, "messages")
        sampling = sampling_body(body)
        params = sampling.sampling(card, body.max_tokens, None)
        ask = _ask(services, request, body, prompt, card)
        message_id = f"msg_{secrets.token_hex(12)}"
        pump = await open_chat(services, request, ticket, ask, sampling, params, message_id)
        envelope = MessageEnvelope(
            id=message_id,
            model=card.id,
            request_id=record_of(request.scope).request_id,
            shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        )
        if body.stream:
            response = await answer_counted(
                pump, services.backend, lambda lengths: MessageStream(envelope, lengths[0])
            )
        else:
            answer = MessageAnswer(envelope)
            await pump.wait_whole(answer.add)
            response = json_bytes(answer.body(pump.usage))
        response.headers["request-id"] = envelope.request_id
        return response

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Count a conversation's tokens without answering it."""
        body, prompt = await _read(services, request, PromptBody)
        card = chat_model(services, request, body.model, "messages")
        ask = _ask(services, request, body, prompt, card)
        request_id = record_of(request.scope).request_id
        context = GenerationContext(
            request_id=request_id, params=SamplingParams(), grammar=prompt.grammar
        )
        chat = (await chat_prompt(services, request, ask))(context=context)
        token_ids = await services.backend.tokenize(chat, model=card.id)
        return json_response({"input_tokens": len(token_ids)}, {"request-id": request_id})


async def _read(
    services: Services, request: Request, kind: type[Kind]
) -> tuple[Kind, AnthropicPrompt]:
    if request.headers.get("anthropic-version", VERSION) != VERSION:
        services.warn(request, "anthropic-version", f"answered as {VERSION}")
    return await services.read_as(request, lambda raw: parse(kind, raw))


def _ask(
    services: Services, request: Request, body: PromptBody, prompt: AnthropicPrompt, card: ModelCard
) -> ChatInput:
    """The conversation in the form that all chat APIs share. Warns the client about features that
    are not supported.
    """
    for param, message in prompt.warnings.items():
        services.warn(request, param, message)
    return prompt.ask(card, template_options(services, request, body, card))
