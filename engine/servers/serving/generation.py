"""Submits prompts and conversations to the backend, for all APIs that generate text.

`open_generation` does it for every route. `open_chat` prepares a conversation for it: each chat API
parses its request body into a `ChatInput`. If the model does not support a feature that the
`ChatInput` uses, the request is refused or the client gets a warning. So all APIs make the same
checks with the same messages.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request

from engine.core.grammar.spec import UNCHECKED, unchecked_places
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    GenerationContext,
    GrammarSpec,
    ModelCard,
    ToolChoice,
)
from engine.core.interfaces.request import TRUNCATING_FIELDS, UNSHARED, SamplingParams
from engine.servers.access.auth import is_acting, principal_of
from engine.servers.http.request_log import record_of
from engine.servers.schema.body import SamplingBody
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump, Opener
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

REPLACED_BY_MIROSTAT = (*TRUNCATING_FIELDS, "min_keep", "samplers")
_DEFAULT_PARAMS = SamplingParams()
# The lowest priority (the largest number), so that lines of batches and other offline work run
# after all requests of clients.
OFFLINE_PRIORITY = 100
# Names that clients use for sampling parameters, if they have other names here.
_SENT_AS = {"text_bias": "logit_bias"}
# Keywords of a schema that a warning names at most, and how much of a place.
MAX_PLACES = 3
MAX_PLACE_CHARS = 100
SESSION_HEADER = "x-session-id"

# A function that wraps a stream of events, for example to store the answer at its end.
Follow = Callable[[AsyncIterator[Event]], AsyncIterator[Event]]

# Makes the backend's request of one prompt, when its context is known.
NewRequest = functools.partial[ChatRequest] | functools.partial[CompletionRequest]


async def open_generation(
    services: Services,
    request: Request,
    ticket: Ticket,
    card: ModelCard,
    body: SamplingBody,
    params: SamplingParams,
    completion_id: str,
    prompts: Sequence[NewRequest],
    *,
    grammar: GrammarSpec | None = None,
    follow: Follow | None = None,
    opener: Opener | None = None,
    is_watched: bool = True,
    has_queue_timeout: bool = True,
) -> EventPump:
    """Submit the prompts of a request to the backend, and wait until the backend accepts them.
    Returns the `EventPump` that reads the events of all answers.

    If `follow` is given, it wraps the events of each prompt, in the order of the prompts. If
    `opener` is given, it takes the prompts in the backend's place. If not `is_watched`, the request
    continues when the client disconnects.
    """
    await _warn_of_unchecked(services, request, grammar)
    context = _context(services, request, card, body, params, completion_id, grammar)
    if not has_queue_timeout:
        context = msgspec.structs.replace(context, queue_timeout_s=None)
    if len(prompts) == 1:
        asked = [prompts[0](context=context)]
    else:
        asked = [new(context=_nth(context, index)) for index, new in enumerate(prompts)]
    pump = await ticket.begin(
        len(asked),
        num_choices=params.n,
        max_tokens=params.max_tokens,
        timeout_s=services.settings.server.request_timeout_s,
    )
    pump.reports_progress = body.reports_progress
    if is_watched:
        pump.watch(request.receive)
    sources = await pump.open(opener or services.backend, asked)
    pump.read(sources if follow is None else [follow(source) for source in sources])
    return pump


def _context(
    services: Services,
    request: Request,
    card: ModelCard,
    body: SamplingBody,
    params: SamplingParams,
    completion_id: str,
    grammar: GrammarSpec | None = None,
) -> GenerationContext:
    """Everything that the backend needs besides the prompt: sampling parameters, model, tenant,
    salt and time limits. Also sets fields of the request's log line.
    """
    _check_params(services, request, card, body, params)
    principal = principal_of(request)
    record = record_of(request.scope)
    record.completion_id = completion_id
    record.accepted_at = time.monotonic()
    record.tenant = principal.name
    record.metadata = body.metadata or None
    note_end_user(request, body.end_user)
    salt = principal.name
    if body.cache_salt is not None:
        salt = principal.digest(body.cache_salt)
    if body.cache_prompt is False:
        salt = UNSHARED + secrets.token_hex(16)
    return GenerationContext(
        request_id=completion_id,
        params=params,
        model=card.id,
        session=_session(request, body),
        priority=priority_of(services, request, card, body.priority),
        salt=salt,
        tenant=principal.name,
        timeout_s=services.settings.server.request_timeout_s,
        queue_timeout_s=queue_timeout_s(services, request),
        grammar=grammar,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        expected=body.expected_text,
        notes=services.history.notes_of(record),
    )


async def _warn_of_unchecked(
    services: Services, request: Request, grammar: GrammarSpec | None
) -> None:
    """Warn about keywords of a schema that no grammar can enforce. A thread looks for them, because
    that takes as long as compiling the schema.
    """
    if grammar is None or not any(keyword in grammar.source for keyword in UNCHECKED):
        return
    places = await asyncio.to_thread(unchecked_places, grammar)
    places = [place.removeprefix(f"{grammar.param}.") for place in places]
    if places:
        more = f" and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
        named = ", ".join(place[:MAX_PLACE_CHARS] for place in places[:MAX_PLACES])
        services.warn(request, grammar.param, f"{named}{more} not enforced, check the answer")


def _nth(context: GenerationContext, index: int) -> GenerationContext:
    """The context of one of several prompts of a request. Only the first prompt has a queue
    timeout, because the others may have to wait for it.
    """
    return msgspec.structs.replace(
        context,
        request_id=f"{context.request_id}-{index}",
        queue_timeout_s=context.queue_timeout_s if index == 0 else None,
    )


def priority_of(services: Services, request: Request, card: ModelCard, asked: int | None) -> int:
    """The request's priority. Warns the client if the backend ignores priorities. This is no
    error, because a priority is only a hint.
    """
    if asked and "priority" in card.lacks:
        services.warn(request, "priority", f"has no effect, its backend ({card.backend}) has none")
    if asked is not None:
        return asked
    return OFFLINE_PRIORITY if is_acting(request.scope) else 0


def queue_timeout_s(services: Services, request: Request) -> float | None:
    """Max seconds that the request may wait in the queue for its first step. None for batches
    and other offline work, for which no client waits.
    """
    is_own = is_acting(request.scope)
    return None if is_own else services.settings.server.queue_timeout_s


def note_end_user(request: Request, user: str | None) -> None:
    """Write a hash of the end user's name to the request log, so that abuse can be traced
    without storing the name.
    """
    if user:
        digest = principal_of(request).digest(user)
        record_of(request.scope).user_hash = digest[:16]


def _check_params(
    services: Services,
    request: Request,
    card: ModelCard,
    body: SamplingBody,
    params: SamplingParams,
) -> None:
    """Refuse sampling parameters that the model's backend lacks. Warn about those that it
    emulates, and about samplers that Mirostat replaces, if the client has sent them.
    """
    for name in REPLACED_BY_MIROSTAT if params.mirostat else ():
        if getattr(body, name) not in (None, getattr(_DEFAULT_PARAMS, name)):
            services.warn(request, name, "has no effect, mirostat replaces it")
    if not (card.lacks or card.emulated):
        return
    for name in SamplingParams.__struct_fields__:
        if getattr(params, name) == getattr(_DEFAULT_PARAMS, name):
            continue
        if name in card.lacks:
            what = f"is answered by a backend ({card.backend}) that has no such parameter"
            services.require(card, name, _SENT_AS.get(name, name), what)
        elif name in card.emulated:
            services.warn(request, name, f"emulated, for its backend ({card.backend}) lacks it")


def _session(request: Request, body: SamplingBody) -> str:
    """A hash of the name that the client gave to the conversation. Empty if the client sent
    none.
    """
    named = request.headers.get(SESSION_HEADER) or body.conversation_key
    return principal_of(request).digest(named) if named else ""


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


async def chat_prompt(
    services: Services, request: Request, ask: ChatInput
) -> functools.partial[ChatRequest]:
    """The conversation for `open_generation`. Raises if the model lacks a feature that `ask`
    needs.
    """
    require_grammar(services, ask.card, ask.grammar)
    check_tools(services, request, ask.card, ask.tools)
    return functools.partial(
        ChatRequest,
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
    """Submit a conversation, as `open_generation` does. If not `is_awaited`, no client waits: the
    request has no queue timeout, and continues when the client disconnects.
    """
    ask = _without_idle_grammar(services, request, ask)
    return await open_generation(
        *(services, request, ticket, ask.card, sampling, params, completion_id),
        [await chat_prompt(services, request, ask)],
        grammar=ask.grammar,
        follow=follow,
        opener=opener,
        is_watched=is_awaited,
        has_queue_timeout=is_awaited,
    )


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
