"""POST /v1/chat/completions."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import ChatRequest, ModelCard
from engine.servers.lifecycle import Ticket
from engine.servers.openai.format import ChatStream, chat_body, new_envelope
from engine.servers.openai.schema import ChatBody, OpenAIBody
from engine.servers.reasoning import effort_options
from engine.servers.services import (
    Services,
    answer_streaming,
    answer_whole,
    new_completion_id,
)

NO_TEXT = "writes no text; use /v1/embeddings"


def add_chat_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/chat/completions")
    async def chat(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, ChatBody)
        card = services.find_model(body.model)
        require_chat(services, card)
        params = body.params(card)
        check_structure(services, request, body, card)
        choice, tools = body.choice_of_tools
        if tools:
            check_tools(services, request, body, card)
        envelope = new_envelope(new_completion_id("chatcmpl"), card)
        source = services.backend.chat(
            ChatRequest(
                context=services.context(request, body, params, envelope.id, body.grammar),
                messages=body.messages,
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=body.parallel_tool_calls is not False,
                template_options=template_options(services, request, body, card),
                add_generation_prompt=body.adds_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
            )
        )
        generation = services.generate(ticket, params, [source])
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


def require_chat(services: Services, card: ModelCard) -> None:
    services.require(card, "completions", "messages", NO_TEXT)
    services.require(card, "chat", "messages", "has no chat template; use /v1/completions")


def check_structure(
    services: Services, request: Request, body: OpenAIBody, card: ModelCard
) -> None:
    """Of chats and completions alike: what the output must match, and hints without effect."""
    if body.grammar is not None:
        what = "can't be held to a grammar by its backend"
        services.require(card, "json_schema", body.grammar.param, what)
    if body.has_format_description:
        param = "response_format.json_schema.description"
        services.warn(request, param, "is not shown to the model")
    if body.prompt_cache_key is not None:
        services.warn(request, "prompt_cache_key", "is not needed, every prefix is cached")


def check_tools(services: Services, request: Request, body: ChatBody, card: ModelCard) -> None:
    services.require(card, "tools", "tools", "can't call tools")
    if "tools" in card.emulated:
        services.warn(request, "tools", "emulated with a prompt, the model was not made for them")


def template_options(
    services: Services, request: Request, body: ChatBody, card: ModelCard
) -> dict[str, Any]:
    """Only what the model's template looks at; a warning for everything else."""
    options: dict[str, Any] = {}
    for name, value in body.chat_template_kwargs.items():
        if name in card.template_options:
            options[name] = value
        else:
            place = f"chat_template_kwargs.{name[:64]}"
            services.warn(request, place, "has no effect on this model's template")
    effort = body.reasoning_effort
    options = effort_options(services, request, card, effort, "reasoning_effort") | options
    if body.verbosity is not None:
        services.warn(request, "verbosity", "can't be set for this model")
    return options
