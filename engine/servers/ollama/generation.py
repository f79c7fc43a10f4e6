"""POST /api/chat, /api/generate, /api/embed and /api/embeddings.

Ollama does not look at the Content-Type. In its manual, `curl -d` sends JSON with the Content-Type
of a form. So bodies of any type are read.
"""

import asyncio
import functools
import time
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import CompletionRequest, ModelCard, ToolChoice
from engine.servers.http.request_log import record_of
from engine.servers.ollama.format import Answer
from engine.servers.ollama.names import OllamaModels
from engine.servers.ollama.schema import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
)
from engine.servers.openai.completions import NO_SUFFIX
from engine.servers.openai.embeddings import check_embeddings, embed, shortened
from engine.servers.openai.format import collect
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.generation import (
    NO_TEXT,
    ChatInput,
    effort_options,
    open_chat,
    open_generation,
    require_grammar,
    thinking_switch,
)
from engine.servers.serving.services import Services, json_bytes, json_response, new_completion_id
from engine.servers.serving.sse import LineStream, answer_streaming


def add_generation_routes(app: FastAPI, services: Services, models: OllamaModels) -> None:
    @app.post("/api/chat")
    async def chat(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, OllamaChatBody, is_lenient=True)
        card = await models.find(request, body.model)
        answer = _answer(request, body, card, is_chat=True)
        if not body.messages:
            done = await models.load_or_unload(request, card, body.keep_alive)
            return json_bytes(answer.without_text(done))
        _check(services, request, models, card, body)
        services.require(card, "chat", "messages", "has no chat template; use /api/generate")
        ask = _ask(services, request, card, body, body.messages, body.tools)
        pump = await _open(services, request, ticket, body, ask)
        return await _respond(pump, answer, body)

    @app.post("/api/generate")
    async def generate(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, OllamaGenerateBody, is_lenient=True)
        card = await models.find(request, body.model)
        answer = _answer(request, body, card, is_chat=False)
        if not body.prompt and not body.images:
            done = await models.load_or_unload(request, card, body.keep_alive)
            return json_bytes(answer.without_text(done))
        _check(services, request, models, card, body)
        if body.raw or body.suffix or "chat" not in card.capabilities:
            pump = await _open_text(services, request, ticket, body, card)
        else:
            ask = _ask(services, request, card, body, body.messages)
            pump = await _open(services, request, ticket, body, ask)
        return await _respond(pump, answer, body)


def _answer(request: Request, body: OllamaGenerationBody, card: ModelCard, is_chat: bool) -> Answer:
    return Answer(body.model or card.id, record_of(request.scope).started, is_chat)


def _check(
    services: Services,
    request: Request,
    models: OllamaModels,
    card: ModelCard,
    body: OllamaGenerationBody,
) -> None:
    """Check what all requests for text have in common, and warn of parameters without an effect."""
    services.require(card, "completions", "model", NO_TEXT)
    require_grammar(services, card, body.format)
    models.keep(request, card, body.keep_alive)
    if body.shift:
        what = "has no effect: an answer ends at the end of the context"
        services.warn(request, "shift", what)


def _ask(
    services: Services,
    request: Request,
    card: ModelCard,
    body: OllamaGenerationBody,
    messages: tuple[dict[str, Any], ...],
    tools: tuple[dict[str, Any], ...] = (),
) -> ChatInput:
    last = messages[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    return ChatInput(
        card,
        messages,
        tools=tools,
        tool_choice=ToolChoice("auto" if tools else "none"),
        grammar=body.format,
        template_options=_thinking(services, request, card, body.think),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _thinking(
    services: Services, request: Request, card: ModelCard, think: bool | str | None
) -> dict[str, Any]:
    """Chat template options that turn thinking on or off, or set its level."""
    if think is None:
        return {}
    can_think = "reasoning" in card.capabilities
    if think and not can_think:
        raise InvalidRequestError(f'"{card.id}" does not support thinking.', param="think")
    if isinstance(think, str):
        return effort_options(services, request, card, think, "think")
    switch = thinking_switch(card, think)
    if can_think and not think and not switch:
        services.warn(request, "think", "thinking can't be turned off for this model")
    return switch


async def _open(
    services: Services,
    request: Request,
    ticket: Ticket,
    body: OllamaGenerationBody,
    ask: ChatInput,
) -> EventPump:
    params = body.params(ask.card)
    completion_id = new_completion_id("ollama")
    return await open_chat(services, request, ticket, ask, body, params, completion_id)


async def _open_text(
    services: Services,
    request: Request,
    ticket: Ticket,
    body: OllamaGenerateBody,
    card: ModelCard,
) -> EventPump:
    """Submit a prompt without a chat template. If the client calls it `raw`, the names of control
    tokens in it become these tokens.
    """
    if body.suffix:
        services.require(card, "suffix", "suffix", NO_SUFFIX)
    for name in ("system", "images", "think"):
        if getattr(body, name):
            what = "has no chat template" if not body.raw else "gets a raw prompt"
            raise InvalidRequestError(f"{name}: {card.id} {what}; leave it out.", param=name)
    params = body.params(card)
    completion_id = new_completion_id("ollama")
    prompt = functools.partial(
        CompletionRequest,
        prompt=body.prompt or "",
        suffix=body.suffix or None,
        parse_special=bool(body.raw),
    )
    return await open_generation(
        *(services, request, ticket, card, body, params, completion_id),
        [prompt],
        grammar=body.format,
    )


async def _respond(pump: EventPump, answer: Answer, body: OllamaGenerationBody) -> Response:
    if body.streams:
        return await answer_streaming(pump, answer, LineStream)
    collected = await collect(pump, 1)
    return json_bytes(answer.whole(collected.choices[0], pump.usage))


def add_embedding_routes(app: FastAPI, services: Services, models: OllamaModels) -> None:
    @app.post("/api/embed")
    async def embed_texts(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, OllamaEmbedBody, is_lenient=True)
        card = await models.find(request, body.model)
        _check_embedding(services, request, models, card, body, body.dimensions)
        vectors, num_tokens = [], 0
        if body.input:
            inputs = [await _cut(services, card, each, body) for each in body.input]
            made = await embed(services, request, ticket, card, body, "embd", inputs)
            vectors = shortened(made.vectors, body.dimensions).tolist()
            num_tokens = made.prompt_tokens
        taken = time.monotonic() - record_of(request.scope).started
        content = {
            "model": body.model or card.id,
            "embeddings": vectors,
            "total_duration": round(taken * 1e9),
            "load_duration": 1,
            "prompt_eval_count": num_tokens,
        }
        # Encoding many vectors is slow, so it runs in a thread.
        return json_bytes(await asyncio.to_thread(msgspec.json.encode, content))

    @app.post("/api/embeddings")
    async def embed_prompt(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, OllamaEmbeddingsBody, is_lenient=True)
        card = await models.find(request, body.model)
        _check_embedding(services, request, models, card, body, None)
        if not body.prompt:
            return json_response({"embedding": []})
        made = await embed(services, request, ticket, card, body, "embd", [body.prompt])
        return json_response({"embedding": made.vectors[0].tolist()})


def _check_embedding(
    services: Services,
    request: Request,
    models: OllamaModels,
    card: ModelCard,
    body: OllamaEmbedBody | OllamaEmbeddingsBody,
    dimensions: int | None,
) -> None:
    check_embeddings(services, request, card, dimensions)
    for name, value in (body.options or {}).items():
        if value is not None:
            services.warn(request, f"options.{name[:64]}", "has no effect on embeddings")
    models.keep(request, card, body.keep_alive)


async def _cut(
    services: Services, card: ModelCard, text: str, body: OllamaEmbedBody
) -> str | tuple[int, ...]:
    """The text, or its first tokens if it is longer than the model's context."""
    room = card.max_model_len
    if body.truncate is False or len(text) <= room:
        return text
    whole = await services.backend.tokenize(text, model=card.id)
    if len(whole) <= room:
        return text
    plain = await services.backend.tokenize(text, model=card.id, add_special_tokens=False)
    num_special = len(whole) - len(plain)
    num_before = next(i for i in range(num_special + 1) if whole[i : i + len(plain)] == plain)
    after = whole[num_before + len(plain) :]
    return (*whole[: room - len(after)], *after)
