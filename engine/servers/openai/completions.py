"""POST /v1/completions. Each prompt is a request of its own to the backend; choice
`prompt * n + i` is the i-th of that prompt.

`best_of` asks the backend for more candidates than the `n` of which the answer consists: those of
the highest mean log-probability per token. Usage counts all of them.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import (
    CompletionRequest,
    Event,
    FinishEvent,
    ModelCard,
    TextEvent,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.servers.openai.chat import check_structure
from engine.servers.openai.format import (
    Choice,
    Collected,
    CompletionStream,
    completion_body,
    new_envelope,
)
from engine.servers.openai.schema import CompletionBody
from engine.servers.serving.admission import Ticket
from engine.servers.serving.chats import NO_TEXT
from engine.servers.serving.services import (
    Services,
    answer_streaming,
    answer_whole,
    new_completion_id,
)


def add_completions_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/completions")
    async def completions(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, CompletionBody)
        card = services.choose_model(request, body.model)
        services.require(card, "completions", "prompt", NO_TEXT)
        if body.suffix:
            what = "was not made to fill in the text before a suffix"
            services.require(card, "suffix", "suffix", what)
        check_structure(services, request, body, card)
        params = backend_params(body, card)
        envelope = new_envelope(new_completion_id("cmpl"), card)
        context = services.context(request, card, body, params, envelope.id, body.grammar)
        sources = [
            services.backend.complete(
                CompletionRequest(
                    context=msgspec.structs.replace(
                        context,
                        request_id=f"{envelope.id}-{i}",
                        # The others may wait for the first.
                        queue_timeout_s=context.queue_timeout_s if i == 0 else None,
                    ),
                    prompt=prompt,
                    suffix=body.suffix or None,
                    echo=bool(body.echo),
                )
            )
            for i, prompt in enumerate(body.prompt)
        ]
        if body.only_echoes:
            sources = [_prompt_only(source) for source in sources]
        generation = await services.generate(ticket, params, sources)
        num_candidates = len(sources) * params.n
        if body.stream:
            stream = CompletionStream(envelope, num_candidates, body.include_usage)
            return await answer_streaming(request, generation, stream)
        return await answer_whole(
            request,
            generation,
            num_candidates,
            lambda collected, usage: completion_body(
                envelope,
                best_choices(collected, params.n, body.num_choices),
                usage,
                with_logprobs=body.logprobs is not None,
                metadata=body.metadata,
            ),
        )


def backend_params(body: CompletionBody, card: ModelCard) -> SamplingParams:
    """What the backend is asked for, which can be more than the answer has."""
    params = body.params(card)
    if body.echo and body.logprobs is not None:
        params = msgspec.structs.replace(params, score_prompt=True)
    num_candidates = body.best_of or params.n
    if num_candidates > params.n:
        logprobs = params.logprobs or 0  # to compare them by
        params = msgspec.structs.replace(params, n=num_candidates, logprobs=logprobs)
    return params


def best_choices(collected: Collected, num_candidates: int, num_wanted: int) -> Sequence[Choice]:
    """The best of each prompt's candidates, best first; as they are, if all are wanted."""
    if num_candidates == num_wanted:
        return collected.choices
    chosen: list[Choice] = []
    for first in range(0, len(collected.choices), num_candidates):
        candidates = collected.choices[first : first + num_candidates]
        chosen += sorted(candidates, key=lambda each: -each.mean_logprob)[:num_wanted]
    return chosen


async def _prompt_only(source: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The echoed prompt, without the token that the backend had to add to it."""
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
