"""`/v1/interp`: a forward pass over a prompt, the sites of a model, results and vectors."""

import asyncio
import functools
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import CompletionRequest
from engine.servers.access.auth import principal_of
from engine.servers.openai.format import collect
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody, refused
from engine.servers.serving.admission import Ticket
from engine.servers.serving.generation import NO_TEXT, open_generation
from engine.servers.serving.interp_opening import NO_TAPS, interp_opener, vector_store
from engine.servers.serving.prompts import parses_special
from engine.servers.serving.services import Services, json_response, new_completion_id


class RunBody(SamplingBody):
    """Body of `/v1/interp/run`: a prompt that is computed, without a continuation."""

    prompt: fields.OnePrompt
    model: fields.ModelName | None = None
    interp: dict[str, Any]
    n: Annotated[None, *refused("a run has one next token", 1)] = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None


def add_interp_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/interp/run")
    async def run(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        return json_response(await _run(services, request, ticket))

    @app.get("/v1/interp/sites")
    async def sites(request: Request) -> Response:
        card = services.choose_model(request, request.query_params.get("model"))
        services.require(card, "interp", "model", NO_TAPS)
        found = await services.backend.sites(model=card.id)
        return json_response({"object": "list", "model": card.id, "data": found})

    @app.get("/v1/interp/vectors")
    async def vectors() -> Response:
        found = [
            {"name": each.name, "kind": each.kind, "sites": each.sites, "size": each.size}
            for each in await asyncio.to_thread(vector_store(services).names)
        ]
        return json_response({"object": "list", "data": found})

    @app.get("/v1/interp/results/{result_id}")
    async def result(result_id: str, request: Request) -> Response:
        data = services.interp_results.get(result_id, principal_of(request).name)
        headers = {"content-disposition": 'attachment; filename="interp.safetensors"'}
        return Response(data, headers=headers, media_type="application/octet-stream")

    @app.delete("/v1/interp/results/{result_id}")
    async def delete(result_id: str, request: Request) -> Response:
        services.interp_results.delete(result_id, principal_of(request).name)
        return json_response({"id": result_id, "object": "interp.result", "deleted": True})


async def _run(services: Services, request: Request, ticket: Ticket) -> dict[str, Any]:
    body = await services.read(request, RunBody)
    card = services.choose_model(request, body.model)
    services.require(card, "completions", "prompt", NO_TEXT)
    parses = await parses_special(services, request, card, body.parse_special, [body.prompt])
    params = body.sampling(card, 1, None)
    if body.temperature is None:  # the next token is the likeliest, not a sample
        params = msgspec.structs.replace(params, temperature=0.0)
    run_id = new_completion_id("interp")
    opener = interp_opener(services, request, card, body.interp, params)
    prompt = functools.partial(
        CompletionRequest,
        prompt=body.prompt,
        parse_special=parses,
        add_special_tokens=body.add_special_tokens is not False,
    )
    pump = await open_generation(
        *(services, request, ticket, card, body, params, run_id), [prompt], opener=opener
    )
    collected = await collect(pump, 1)
    return {
        "id": run_id,
        "object": "interp.run",
        "model": card.id,
        "next_token": {
            "text": collected.choices[0].text,
            "id": next(iter(collected.choices[0].token_ids), None),
        },
        "usage": {"prompt_tokens": pump.usage.prompt_tokens},
        "interp": await opener.answer(),
    }
