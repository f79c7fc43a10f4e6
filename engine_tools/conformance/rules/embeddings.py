"""Rules for /v1/embeddings. OpenAI's SDK requests base64 by default, and LangChain sends token
ids.
"""

import base64
import struct
from typing import Any

from engine_tools.conformance.expect import (
    REFUSALS,
    RuleFailed,
    RuleSkipped,
    expect,
    field,
    is_count,
    is_number,
    items,
    short,
)
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import Target

PATH = "/v1/embeddings"
SDK = "openai-python"
RAG = "LangChain, LlamaIndex, Open WebUI"
TEXT = "The quick brown fox"


def body(target: Target, value: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": target.model, "input": value} | fields


async def _missing(target: Target) -> str | None:
    if missing := await target.lacks(PATH, body(target)):
        return missing
    reply = await target.post(PATH, body(target))
    refused = 400 <= reply.status < 500
    return f"embeddings are refused: {reply.message[:120]}" if refused else None


EMBEDDINGS = Group("embeddings", _missing)


async def _vectors(target: Target, value: Any, **fields: Any) -> list[list[float]]:
    answer = (await target.post(PATH, body(target, value, **fields))).ok()
    return [field(entry, "embedding") for entry in items(answer, "data")]


async def _plain(target: Target) -> list[float]:
    async def ask() -> list[float]:
        return (await _vectors(target, TEXT, encoding_format="float"))[0]

    return await target.once("embedding", ask)


def _close(one: list[float], two: list[float], tolerance: float = 1e-3) -> bool:
    return len(one) == len(two) and max(map(lambda a, b: abs(a - b), one, two)) < tolerance


@EMBEDDINGS.rule(
    "EMB-01",
    "An answer is a list of embedding objects with floats",
    client=RAG,
    sees="no vectors",
)
async def shape(target: Target) -> None:
    answer = (await target.post(PATH, body(target, encoding_format="float"))).ok()
    expect(field(answer, "object") == "list", f"object is {short(answer['object'])}")
    entry = items(answer, "data")[0]
    expect(field(entry, "object") == "embedding", f"object is {short(entry['object'])}")
    expect(field(entry, "index") == 0, f"index is {short(entry['index'])}")
    vector = items(entry, "embedding")
    expect(all(is_number(each) for each in vector), f"a vector of {short(vector)}")


@EMBEDDINGS.rule(
    "EMB-02",
    "base64 holds the same vector, as little-endian 32-bit floats",
    client=SDK,
    sees="wrong vectors: base64 is what it asks for by default",
)
async def encoded(target: Target) -> None:
    answer = (await target.post(PATH, body(target, encoding_format="base64"))).ok()
    found = field(answer, "data", 0, "embedding")
    if not isinstance(found, str):
        raise RuleFailed(f"the embedding is {short(found)}, not a string")
    try:
        raw = base64.b64decode(found, validate=True)
    except ValueError:
        raise RuleFailed(f"not base64: {short(found)}") from None
    plain = await _plain(target)
    expect(len(raw) == 4 * len(plain), f"{len(raw)} bytes for {len(plain)} dimensions")
    vector = list(struct.unpack(f"<{len(plain)}f", raw))
    expect(_close(vector, plain), "base64 and float are different vectors")


@EMBEDDINGS.rule(
    "EMB-03",
    "Floats are sent when no encoding is named",
    client="clients that don't use the SDK",
    sees="a string where numbers are expected",
)
async def default_encoding(target: Target) -> None:
    vector = (await _vectors(target, TEXT))[0]
    expect(isinstance(vector, list), f"the embedding is {short(vector)}")


@EMBEDDINGS.rule(
    "EMB-04",
    "Several inputs give a vector each, in order",
    client=RAG,
    sees="documents indexed under other documents' vectors",
)
async def several(target: Target) -> None:
    texts = ["A ship on the sea", TEXT, "Taxes are due in May"]
    answer = (await target.post(PATH, body(target, texts, encoding_format="float"))).ok()
    indexes = [field(entry, "index") for entry in items(answer, "data")]
    expect(indexes == [0, 1, 2], f"indexes are {indexes}")
    same = _close(answer["data"][1]["embedding"], await _plain(target), 2e-2)
    expect(same, "the second vector is not that of the second text")
    other = _close(answer["data"][0]["embedding"], await _plain(target), 2e-2)
    expect(not other, "different texts have one vector")


@EMBEDDINGS.rule(
    "EMB-05",
    "Token ids are accepted as input",
    client="LangChain OpenAIEmbeddings",
    sees="a 400: it sends ids by default",
)
async def token_ids(target: Target) -> None:
    for value, count in (([5, 6, 7], 1), ([[5, 6, 7], [8, 9]], 2)):
        found = await _vectors(target, value, encoding_format="float")
        expect(len(found) == count, f"{len(found)} vectors, not {count}")


@EMBEDDINGS.rule(
    "EMB-06",
    "Token ids that the model has not are refused",
    client="LangChain OpenAIEmbeddings",
    sees="a crash, or vectors of nonsense: its ids are of another vocabulary",
)
async def bad_ids(target: Target) -> None:
    (await target.post(PATH, body(target, [10**8]))).refused()


@EMBEDDINGS.rule("EMB-07", "usage is there", client="LiteLLM", sees="no cost")
async def usage(target: Target) -> None:
    found = field((await target.post(PATH, body(target))).ok(), "usage")
    for name in ("prompt_tokens", "total_tokens"):
        expect(is_count(field(found, name)), f"usage.{name} is {short(found[name])}")
    expect(found["prompt_tokens"] > 0, "usage.prompt_tokens is 0")


@EMBEDDINGS.rule(
    "EMB-08",
    "The same text has the same vector",
    client=RAG,
    sees="documents that are not found again",
)
async def stable(target: Target) -> None:
    again = (await _vectors(target, TEXT, encoding_format="float"))[0]
    expect(_close(again, await _plain(target)), "two vectors of one text differ")


@EMBEDDINGS.rule(
    "EMB-09",
    "dimensions gives vectors of that length, or is refused",
    client=SDK,
    sees="vectors that don't fit the index",
)
async def dimensions(target: Target) -> None:
    reply = await target.post(PATH, body(target, encoding_format="float", dimensions=16))
    if reply.status in REFUSALS:
        return
    count = len(items(reply.ok(), "data", 0, "embedding"))
    expect(count == 16, f"{count} dimensions, not 16")


@EMBEDDINGS.rule(
    "EMB-10",
    "Vectors have the length 1",
    client="clients that use the dot product as cosine",
    sees="wrong rankings",
    severity="advice",
)
async def unit_length(target: Target) -> None:
    norm = sum(each * each for each in await _plain(target)) ** 0.5
    expect(abs(norm - 1) < 1e-2, f"a vector's length is {norm:.3f}")


@EMBEDDINGS.rule(
    "EMB-11",
    "An unknown encoding_format is refused",
    client=SDK,
    sees="floats where something else was asked for, or three failures",
)
async def bad_encoding(target: Target) -> None:
    (await target.post(PATH, body(target, encoding_format="morse"))).refused()


@EMBEDDINGS.rule(
    "EMB-12",
    "No input is refused",
    client=SDK,
    sees="InternalServerError, after the request was sent three times",
)
async def no_input(target: Target) -> None:
    (await target.post(PATH, {"model": target.model})).refused()
    (await target.post(PATH, body(target, []))).refused()


@EMBEDDINGS.rule(
    "EMB-13",
    "An empty text is no server failure",
    client=RAG,
    sees="an import that stops at an empty page",
)
async def empty_text(target: Target) -> None:
    reply = await target.post(PATH, body(target, ""))
    expect(reply.status < 500, reply.summary)


@EMBEDDINGS.rule(
    "EMB-14",
    "A text that is too long is refused",
    client=RAG,
    sees="vectors of the beginning only, or three failures",
)
async def too_long(target: Target) -> None:
    if target.context_length is None or target.context_length > 100_000:
        raise RuleSkipped("the context length is not known, or too long to exceed here")
    (await target.post(PATH, body(target, "word " * (target.context_length + 200)))).refused()
