"""Rules for /v1/rerank, in the format that Cohere introduced and Continue and LiteLLM read."""

from typing import Any

from engine_tools.conformance.expect import expect, field, is_number, items, short
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import Target

PATH = "/v1/rerank"
READERS = "Continue, LiteLLM"
DOCUMENTS = ["Bread is baked in an oven.", "Paris is the capital of France.", "Cats purr."]


def body(target: Target, **fields: Any) -> dict[str, Any]:
    plain = {"model": target.model, "query": "capital of France", "documents": DOCUMENTS}
    return plain | fields


async def _missing(target: Target) -> str | None:
    if missing := await target.lacks(PATH, body(target)):
        return missing
    reply = await target.post(PATH, body(target))
    refused = 400 <= reply.status < 500
    return f"this model can't rerank: {reply.message[:120]}" if refused else None


RERANK = Group("rerank", _missing)


@RERANK.rule(
    "RRK-01",
    "Every document has its index and a relevance_score, the best first",
    client=READERS,
    sees="documents in the wrong order, or a KeyError",
)
async def results(target: Target) -> None:
    found = items((await target.post(PATH, body(target))).ok(), "results")
    indexes = sorted(field(each, "index") for each in found)
    expect(indexes == [0, 1, 2], f"indexes are {indexes}")
    scores = [field(each, "relevance_score") for each in found]
    expect(all(is_number(score) for score in scores), f"scores are {short(scores)}")
    expect(scores == sorted(scores, reverse=True), f"in the order {short(scores)}")


@RERANK.rule(
    "RRK-02", "top_n gives as many", client=READERS, sees="more context than the user allowed"
)
async def top_n(target: Target) -> None:
    found = items((await target.post(PATH, body(target, top_n=1))).ok(), "results")
    expect(len(found) == 1, f"{len(found)} results for top_n 1")


@RERANK.rule(
    "RRK-03",
    "A request without documents is refused",
    client=READERS,
    sees="a server failure after a search that found nothing",
)
async def no_documents(target: Target) -> None:
    (await target.post(PATH, {"model": target.model, "query": "x"})).refused()
