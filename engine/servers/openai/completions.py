"""POST /v1/completions. Each prompt is a request of its own to the backend; choice
`prompt * n + i` is the i-th of that prompt.
"""

from typing import Annotated

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import CompletionRequest
from engine.servers.lifecycle import Ticket
from engine.servers.openai.format import CompletionStream, completion_body, new_envelope
from engine.servers.openai.schema import CompletionBody
from engine.servers.services import (
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
        card = services.find_model(body.model)
        params = body.params(card)
        envelope = new_envelope(new_completion_id("cmpl"), card)
        context = services.context(request, body, params, envelope.id)
        sources = [
            services.backend.complete(
                CompletionRequest(
                    context=msgspec.structs.replace(context, request_id=f"{envelope.id}-{i}"),
                    prompt=prompt,
                )
            )
            for i, prompt in enumerate(body.prompt)
        ]
        generation = services.generate(ticket, params, sources)
        num_choices = len(sources) * params.n
        if body.stream:
            stream = CompletionStream(envelope, num_choices, body.include_usage)
            return await answer_streaming(request, generation, stream)
        with_logprobs = body.logprobs is not None
        return await answer_whole(
            request,
            generation,
            num_choices,
            lambda collected, usage: completion_body(envelope, collected, usage, with_logprobs),
        )
