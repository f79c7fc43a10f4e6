"""POST /v1/chat/completions: OpenAI's chat API, whole or streamed."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import ModelCard
from engine.servers.http.sse import StreamFormat
from engine.servers.openai.format import (
    ChatStream,
    RunningUsage,
    chat_body,
    collect,
    new_envelope,
)
from engine.servers.openai.schema import ChatBody, OpenAIBody
from engine.servers.serving.admission import Ticket
from engine.servers.serving.chat import (
    ChatAsk,
    chat_model,
    effort_options,
    known_options,
    open_chat,
    require_grammar,
    warn_of_cache_key,
)
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.services import (
    Services,
    answer_counted,
    answer_streaming,
    json_bytes,
    new_completion_id,
)


def add_chat_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/chat/completions")
    async def chat(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, ChatBody)
        card = chat_model(services, request, body.model, "messages")
        params = body.params(card)
        ask = chat_ask(services, request, body, card)
        completion_id = new_completion_id("chatcmpl")
        pump = await open_chat(services, request, ticket, ask, body, params, completion_id)
        envelope = new_envelope(completion_id, card)
        named_tool = ask.tool_choice.mode == "named"
        if body.stream:
            stream = ChatStream(envelope, params.n, body.include_usage, named_tool)
            return await stream_chunks(services, pump, stream, body)
        collected = await collect(pump, params.n)
        return json_bytes(
            chat_body(
                envelope,
                collected,
                pump.usage,
                with_logprobs=bool(body.logprobs),
                named_tool=named_tool,
                metadata=body.metadata,
            )
        )


async def stream_chunks(
    services: Services, pump: EventPump, stream: StreamFormat, body: OpenAIBody
) -> Response:
    """Start a stream of chunks, with the usage so far in each of them if the client wants it. For
    chats and completions.
    """
    if not (body.include_usage and body.continuous_usage):
        return await answer_streaming(pump, stream)
    return await answer_counted(
        pump, services.backend, lambda lengths: RunningUsage(stream, pump, lengths)
    )


def chat_ask(services: Services, request: Request, body: ChatBody, card: ModelCard) -> ChatAsk:
    check_structure(services, request, body, card)
    choice, tools = body.choice_of_tools
    return ChatAsk(
        card,
        body.messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=body.grammar,
        template_options=template_options(services, request, body, card),
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def check_structure(
    services: Services, request: Request, body: OpenAIBody, card: ModelCard
) -> None:
    """Check that the model supports the requested output grammar, and warn the client about
    parameters that have no effect. For chats and completions.
    """
    require_grammar(services, card, body.grammar)
    if body.has_format_description:
        param = "response_format.json_schema.description"
        services.warn(request, param, "is not shown to the model")
    warn_of_cache_key(services, request, body.prompt_cache_key)
    if body.continuous_usage and not body.include_usage:
        param = "stream_options.continuous_usage_stats"
        services.warn(request, param, "has no effect without include_usage")


def template_options(
    services: Services, request: Request, body: ChatBody, card: ModelCard
) -> dict[str, Any]:
    """Options for the chat template. `chat_template_kwargs` overrides `reasoning_effort`."""
    given = known_options(services, request, card, body.chat_template_kwargs)
    if body.verbosity is not None:
        services.warn(request, "verbosity", "can't be set for this model")
    effort = body.reasoning_effort
    return effort_options(services, request, card, effort, "reasoning_effort") | given
