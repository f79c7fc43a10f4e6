"""Rules for /v1/models, the list of models, which most user interfaces request first."""

from typing import Any
from urllib.parse import quote

from engine_tools.conformance.expect import expect, field, is_count, items, short, text
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import Target

MODELS = Group("models")
SDK = "openai-python"


async def _entries(target: Target) -> list[Any]:
    async def ask() -> list[Any]:
        return items((await target.get("/v1/models")).ok(), "data")

    return await target.once("models", ask)


@MODELS.rule(
    "MOD-01",
    "The list is an object of type list",
    client="Open WebUI",
    sees="no model to choose",
)
async def listed(target: Target) -> None:
    await _entries(target)
    body = (await target.get("/v1/models")).ok()
    expect(field(body, "object") == "list", f"object is {short(body['object'])}")


@MODELS.rule(
    "MOD-02",
    "An entry has id, object, created and owned_by",
    client=SDK,
    sees="a `Model` with None in fields that are declared as present",
)
async def entry_fields(target: Target) -> None:
    for entry in await _entries(target):
        expect(bool(text(entry, "id")), "an id is empty")
        expect(field(entry, "object") == "model", f"object is {short(entry['object'])}")
        expect(is_count(field(entry, "created")), f"created is {short(entry['created'])}")
        text(entry, "owned_by")


@MODELS.rule(
    "MOD-03",
    "A model is found by its id, slashes as they are",
    client=SDK,
    sees="models.retrieve raises NotFoundError for a model that is there",
)
async def retrieve(target: Target) -> None:
    body = (await target.get(f"/v1/models/{quote(target.model, safe='/')}")).ok()
    expect(field(body, "id") == target.model, f"id is {short(body['id'])}")


@MODELS.rule(
    "MOD-04",
    "A model is found by its id, slashes percent-encoded",
    client="openai-node",
    sees="models.retrieve raises NotFoundError for a model that is there",
)
async def retrieve_encoded(target: Target) -> None:
    body = (await target.get(f"/v1/models/{quote(target.model, safe='')}")).ok()
    expect(field(body, "id") == target.model, f"id is {short(body['id'])}")


@MODELS.rule(
    "MOD-05",
    "A model that is not there is 404 with an error object",
    client=SDK,
    sees="a wrong exception, or one without a message",
)
async def retrieve_unknown(target: Target) -> None:
    reply = await target.get("/v1/models/no-such/model-anywhere")
    expect(reply.status == 404, f"answered with {reply.summary}")
    text(reply.error, "message")


@MODELS.rule(
    "MOD-06",
    "An entry tells its context length",
    client="Continue",
    sees="the default context length, so long files are cut or refused",
    severity="advice",
)
async def context_length(target: Target) -> None:
    expect(target.context_length is not None, "no max_model_len or context_length")
