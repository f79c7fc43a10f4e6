"""POST /v1/rerank (also /rerank) and /v1/score, which compare texts.

Rerankers compute a score from both texts of a pair. With sentence encoders, a score is the cosine
of the embeddings of two texts, from -1 to 1. Other models are refused, because the scores of their
hidden states would be meaningless.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import Depends, FastAPI
from numpy.typing import NDArray
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import Embeddings, ModelCard, TextPair
from engine.servers.http.errors import describe, problem
from engine.servers.http.request_log import record_of
from engine.servers.openai.embeddings import (
    MAX_INPUTS,
    TEXT_SCHEMA,
    VectorsBody,
    embed,
    parse_text,
    unit_rows,
    usage_body,
)
from engine.servers.openai.format import new_envelope
from engine.servers.schema.body import parse_body
from engine.servers.serving.admission import Ticket
from engine.servers.serving.services import Services

MAX_DOCUMENTS = MAX_INPUTS - 1  # the query is an input as well


def _parse_documents(value: Any, name: str = "documents") -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_DOCUMENTS:
        rule = f"should be a list of 1 to {MAX_DOCUMENTS} texts"
        raise problem(name, f"{rule}, got {describe(value)}")
    texts = []
    for i, item in enumerate(value):
        if isinstance(item, dict):
            if item.keys() != {"text"}:
                raise problem(f"{name}[{i}]", 'should be text, or an object with only "text"')
            item = item["text"]
        texts.append(parse_text(item, f"{name}[{i}]"))
    return tuple(texts)


def _parse_texts(name: str) -> PlainValidator:
    def parse(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (parse_text(value, name),)
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS // 2:
            rule = f"should be text, or a list of 1 to {MAX_INPUTS // 2} texts"
            raise problem(name, f"{rule}, got {describe(value)}")
        return tuple(parse_text(item, f"{name}[{i}]") for i, item in enumerate(value))

    return PlainValidator(parse)


_DOCUMENT_SCHEMA = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": TEXT_SCHEMA},
    "additionalProperties": False,
}
_DOCUMENTS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_DOCUMENTS,
    "items": {"anyOf": [TEXT_SCHEMA, _DOCUMENT_SCHEMA]},
}
_TEXTS_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            TEXT_SCHEMA,
            {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS // 2, "items": TEXT_SCHEMA},
        ]
    }
)


class RerankBody(VectorsBody):
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        tuple[str, ...], PlainValidator(_parse_documents), WithJsonSchema(_DOCUMENTS_SCHEMA)
    ]
    top_n: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None  # 0 means all, as in vLLM
    return_documents: bool | None = None


def _parse_tei_texts(value: Any) -> tuple[str, ...]:
    return _parse_documents(value, "texts")


class TeiRerankBody(VectorsBody):
    """The body of Hugging Face's Text Embeddings Inference, which llama.cpp takes too."""

    query: Annotated[str, Field(min_length=1)]
    texts: Annotated[
        tuple[str, ...], PlainValidator(_parse_tei_texts), WithJsonSchema(_DOCUMENTS_SCHEMA)
    ]
    top_n: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    return_text: bool | None = None

    @property
    def documents(self) -> tuple[str, ...]:
        return self.texts


def _parse_rerank(raw: dict[str, Any]) -> RerankBody | TeiRerankBody:
    return parse_body(TeiRerankBody, raw) if "texts" in raw else parse_body(RerankBody, raw)


class ScoreBody(VectorsBody):
    text_1: Annotated[tuple[str, ...], _parse_texts("text_1"), _TEXTS_SCHEMA]
    text_2: Annotated[tuple[str, ...], _parse_texts("text_2"), _TEXTS_SCHEMA]

    @model_validator(mode="after")
    def _texts_pair_up(self) -> "ScoreBody":
        if len(self.text_1) not in (1, len(self.text_2)):
            rule = f"should have as many texts as text_1, which has {len(self.text_1)}"
            raise problem("text_2", f"{rule}, got {len(self.text_2)}")
        return self


def add_rerank_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/rerank")
    @app.post("/rerank")
    async def rerank(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read_as(request, _parse_rerank)
        is_tei = isinstance(body, TeiRerankBody)
        card = _comparing_model(services, request, body)
        compared = _Compared((body.query,), body.documents, "rerank" in card.capabilities)
        try:
            names = _prompt_names(card, compared)
            made = await embed(
                services, request, ticket, card, body, "rerank", compared.inputs, names
            )
        except InvalidRequestError as error:
            raise _named(error, compared, "query", "texts" if is_tei else "documents") from None
        scores = await compared.scores(made)
        # The sort is stable, so documents with equal scores keep their order.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        best = [(index, scores[index]) for index in order[: body.top_n or None]]
        answer: Any
        if isinstance(body, TeiRerankBody):
            answer = _tei_results(body, best)
        else:
            answer = {
                "id": record_of(request.scope).completion_id,
                "model": card.id,
                "results": _results(body, best),
                "usage": usage_body(made),
            }
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @app.post("/v1/score")
    async def score(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, ScoreBody)
        card = _comparing_model(services, request, body)
        compared = _Compared(body.text_1, body.text_2, "rerank" in card.capabilities)
        try:
            made = await embed(services, request, ticket, card, body, "score", compared.inputs)
        except InvalidRequestError as error:
            raise _named(error, compared, "text_1", "text_2") from None
        scores = await compared.scores(made)
        answer = new_envelope(record_of(request.scope).completion_id or "", card).fields("list")
        answer |= {
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores)
            ],
            "usage": usage_body(made),
        }
        return Response(msgspec.json.encode(answer), media_type="application/json")


def _results(body: RerankBody, best: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": score} for index, score in best
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    return results


def _tei_results(body: TeiRerankBody, best: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    shown = body.texts if body.return_text else ()
    return [
        {"index": index, "score": score} | ({"text": shown[index]} if shown else {})
        for index, score in best
    ]


@dataclass(frozen=True, slots=True)
class _Compared:
    """The inputs of the model for comparing each text of `left` with the text of `right` at the
    same place. A single text of `left` is compared with each of `right`.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    by_pairs: bool  # the model computes a score for each pair

    @property
    def inputs(self) -> tuple[str, ...] | tuple[TextPair, ...]:
        if not self.by_pairs:
            return (*self.left, *self.right)
        left = self.left * len(self.right) if len(self.left) == 1 else self.left
        return tuple(map(TextPair, left, self.right))

    async def scores(self, made: Embeddings) -> list[float]:
        if self.by_pairs:
            found: list[float] = made.vectors[:, 0].tolist()
            return found
        # Thousands of vectors would block the event loop.
        return await asyncio.to_thread(_similarities, made.vectors, len(self.left))

    def name(self, index: int, left: str, right: str) -> str:
        """The request field of an input. `left` and `right` are the fields of the texts."""
        if self.by_pairs:
            return f"{right}[{index}]"
        is_left = index < len(self.left)
        if is_left and len(self.left) == 1:
            return left
        return f"{left}[{index}]" if is_left else f"{right}[{index - len(self.left)}]"


def _prompt_names(card: ModelCard, compared: _Compared) -> tuple[str | None, ...]:
    """The prompts of a query and its documents, as sentence encoders name them."""
    if compared.by_pairs or not card.prompt_names:
        return ()
    query, document = (
        next((name for name in names if name in card.prompt_names), None)
        for names in (("query",), ("document", "passage"))
    )
    return (query, *(document,) * len(compared.right))


def _named(
    error: InvalidRequestError, compared: _Compared, left: str, right: str
) -> InvalidRequestError:
    """The error of an input, with the name of the request field instead of "input[index]"."""
    found = re.fullmatch(r"input(?:\[(\d+)\])?", error.param or "")
    if found is None or error.param is None:
        return error
    name = compared.name(int(found[1] or 0), left, right)
    message = error.message.replace(error.param, name, 1)
    return InvalidRequestError(message, param=name, code=error.error_code)


def _similarities(vectors: NDArray[np.float32], num_left: int) -> list[float]:
    """The cosines of pairs: vector `i` of the first `num_left` with vector `i` of the rest. If
    `num_left` is 1, the first vector is compared with each other vector.
    """
    left, right = np.split(unit_rows(vectors), [num_left])
    scores: list[float] = (left * right).sum(axis=1).tolist()
    return scores


def _comparing_model(services: Services, request: Request, body: VectorsBody) -> ModelCard:
    card = services.choose_model(request, body.model)
    what = (
        "was not trained to compare texts; serve a reranker or a sentence encoder, such as "
        "all-minilm-l6-v2"
    )
    services.require(card, "score", "model", what)
    return card
