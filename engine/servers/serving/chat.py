"""Submits conversations to the backend, for all chat APIs.

Each API parses its request body into a `ChatInput`. If the model does not support a feature that
the `ChatInput` uses, the request is refused or the client gets a warning. So all APIs make the same
checks with the same messages.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request

from engine.core.interfaces.backend import (
    ChatRequest,
    Event,
    GenerationContext,
    GrammarSpec,
    ModelCard,
    ToolChoice,
)
from engine.core.interfaces.request import SamplingParams
from engine.servers.schema.body import SamplingBody
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump, Opener
from engine.servers.serving.generation_context import generation_context
from engine.servers.serving.services import Services

NO_TEXT = "writes no text; use /v1/embeddings"
# Reasoning efforts above "high". They are passed to the chat template as "high". If a template has
# higher levels, clients can set them by `chat_template_kwargs`.
_ABOVE_HIGH = ("xhigh", "max")
# Template options that take a reasoning effort. A template has at most one of them.
_LEVELS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
# Template options that turn thinking on and off, with their values. None: there is no such value.
_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_budget", None, 0),
)


# A function that wraps a stream of events, for example to store the answer at its end.
Follow = Callable[[AsyncIterator[Event]], AsyncIterator[Event]]


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation in the form that all chat APIs share. `card` describes the model that will
    answer.
    """

    card: ModelCard
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    grammar: GrammarSpec | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def chat_model(services: Services, request: Request, name: str | None, param: str) -> ModelCard:
    """Find the model `name` and check that it can answer conversations. `param` is the request
    field with the conversation; errors name it.
    """
    card = services.choose_model(request, name)
    services.require(card, "completions", param, NO_TEXT)
    services.require(card, "chat", param, "has no chat template; use /v1/completions")
    return card


async def chat_request(
    services: Services, request: Request, ask: ChatInput, context: GenerationContext
) -> ChatRequest:
    """Build the request for the backend. Raises if the model lacks a feature that `ask` needs."""
    require_grammar(services, ask.card, ask.grammar)
    check_tools(services, request, ask.card, ask.tools)
    return ChatRequest(
        context=context,
        messages=with_system(ask.card, await loaded_messages(services, ask.card, ask.messages)),
        tools=ask.tools,
        tool_choice=ask.tool_choice,
        parallel_tool_calls=ask.parallel_tool_calls,
        template_options=with_preset_options(ask.card, ask.template_options),
        add_generation_prompt=ask.add_generation_prompt,
        continue_final_message=ask.continue_final_message,
    )


def with_system(
    card: ModelCard, messages: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    """The messages, with the system message of the model's preset if they have none."""
    system = None if card.preset is None else card.preset.system
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)


def with_preset_options(card: ModelCard, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the chat template, with those of the model's preset that are not set."""
    preset = {} if card.preset is None else card.preset.template_options
    known = {name: each for name, each in preset.items() if name in card.template_options}
    return known | dict(options)


async def open_chat(
    services: Services,
    request: Request,
    ticket: Ticket,
    ask: ChatInput,
    sampling: SamplingBody,
    params: SamplingParams,
    completion_id: str,
    follow: Follow | None = None,
    opener: Opener | None = None,
    *,
    is_awaited: bool = True,
) -> EventPump:
    """Submit a conversation to the backend and wait until the backend accepts it. Returns the
    `EventPump` that reads the answer's events. If `follow` is given, it wraps the stream of events.
    If `opener` is given, it takes the conversation in the backend's place. If not `is_awaited`, no
    client waits: the request has no queue timeout, and continues when the client disconnects.
    """
    ask = _without_idle_grammar(services, request, ask)
    context = generation_context(
        services, request, ask.card, sampling, params, completion_id, ask.grammar
    )
    if not is_awaited:
        context = msgspec.structs.replace(context, queue_timeout_s=None)
    chat = await chat_request(services, request, ask, context)
    pump = await services.begin(ticket, params)
    pump.reports_progress = sampling.reports_progress
    if is_awaited:
        pump.watch(request.receive)
    sources = await pump.open(opener or services.backend, [chat])
    pump.read(sources if follow is None else [follow(source) for source in sources])
    return pump


async def loaded_messages(
    services: Services, card: ModelCard, messages: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    """Check that the model reads images, if there are any, and fetch those on the web."""
    index = next((i for i, message in enumerate(messages) if message.get("images")), None)
    if index is None:
        return messages
    what = f"does not read images, or its backend ({card.backend}) can't"
    services.require(card, "images", f"messages[{index}].content", what)
    # Imported late, because few requests have images.
    from engine.servers.serving.remote_images import with_loaded_images

    return await with_loaded_images(messages, services.settings.server.image_hosts)


def require_grammar(services: Services, card: ModelCard, grammar: GrammarSpec | None) -> None:
    if grammar is not None:
        what = "can't be held to a grammar by its backend"
        services.require(card, "json_schema", grammar.param, what)


def check_tools(
    services: Services, request: Request, card: ModelCard, tools: Sequence[Mapping[str, Any]]
) -> None:
    if not tools:
        return
    services.require(card, "tools", "tools", "can't call tools")
    if "tools" in card.emulated:
        services.warn(request, "tools", "emulated with a prompt, the model was not made for them")


def _without_idle_grammar(services: Services, request: Request, ask: ChatInput) -> ChatInput:
    """Drop the answer's grammar if the answer must be a tool call. Then only the tool's schema can
    be followed.
    """
    if ask.grammar is None or ask.tool_choice.mode not in ("required", "named"):
        return ask
    what = "has no effect: tool_choice makes every answer a tool call"
    services.warn(request, ask.grammar.param, what)
    return replace(ask, grammar=None)


def warn_of_cache_key(services: Services, request: Request, key: str | None) -> None:
    """Warn that `prompt_cache_key` has no effect. Using it as a salt would only lower the hit rate
    of the prefix cache.
    """
    if key is not None:
        services.warn(request, "prompt_cache_key", "is not needed, every prefix is cached")


def known_options(
    services: Services, request: Request, card: ModelCard, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Keep the options that the model's chat template reads. Warn the client about all other
    options.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in card.template_options:
            options[name] = value
        else:
            place = f"chat_template_kwargs.{name[:64]}"
            services.warn(request, place, "has no effect on this model's template")
    return options


def effort_options(
    services: Services, request: Request, card: ModelCard, effort: str | None, param: str
) -> dict[str, Any]:
    """Chat template options for a reasoning effort: the template's own option, and its switch for
    thinking. Warns the client if the model's template has no levels.
    """
    if effort is None:
        return {}
    is_off = effort in ("none", "minimal")
    switch = thinking_switch(card, not is_off)
    level = next((name for name in _LEVELS if name in card.template_options), None)
    if level is not None:
        if effort in _ABOVE_HIGH:
            services.warn(request, param, f"{effort} was lowered to high")
            effort = "high"
        return {level: effort} | switch
    if not (is_off and switch) and (effort != "none" or "reasoning" in card.capabilities):
        services.warn(request, param, f"{effort} can't be set for this model")
    return switch


def thinking_options(
    services: Services, request: Request, card: ModelCard, on: bool | None
) -> dict[str, Any]:
    """Chat template options that turn thinking on or off. Warns the client if the template has no
    such option, unless the model does not think anyway.
    """
    if on is None:
        return {}
    switch = thinking_switch(card, on)
    if not switch and (on or "reasoning" in card.capabilities):
        services.warn(request, "enable_thinking", "this model's template has no such option")
    return switch


def thinking_switch(card: ModelCard, on: bool) -> dict[str, Any]:
    """The template option that turns thinking on or off; empty if the template has none."""
    for name, if_on, if_off in _SWITCHES:
        value = if_on if on else if_off
        if name in card.template_options and value is not None:
            return {name: value}
    return {}
