"""POST /v1/embeddings, and the function that computes embeddings, which rerank and score use too.

Requests for embeddings use an `EventPump`, like requests for text. So admission, deadlines, drains,
disconnects and metrics work as for all other requests.
"""

import asyncio
import base64
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import Depends, FastAPI
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    Embeddings,
    EmbedRequest,
    Event,
    FinishEvent,
    ModelCard,
    TextPair,
    UsageEvent,
)
from engine.servers.access.auth import principal_of
from engine.servers.http.errors import check_keys, describe, problem
from engine.servers.http.request_log import record_of
from engine.servers.schema import fields
from engine.servers.serving.admission import Ticket
from engine.servers.serving.generation import note_end_user, priority_of, queue_timeout_s
from engine.servers.serving.services import Services, new_completion_id

MAX_INPUTS = 2_048
MAX_DIMENSIONS = 2**20


def _parse_inputs(value: Any, name: str) -> tuple[fields.Prompt, ...]:
    if isinstance(value, str | dict) or (
        isinstance(value, list) and value and type(value[0]) is int
    ):
        return (_parse_one(value, name),)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        rule = f"should be text, token ids, or a list of 1 to {MAX_INPUTS} of either"
        raise problem(name, f"{rule}, got {describe(value)}")
    return tuple(_parse_one(item, f"{name}[{i}]") for i, item in enumerate(value))


def _parse_one(item: Any, where: str) -> fields.Prompt:
    if isinstance(item, str):
        return parse_text(item, where)
    if isinstance(item, dict):
        return parse_text(_text_of(item, where), where)
    if not isinstance(item, list) or not item:
        raise problem(where, f"should be text or token ids, got {describe(item)}")
    for token in item:
        if type(token) is not int or not 0 <= token <= fields.MAX_TOKEN_ID:
            rule = f"token ids should be integers from 0 to {fields.MAX_TOKEN_ID}"
            raise problem(where, f"{rule}, got {describe(token)}")
    return tuple(item)


def _text_of(item: dict[str, Any], where: str) -> Any:
    """The text of an object, as llama.cpp's clients send it: by name, or in parts of a content."""
    if "content" not in item:
        check_keys(item, ("prompt_string", "content"), where)
        return item.get("prompt_string")
    check_keys(item, ("content",), where)
    parts = item["content"]
    if not isinstance(parts, list):
        raise problem(f"{where}.content", f"should be a list of parts, got {describe(parts)}")
    texts = []
    for index, part in enumerate(parts):
        place = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise problem(f"{place}.type", f"should be text, got {describe(kind)}")
        check_keys(part, ("type", "text"), place)
        texts.append(parse_text(part.get("text"), f"{place}.text"))
    return "".join(texts)


def parse_text(item: Any, where: str) -> str:
    if not isinstance(item, str) or not item:
        raise problem(where, f"should be text that is not empty, got {describe(item)}")
    return item


TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_IDS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": fields.MAX_TOKEN_ID},
}
_OBJECT_SCHEMA = {
    "type": "object",
    "properties": {
        "prompt_string": TEXT_SCHEMA,
        "content": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    },
}
_ONE_SCHEMA = [TEXT_SCHEMA, _IDS_SCHEMA, _OBJECT_SCHEMA]
_INPUTS_SCHEMA = {
    "anyOf": [
        *_ONE_SCHEMA,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_INPUTS,
            "items": {"anyOf": _ONE_SCHEMA},
        },
    ]
}


class VectorsBody(BaseModel):
    """Fields that all requests for embeddings have."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    model: fields.ModelName | None = None
    priority: fields.Priority | None = None
    truncate_prompt_tokens: fields.Truncation = None
    user: fields.EndUser | None = None


def inputs_named(name: str) -> tuple[PlainValidator, WithJsonSchema]:
    """Pydantic annotations for texts or token ids in the field `name`."""
    check = PlainValidator(functools.partial(_parse_inputs, name=name))
    return check, WithJsonSchema(_INPUTS_SCHEMA)


Inputs = Annotated[tuple[fields.Prompt, ...], *inputs_named("input")]


class EmbeddingBody(VectorsBody):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    prompt_name: Annotated[str, Field(max_length=256)] | None = None


def add_embeddings_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, EmbeddingBody)
        card = services.choose_model(request, body.model)
        check_embeddings(services, request, card, body.dimensions)
        try:
            names = prompt_names(card, body.prompt_name, body.input)
            made = await embed(services, request, ticket, card, body, "embd", body.input, names)
        except InvalidRequestError as error:
            raise _with_advice(error, body.input) from None
        # Encoding many vectors is slow, so it runs in a thread.
        content = await asyncio.to_thread(_content, card, made, body)
        return Response(content, media_type="application/json")


def check_embeddings(
    services: Services, request: Request, card: ModelCard, dimensions: int | None
) -> None:
    """Check that the model gives embeddings of `dimensions` numbers. None means all of them."""
    services.require(card, "embeddings", "model", "gives no embeddings")
    if "embeddings" in card.emulated:
        text = "was made to write text; its vectors are pooled from its last layer"
        services.warn(request, "model", text)
    if dimensions is not None:
        _check_dimensions(services, request, card, dimensions)


async def embed(
    services: Services,
    request: Request,
    ticket: Ticket,
    card: ModelCard,
    body: VectorsBody,
    kind: str,
    inputs: Sequence[fields.Prompt] | Sequence[TextPair],
    prompt_names: Sequence[str | None] = (),
) -> Embeddings:
    """Compute the embeddings of `inputs`, in order. Raises if the backend refuses the request.
    `prompt_names` is as in `EmbedRequest`.
    """
    record = record_of(request.scope)
    record.completion_id = new_completion_id(kind)
    note_end_user(request, body.user)
    timeout_s = services.settings.server.request_timeout_s
    asked = EmbedRequest(
        request_id=record.completion_id,
        model=card.id,
        inputs=tuple(inputs),
        prompt_names=tuple(prompt_names),
        priority=priority_of(services, request, card, body.priority),
        salt=principal_of(request).name,
        tenant=principal_of(request).name,
        timeout_s=timeout_s,
        queue_timeout_s=queue_timeout_s(services, request),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    made: list[Embeddings] = []

    async def events() -> AsyncIterator[Event]:
        vectors = await services.backend.embed(asked)
        made.append(vectors)
        yield FinishEvent(0, "stop")
        yield UsageEvent(prompt_tokens=vectors.prompt_tokens, completion_tokens=0, cached_tokens=0)

    pump = await ticket.begin(1, num_choices=1, max_tokens=None, timeout_s=timeout_s, writes=False)
    pump.watch(request.receive)
    pump.read([events()])
    await pump.wait_whole()
    return made[0]


def prompt_names(
    card: ModelCard, name: str | None, inputs: Sequence[fields.Prompt]
) -> tuple[str | None, ...]:
    """The prompts of the inputs, if the request names one."""
    if name is None:
        return ()
    if name not in card.prompt_names:
        known = ", ".join(card.prompt_names) or "none"
        raise InvalidRequestError(
            f"This model has no prompt {name!r}; its prompts are: {known}.", param="prompt_name"
        )
    if not all(isinstance(each, str) for each in inputs):
        raise InvalidRequestError("A prompt can't stand before token ids.", param="prompt_name")
    return (name,) * len(inputs)


def usage_body(made: Embeddings) -> dict[str, int]:
    return {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}


def shortened(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first `dimensions` numbers of each vector, scaled to unit length."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    return unit_rows(vectors[:, :dimensions])


def unit_rows(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


def _check_dimensions(
    services: Services, request: Request, card: ModelCard, dimensions: int
) -> None:
    whole = card.num_dimensions
    if whole is None or dimensions > whole:
        has = "an unknown number" if whole is None else str(whole)
        raise InvalidRequestError(
            f"dimensions is {dimensions}; this model's vectors have {has}, and can only be "
            "shortened.",
            param="dimensions",
        )
    if dimensions < whole:
        text = f"emulated: the first {dimensions} of {whole} numbers, scaled to unit length"
        services.warn(request, "dimensions", text)


def _with_advice(
    error: InvalidRequestError, inputs: Sequence[fields.Prompt]
) -> InvalidRequestError:
    """Add advice to an error about token ids. Invalid token ids usually come from another model's
    tokenizer.
    """
    are_ids = any(not isinstance(each, str) for each in inputs)
    if not are_ids or error.error_code == "context_length_exceeded":
        return error
    return InvalidRequestError(
        f"{error.message} If these ids were made by tiktoken, as LangChain's OpenAIEmbeddings "
        "does, send text instead: there, set check_embedding_ctx_length=False.",
        param=error.param,
        code=error.error_code,
    )


def _content(card: ModelCard, made: Embeddings, body: EmbeddingBody) -> bytes:
    vectors = shortened(made.vectors, body.dimensions)
    # Each vector is encoded separately, so that other threads can take the GIL in between.
    items = [_item(i, row, body.encoding_format) for i, row in enumerate(vectors)]
    rest = {"model": card.id, "usage": usage_body(made)}
    opening, closing = b'{"object":"list","data":[', b"]," + msgspec.json.encode(rest)[1:]
    return opening + b",".join(items) + closing


def _item(index: int, vector: NDArray[np.float32], encoding: str | None) -> bytes:
    values = encoded_vector(vector, encoding)
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": values})


def encoded_vector(vector: NDArray[np.float32], encoding: str | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
