"""The documents that describe the server, held against the server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.fine_tuning.schema import JobListQuery
from engine.servers.http.listing import Query
from engine.servers.openai.schema import ChatBody, CompletionBody
from engine.servers.openapi import BODIES, BODILESS, FORMS, QUERIES, api_routes
from engine.servers.schema.dialects.parameters import PARAMETERS
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

KEY = "k" * 32
APP = create_app(make_settings(), FakeBackend(), Metrics(MODEL))


async def get(path: str, app: Any = APP, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers=headers)


async def document() -> dict[str, Any]:
    body = (await get("/openapi.json")).json()
    assert isinstance(body, dict)
    return body


def body_schema(made: dict[str, Any], path: str) -> dict[str, Any]:
    reference = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {"$ref": reference["$ref"], "components": made["components"]}


async def test_the_openapi_document_is_valid_and_has_every_route() -> None:
    made = await document()
    openapi_spec_validator.validate(made)
    described = {(method.upper(), path) for path, each in made["paths"].items() for method in each}
    assert described == set(api_routes(APP))


async def test_every_request_body_has_a_schema() -> None:
    made = await document()
    for method, path in api_routes(APP):
        if method in ("POST", "PUT", "PATCH") and path not in BODILESS:
            content = made["paths"][path][method.lower()]["requestBody"]["content"]
            assert all("schema" in each for each in content.values()), path


def test_body_and_query_tables_name_existing_routes() -> None:
    routes = set(api_routes(APP))
    assert {("POST", path) for path in (*BODIES, *FORMS)} <= routes
    assert {("GET", path) for path in QUERIES} <= routes


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ChatBody, chat_params.CompletionCreateParamsBase.__annotations__),
        (CompletionBody, completion_params.CompletionCreateParamsBase.__annotations__),
    ],
)
def test_every_parameter_of_the_openai_client_is_known(kind: Any, names: Any) -> None:
    """One that is neither followed nor refused by name would be called a typing error."""
    assert set(names) <= kind.model_fields.keys() | PARAMETERS.keys()


def test_docs_parameters_names_every_parameter() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "parameters.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", manual))
    assert ChatBody.model_fields.keys() | CompletionBody.model_fields.keys() <= named


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["a"], "logit_bias": {"1": 2}, "metadata": {"a": "b"}, "seed": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"response_format": {"type": "json_object"}, "stream_options": {"include_usage": True}},
        {"guided_choice": ["a"], "truncate_prompt_tokens": -1},
    ],
)
async def test_bodies_that_the_schema_accepts_are_accepted(fields: dict[str, Any]) -> None:
    jsonschema.validate(chat(**fields), body_schema(await document(), "/v1/chat/completions"))


@pytest.mark.parametrize(
    "fields",
    [{"n": 0}, {"stop": 5}, {"messages": []}, {"unknown": 1}, {"logit_bias": {"1": 101}}],
)
async def test_bodies_that_the_schema_refuses_are_refused(fields: dict[str, Any]) -> None:
    schema = body_schema(await document(), "/v1/chat/completions")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(chat(**fields), schema)


@pytest.mark.parametrize(
    ("path", "media_types"),
    [
        ("/v1/models", {"application/json"}),
        ("/v1/files/{file_id}/content", {"application/octet-stream"}),
        ("/generate/{request_id}/stream", {"text/event-stream"}),
        ("/metrics", {"text/plain"}),
    ],
)
async def test_responses_have_the_described_media_type(path: str, media_types: set[str]) -> None:
    operation = (await document())["paths"][path]["get"]
    assert operation["responses"]["200"]["content"].keys() == media_types


async def test_errors_have_the_described_shape() -> None:
    made = await document()
    shapes = {}
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"):
        failure = made["paths"][path]["post"]["responses"]["default"]
        shapes[path] = failure["content"]["application/json"]["schema"]["$ref"].rsplit("/")[-1]
    assert list(shapes.values()) == ["AnthropicError", "AnthropicError", "Error"]
    refused = (await get("/v1/messages/nothing")).json()
    jsonschema.validate(refused, made["components"]["schemas"]["AnthropicError"])


async def test_query_parameters_are_described() -> None:
    path = "/v1/responses/{response_id}/input_items"
    parameters = (await document())["paths"][path]["get"]["parameters"]
    places = {each["name"]: each["in"] for each in parameters}
    assert places == {"response_id": "path"} | dict.fromkeys(
        ("after", "include", "limit", "order"), "query"
    )


async def test_openapi_and_capabilities_need_the_key() -> None:
    app = create_app(make_settings(server={"api_key": KEY}), FakeBackend(), Metrics(MODEL))
    for path in ("/openapi.json", "/v1/capabilities"):
        assert (await get(path, app)).status_code == 401
        assert (await get(path, app, authorization=f"Bearer {KEY}")).status_code == 200


async def test_capabilities_follow_the_parameter_tables() -> None:
    body = (await get("/v1/capabilities")).json()
    assert body["strict"] is False
    assert "POST /v1/chat/completions" in body["endpoints"]
    parameters = body["parameters"]["/v1/chat/completions"]
    assert set(parameters["supported"]) == ChatBody.model_fields.keys()
    assert parameters["refused_unless"]["functions"] == [[]]
    assert parameters["refused_unless"].keys().isdisjoint(ChatBody.model_fields)
    llamacpp = body["dialects"]["llamacpp"]
    assert llamacpp["repeat_penalty"] == {
        "/v1/chat/completions": "translated",
        "/v1/completions": "translated",
        "/generate": "translated",
        "translated_to": "repetition_penalty",
    }
    assert body["limits"]["max_n"] == 16
    (model,) = body["models"]
    assert model["id"] == MODEL
    assert model["capabilities"]["tools"] == "native"


async def test_capabilities_list_what_each_body_supports() -> None:
    """What is called supported is never a field that exists to be refused."""
    parameters = (await get("/v1/capabilities")).json()["parameters"]
    responses = parameters["/v1/responses"]
    assert {"prompt", "max_tokens"}.isdisjoint(responses["supported"])
    assert responses["refused_unless"]["truncation"] == ["disabled"]
    assert parameters["/v1/messages"]["refused_unless"]["mcp_servers"] == [[]]
    assert parameters["/v1/embeddings"]["refused_unless"]["store"] == [False]
    assert parameters["/v1/batches"]["refused_unless"] == {}


async def test_capabilities_report_emulated_features() -> None:
    backend = FakeBackend()
    backend.set_card(emulated=("tools",))
    app = create_app(make_settings(server={"strict": True}), backend, Metrics(MODEL))
    body = (await get("/v1/capabilities", app)).json()
    assert body["strict"] is True
    assert body["models"][0]["capabilities"]["tools"] == "emulated"
    assert body["models"][0]["capabilities"]["chat"] == "native"


async def test_the_file_upload_form_matches_its_schema() -> None:
    made = await document()
    form = made["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]
    schema = form["schema"] | {"components": made["components"]}
    jsonschema.validate({"purpose": "batch", "file": "{}"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"purpose": "batch"}, schema)


BOUNDS = {
    "string": {"maxLength"},
    "integer": {"minimum", "maximum"},
    "array": {"maxItems"},
    "object": {"maxProperties"},
}


def is_bounded(schema: dict[str, Any]) -> bool:
    if "anyOf" in schema:
        return all(is_bounded(each) for each in schema["anyOf"])
    if "enum" in schema or schema["type"] in ("boolean", "null"):
        return True
    return BOUNDS[schema["type"]] <= schema.keys()


def query_models(kind: type[Query] = Query) -> Iterator[type[Query]]:
    for each in kind.__subclasses__():
        yield each
        yield from query_models(each)


async def test_every_query_parameter_has_bounds() -> None:
    await document()  # imports all routes
    models = list(query_models())
    assert JobListQuery in models
    for kind in models:
        for name, schema in kind.model_json_schema()["properties"].items():
            assert is_bounded(schema), f"{kind.__name__}.{name}: {schema}"
