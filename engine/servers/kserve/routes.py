"""Routes of the Open Inference Protocol: health, metadata, `infer`, `generate`, `generate_stream`
and the index of models. A model's only version is "1"; paths may name it.
"""

import functools
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine import __version__
from engine.core.errors import NotFoundError
from engine.core.interfaces.backend import ModelCard
from engine.servers.access.auth import principal_of
from engine.servers.http.errors import describe, problem
from engine.servers.kserve.answers import HEADER_LENGTH, OUTPUTS, VERSION, GenerateStream, Results
from engine.servers.kserve.schema import (
    PROMPT,
    InferBody,
    TextBody,
    decode_infer,
    spread,
)
from engine.servers.ops.probes import is_accepting, live_response, status_response
from engine.servers.schema.body import parse_body, validated
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.prompts import Prompts, open_prompts
from engine.servers.serving.services import Services, json_bytes, json_response
from engine.servers.serving.sse import answer_counted

EXTENSIONS = ("binary_tensor_data", "generate", "model_repository", "parameters")
MODEL = "/v2/models/{name:path}"
MODEL_VERSION = f"{MODEL}/versions/{{version}}"
# Inputs besides the prompt are optional, and every sampling parameter is one. These are the ones
# that clients of other LLM servers send.
INPUTS = {PROMPT: "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "max_tokens": "INT32"}


def add_kserve_routes(app: FastAPI, services: Services) -> None:
    _add_server_routes(app, services)
    # The longer path is first, because `{name:path}` matches it too.
    for prefix in (MODEL_VERSION, MODEL):
        _add_inference_routes(app, services, prefix)
        _add_metadata_routes(app, services, prefix)


def _add_server_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v2")
    async def server_metadata() -> Response:
        return json_response(
            {"name": "engine", "version": __version__, "extensions": list(EXTENSIONS)}
        )

    @app.get("/v2/health/live")
    async def live() -> Response:
        return live_response(services.backend.health().alive)

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        return _readiness(services)

    @app.post("/v2/repository/index")
    async def repository_index(request: Request) -> Response:
        is_ready = is_accepting(services)
        state = {"state": "READY"} if is_ready else {"state": "UNAVAILABLE", "reason": "not ready"}
        cards = services.models_for(principal_of(request))
        found = [{"name": card.id, "version": VERSION} | state for card in cards]
        return json_bytes(msgspec.json.encode(found))


def _add_metadata_routes(app: FastAPI, services: Services, prefix: str) -> None:
    @app.get(f"{prefix}/ready", name=f"ready {prefix}")
    async def model_ready(request: Request, name: str, version: str = VERSION) -> Response:
        _find(services, request, name, version)
        return _readiness(services)

    @app.get(prefix, name=f"metadata {prefix}")
    async def model_metadata(request: Request, name: str, version: str = VERSION) -> Response:
        return json_response(_metadata(_find(services, request, name, version)))


def _add_inference_routes(app: FastAPI, services: Services, prefix: str) -> None:
    admitted = Annotated[Ticket, Depends(services.admitted)]

    @app.post(f"{prefix}/infer", name=f"infer {prefix}")
    async def infer(
        request: Request, ticket: admitted, name: str, version: str = VERSION
    ) -> Response:
        asked, body = await _read_infer(services, request)
        if asked.model_name not in (None, name):
            rule = f"should be {name}, as in the path, got {describe(asked.model_name)}"
            raise problem("model_name", rule)
        if body.stream:
            raise problem("stream", "is for generate_stream, and for gRPC's ModelStreamInfer")
        card, pump = await _open(services, request, ticket, body, name, version)
        results = await Results.collect(pump, services.backend)
        return results.inferred(asked, card)

    @app.post(f"{prefix}/generate", name=f"generate {prefix}")
    async def generate(
        request: Request, ticket: admitted, name: str, version: str = VERSION
    ) -> Response:
        body = await _read_generate(services, request)
        if body.stream:
            raise problem("stream", "is for generate_stream")
        card, pump = await _open(services, request, ticket, body, name, version)
        results = await Results.collect(pump, services.backend)
        return json_bytes(results.generated(body, card))

    @app.post(f"{prefix}/generate_stream", name=f"generate_stream {prefix}")
    async def generate_stream(
        request: Request, ticket: admitted, name: str, version: str = VERSION
    ) -> Response:
        body = await _read_generate(services, request)
        if len(body.prompts) != 1:
            raise problem(PROMPT, f"should be one text for a stream, got {len(body.prompts)}")
        card, pump = await _open(services, request, ticket, body, name, version)
        pump.joins_ends = True
        return await answer_counted(
            pump, services.backend, lambda lengths: GenerateStream(body, card, pump, lengths[0])
        )


def _readiness(services: Services) -> Response:
    is_ready = is_accepting(services)
    return status_response("ready" if is_ready else "not ready", ok=is_ready)


def _find(services: Services, request: Request, name: str, version: str) -> ModelCard:
    card = services.find_model(name, principal_of(request))
    if version != VERSION:
        raise NotFoundError(
            f"{card.id} has version {VERSION} only, not {describe(version)}.", param="version"
        )
    return card


def _metadata(card: ModelCard) -> dict[str, Any]:
    def described(kinds: dict[str, str]) -> list[dict[str, Any]]:
        return [
            {"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in kinds.items()
        ]

    return {
        "name": card.id,
        "versions": [VERSION],
        "platform": "engine",
        "inputs": described(INPUTS),
        "outputs": described(OUTPUTS),
    }


async def _read_infer(services: Services, request: Request) -> tuple[InferBody, TextBody]:
    announced = request.headers.get(HEADER_LENGTH)
    if announced is not None and not (announced.isdecimal() and len(announced) < 12):
        raise problem(HEADER_LENGTH, f"should be a number of bytes, got {describe(announced)}")
    decode = functools.partial(decode_infer, None if announced is None else int(announced))
    on_read = functools.partial(services.note_words, request)

    def parse(raw: dict[str, Any]) -> tuple[InferBody, TextBody]:
        asked = validated(InferBody, raw)
        return asked, parse_body(TextBody, asked.words(), on_read)

    # Triton's clients send no Content-Type.
    return await services.read_as(request, parse, any_type=True, decode=decode)


async def _read_generate(services: Services, request: Request) -> TextBody:
    on_read = functools.partial(services.note_words, request)
    return await services.read_as(
        request, lambda raw: parse_body(TextBody, spread(raw), on_read), any_type=True
    )


async def _open(
    services: Services, request: Request, ticket: Ticket, body: TextBody, name: str, version: str
) -> tuple[ModelCard, EventPump]:
    card = services.choose_model(request, name)
    if version != VERSION:
        _find(services, request, card.id, version)
    prompts = Prompts(
        texts=body.prompts,
        field=PROMPT,
        prefix="infer",
        params=body.params(card),
        grammar=body.structured_outputs,
        parse_special=body.parse_special,
        echo=body.echoes,
    )
    return card, await open_prompts(services, request, ticket, card, body, prompts)
