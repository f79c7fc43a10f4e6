"""POST /v1/chat/completions, /v1/completions and /v1/fim/completions, whole or streamed.

In the last two, each prompt becomes a separate backend request. Choice `p * n + i` of the answer is
choice `i` of prompt `p`. With `best_of`, that many candidates are generated per prompt. The `n`
candidates with the highest mean log-probability per token are returned. Usage counts the tokens of
all candidates.
"""

import functools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    CompletionRequest,
    Event,
    FinishEvent,
    ModelCard,
    ReasoningEvent,
    TextEvent,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.servers.openai.beam_fields import interp_answer, special_opener
from engine.servers.openai.format import (
    ChatStream,
    Choice,
    Collected,
    CompletionStream,
    Envelope,
    chat_body,
    collect,
    completion_body,
    new_envelope,
)
from engine.servers.openai.schema import ChatBody, CompletionBody, FimBody, OpenAIBody
from engine.servers.openai.token_fields import adapted, with_token_params
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.generation import (
    NO_TEXT,
    ChatInput,
    Follow,
    chat_model,
    effort_options,
    known_options,
    open_chat,
    open_generation,
    require_grammar,
    thinking_options,
    warn_of_cache_key,
)
from engine.servers.serving.prompts import parses_special
from engine.servers.serving.services import Services, json_bytes, new_completion_id
from engine.servers.serving.sse import StreamFormat, answer_counted, answer_streaming


def add_chat_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/chat/completions")
    async def chat(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body, sent = await services.read_with(request, ChatBody, "messages")
        card = chat_model(services, request, body.model, "messages")
        params = body.params(card)
        if body.tells_tokens:
            params = await with_token_params(services, card, body, params)
        ask = chat_ask(services, request, body, card)
        completion_id = new_completion_id("chatcmpl")
        envelope: Envelope | None = None
        named_tool = ask.tool_choice.mode == "named"
        follow = chat_follow(services, request, body)
        if body.store:
            # Imported late, because few clients store their chats.
            from engine.servers.openai.stored_chats import storing

            envelope = new_envelope(completion_id, card)
            follow = await storing(services, request, body, sent, envelope, named_tool, follow)
        opener = None
        if body.interp is not None or body.use_beam_search:
            opener = special_opener(services, request, body, card, params)
        pump = await open_chat(
            services, request, ticket, ask, body, params, completion_id, follow, opener
        )
        envelope = envelope or new_envelope(completion_id, card)
        if body.stream:
            if tells_tokens(body, pump):
                from engine.servers.openai.token_streams import TokenChatStream

                options = (params.n, body.include_usage, named_tool)
                stream: ChatStream = TokenChatStream(envelope, *options, body.tokens, pump)
            else:
                stream = ChatStream(envelope, params.n, body.include_usage, named_tool)
            stream.opens_with_null = services.answers_as_llamacpp(request)
            return await stream_chunks(services, pump, stream, body)
        collected = await collect(pump, params.n)
        return json_bytes(
            chat_body(
                envelope,
                collected,
                pump.usage,
                tokens=body.tokens,
                named_tool=named_tool,
                metadata=body.metadata,
                reports=await chat_reports(services, request, body, card, pump),
                prompt_ids=pump.prompts[0],
                interp=await interp_answer(opener),
            )
        )


def chat_follow(services: Services, request: Request, body: ChatBody) -> Follow | None:
    """Changes the events of a chat as its parameters say. None if there is nothing to change."""
    echo = ""
    if body.echo:
        last = body.messages[-1]
        if last["role"] == "assistant":
            echo = last["content"] or ""
        else:
            services.warn(request, "echo", "has no effect, the last message is not an answer")
    tokens = body.tokens
    if body.include_reasoning is False:
        return lambda source: adapted(_without_reasoning(source), tokens, echo, body.num_choices)
    if echo or tokens.shows_stop:
        return lambda source: adapted(source, tokens, echo, body.num_choices)
    return None


def tells_tokens(body: ChatBody | CompletionBody, pump: EventPump) -> bool:
    """Whether the client wants vLLM's chunks, which few do. If so, tells the pump."""
    tokens = body.tokens
    pump.joins_ends = (
        tokens.has_ids or tokens.names_ids or (body.include_usage and body.continuous_usage)
    )
    return pump.joins_ends


def whole_timings(body: OpenAIBody, pump: EventPump) -> dict[str, Any]:
    """The timings of a whole answer, if the client wants them."""
    if not body.timings_per_token:
        return {}
    from engine.servers.openai.reports import timings  # few requests want reports

    return {"timings": timings(pump.usage)}


async def chat_reports(
    services: Services, request: Request, body: ChatBody, card: ModelCard, pump: EventPump
) -> dict[str, Any]:
    """What llama.cpp tells about a whole answer besides it: the timings, and the prompt."""
    found = whole_timings(body, pump)
    is_verbose = body.verbose
    if is_verbose is None and services.settings.logging.level == "debug":
        is_verbose = services.answers_as_llamacpp(request)
    ids = pump.prompts[0] if is_verbose else None
    if ids is not None:
        prompt = await services.backend.detokenize(ids, model=card.id)
        found["__verbose"] = {"prompt": prompt, "tokens_evaluated": len(ids)}
    return found


async def stream_chunks(
    services: Services, pump: EventPump, stream: ChatStream | CompletionStream, body: OpenAIBody
) -> Response:
    """Start a stream of chunks, with the usage so far in each of them if the client wants it, and
    with llama.cpp's reports. For chats and completions.
    """

    def reporting(inner: StreamFormat) -> StreamFormat:
        if not body.reports_progress:
            return inner
        from engine.servers.openai.reports import ReportingStream  # few requests want reports

        return ReportingStream(
            inner,
            stream,
            pump,
            with_progress=bool(body.return_progress),
            with_timings=bool(body.timings_per_token),
        )

    if not (body.include_usage and body.continuous_usage):
        return await answer_streaming(pump, reporting(stream))
    from engine.servers.openai.token_streams import RunningUsage

    return await answer_counted(
        pump, services.backend, lambda lengths: reporting(RunningUsage(stream, pump, lengths))
    )


def chat_ask(services: Services, request: Request, body: ChatBody, card: ModelCard) -> ChatInput:
    check_structure(services, request, body, card)
    if services.answers_as_llamacpp(request):
        body = body.with_begun_answer()
    choice, tools = body.choice_of_tools
    return ChatInput(
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
    if body.return_progress and not body.stream:
        services.warn(request, "return_progress", "has no effect on an answer that is not streamed")
    if body.reports_progress and "return_progress" in card.lacks:
        services.warn(request, "return_progress", f"its backend ({card.backend}) reports none")
    if body.continuous_usage and not body.include_usage:
        param = "stream_options.continuous_usage_stats"
        services.warn(request, param, "has no effect without include_usage")


def template_options(
    services: Services, request: Request, body: ChatBody, card: ModelCard
) -> dict[str, Any]:
    """Options for the chat template. `chat_template_kwargs` overrides `reasoning_effort`, which
    overrides `enable_thinking`.
    """
    given = known_options(services, request, card, body.chat_template_kwargs)
    if body.verbosity is not None:
        services.warn(request, "verbosity", "can't be set for this model")
    if body.documents:
        if "documents" not in card.template_options:
            raise InvalidRequestError(
                f"documents can't be used here: the template of {card.id} does not read them.",
                param="documents",
                code="unsupported_parameter",
            )
        given["documents"] = body.documents
    effort = effort_options(services, request, card, body.reasoning_effort, "reasoning_effort")
    return thinking_options(services, request, card, body.enable_thinking) | effort | given


async def _without_reasoning(source: AsyncIterator[Event]) -> AsyncIterator[Event]:
    async for event in source:
        if not isinstance(event, ReasoningEvent):
            yield event


NO_SUFFIX = "was not made to fill in the text before a suffix"


def add_completions_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/completions")
    async def completions(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, CompletionBody)
        card = services.choose_model(request, body.model)
        services.require(card, "completions", "prompt", NO_TEXT)
        if body.suffix:
            services.require(card, "suffix", "suffix", NO_SUFFIX)
        check_structure(services, request, body, card)
        parses = await parses_special(services, request, card, body.parse_special, body.prompt)
        params = await with_token_params(services, card, body, backend_params(body, card))
        completion_id = new_completion_id("cmpl")
        opener = special_opener(services, request, body, card, params, len(body.prompt))
        pump = await open_generation(
            *(services, request, ticket, card, body, params, completion_id),
            completion_prompts(body, parses, echoes=bool(body.echo) or params.score_prompt),
            grammar=body.grammar,
            follow=completion_follow(body),
            opener=opener,
        )
        envelope = new_envelope(completion_id, card)
        num_candidates = len(body.prompt) * params.n
        if body.stream:
            options = (num_candidates, body.include_usage)
            if tells_tokens(body, pump):
                from engine.servers.openai.token_streams import TokenCompletionStream

                stream: CompletionStream = TokenCompletionStream(
                    envelope, *options, body.tokens, pump
                )
            else:
                stream = CompletionStream(envelope, *options)
            return await stream_chunks(services, pump, stream, body)
        collected = await collect(pump, num_candidates)
        return json_bytes(
            completion_body(
                envelope,
                best_choices(collected, params.n, body.num_choices),
                pump.usage,
                tokens=body.tokens,
                metadata=body.metadata,
                reports=whole_timings(body, pump),
                prompts=pump.prompts,
                interp=await interp_answer(opener),
            )
        )


def add_fim_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/fim/completions")
    async def fim(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        """Mistral's API for filling in the middle. Its answers have the form of chats."""
        body = await services.read(request, FimBody)
        card = services.choose_model(request, body.model)
        services.require(card, "completions", "prompt", NO_TEXT)
        if body.suffix:
            services.require(card, "suffix", "suffix", NO_SUFFIX)
        check_structure(services, request, body, card)
        parses = await parses_special(services, request, card, body.parse_special, [body.prompt])
        params = body.params(card)
        completion_id = new_completion_id("fim")
        prompt = functools.partial(
            CompletionRequest,
            prompt=body.prompt,
            suffix=body.suffix or None,
            parse_special=parses,
            add_special_tokens=body.add_special_tokens is not False,
        )
        pump = await open_generation(
            *(services, request, ticket, card, body, params, completion_id),
            [prompt],
            grammar=body.grammar,
        )
        envelope = new_envelope(completion_id, card)
        if body.stream:
            stream = ChatStream(envelope, params.n, body.include_usage)
            return await stream_chunks(services, pump, stream, body)
        collected = await collect(pump, params.n)
        reports = whole_timings(body, pump)
        return json_bytes(
            chat_body(envelope, collected, pump.usage, metadata=body.metadata, reports=reports)
        )


def completion_prompts(
    body: CompletionBody, parse_special: bool, *, echoes: bool
) -> list[functools.partial[CompletionRequest]]:
    """One backend request for each prompt."""
    return [
        functools.partial(
            CompletionRequest,
            prompt=prompt,
            suffix=body.suffix or None,
            parse_special=parse_special,
            add_special_tokens=body.add_special_tokens is not False,
            echo=echoes,
        )
        for prompt in body.prompt
    ]


def completion_follow(body: CompletionBody) -> Follow | None:
    """Changes the events of a completion. None if there is nothing to change."""
    tokens = body.tokens
    is_adapted = tokens.shows_stop or body.prompt_logprobs is not None
    if body.only_echoes:
        return lambda source: (
            adapted(_prompt_only(source), tokens) if is_adapted else _prompt_only(source)
        )
    return (lambda source: adapted(source, tokens)) if is_adapted else None


def backend_params(body: CompletionBody, card: ModelCard) -> SamplingParams:
    """Sampling parameters for the backend. With `best_of`, they request more choices than the
    client gets.
    """
    params = body.params(card)
    if body.echo and body.logprobs is not None:
        params = msgspec.structs.replace(params, score_prompt=True)
    num_candidates = params.n if body.use_beam_search else body.best_of or params.n
    if num_candidates > params.n:
        logprobs = params.logprobs or 0  # the candidates are ranked by their logprobs
        params = msgspec.structs.replace(params, n=num_candidates, logprobs=logprobs)
    return params


def best_choices(collected: Collected, num_candidates: int, num_wanted: int) -> Sequence[Choice]:
    """The `num_wanted` best candidates of each prompt, best first. If all candidates are wanted,
    they keep their order.
    """
    if num_candidates == num_wanted:
        return collected.choices
    chosen: list[Choice] = []
    for first in range(0, len(collected.choices), num_candidates):
        candidates = collected.choices[first : first + num_candidates]
        chosen += sorted(candidates, key=lambda each: -each.mean_logprob)[:num_wanted]
    return chosen


async def _prompt_only(source: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Pass on only the echoed prompt, for `max_tokens` 0. Backends generate at least one token,
    which is dropped.
    """
    echoed: set[int] = set()
    async for event in source:
        if isinstance(event, TextEvent):
            if event.choice not in echoed:
                echoed.add(event.choice)
                yield event
        elif isinstance(event, FinishEvent):
            yield FinishEvent(event.choice, "length")
        elif isinstance(event, UsageEvent):
            yield msgspec.structs.replace(event, completion_tokens=0)
