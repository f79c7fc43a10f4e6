"""POST /v1/chat/completions."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import ChatRequest, ModelCard
from engine.servers.openai.format import ChatStream, chat_body, new_envelope
from engine.servers.openai.schema import ChatBody, OpenAIBody
from engine.servers.serving.admission import Ticket
from engine.servers.serving.chats import (
    check_tools,
    effort_options,
    known_options,
    require_chat,
    require_grammar,
    warn_of_cache_key,
)
from engine.servers.serving.services import (
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
        card = services.choose_model(request, body.model)
        require_chat(services, card, "messages")
        params = body.params(card)
        check_structure(services, request, body, card)
        choice, tools = body.choice_of_tools
        check_tools(services, request, card, tools)
        envelope = new_envelope(new_completion_id("chatcmpl"), card)
        source = services.backend.chat(
            ChatRequest(
                context=services.context(request, card, body, params, envelope.id, body.grammar),
                messages=body.messages,
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=body.parallel_tool_calls is not False,
                template_options=template_options(services, request, body, card),
                add_generation_prompt=body.adds_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
            )
        )
        generation = await services.generate(ticket, params, [source])
        named_tool = choice.mode == "named"
        if body.stream:
            stream = ChatStream(envelope, params.n, body.include_usage, named_tool)
            return await answer_streaming(request, generation, stream)
        return await answer_whole(
            request,
            generation,
            params.n,
            lambda collected, usage: chat_body(
                envelope,
                collected,
                usage,
                with_logprobs=bool(body.logprobs),
                named_tool=named_tool,
                metadata=body.metadata,
            ),
        )


def check_structure(
    services: Services, request: Request, body: OpenAIBody, card: ModelCard
) -> None:
    """Of chats and completions alike: what the output must match, and hints without effect."""
    require_grammar(services, card, body.grammar)
    if body.has_format_description:
        param = "response_format.json_schema.description"
        services.warn(request, param, "is not shown to the model")
    warn_of_cache_key(services, request, body.prompt_cache_key)


def template_options(
    services: Services, request: Request, body: ChatBody, card: ModelCard
) -> dict[str, Any]:
    """What was asked for by the template's own names comes before the API's words for it."""
    given = known_options(services, request, card, body.chat_template_kwargs)
    if body.verbosity is not None:
        services.warn(request, "verbosity", "can't be set for this model")
    effort = body.reasoning_effort
    return effort_options(services, request, card, effort, "reasoning_effort") | given
