"""Everything that binds an answer to a form, as the one `GrammarSpec` that the backend sees."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import GrammarSpec
from engine.servers.openai.schema import ChatBody, CompletionBody, OpenAIBody
from engine.servers.schema.body import parse_body
from engine.servers.schema.structured import MAX_CHOICES, MAX_SOURCE, read_response_format
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat
from tests.support.servers.responses_api import app_over, client_of

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}}
TOOL = {"type": "function", "function": {"name": "f"}}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA} | fields}


def grammar_of(**fields: Any) -> GrammarSpec | None:
    bodies: list[OpenAIBody] = [
        parse_body(ChatBody, chat(**fields)),
        parse_body(CompletionBody, {"model": MODEL, "prompt": "x"} | fields),
    ]
    assert bodies[0].grammar == bodies[1].grammar
    return bodies[0].grammar


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": json_schema()}, "json_schema", SCHEMA, "response_format"),
        (
            {"response_format": json_schema(strict=True, description="d")},
            "json_schema",
            SCHEMA,
            "response_format",
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"], "guided_choice"),
        ({"guided_grammar": 'start: "x"'}, "grammar", 'start: "x"', "guided_grammar"),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None}},
            "json_schema",
            SCHEMA,
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_object",
            "",
            "structured_outputs.json_object",
        ),
    ],
)
def test_structured_output_parameters_become_one_grammar_spec(
    fields: dict[str, Any], kind: str, source: Any, param: str
) -> None:
    spec = grammar_of(**fields)
    assert spec is not None
    assert (spec.kind, spec.param) == (kind, param)
    assert (spec.source if isinstance(source, str) else json.loads(spec.source)) == source


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": None, "guided_choice": None, "guided_regex": None, "guided_grammar": None},
        {"response_format": {"type": "text"}, "guided_regex": None},
    ],
)
def test_neutral_structured_output_values_give_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(schema=None)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(strict="no")}, "response_format.json_schema.strict"),
        ({"response_format": json_schema(mood=1)}, "response_format.json_schema.mood"),
        (
            {"response_format": json_schema(schema={"const": "x" * MAX_SOURCE})},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{bad"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "[" * 9999}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_grammar": "x" * (MAX_SOURCE + 1)}, "guided_grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_invalid_structured_output_parameters_are_refused_by_path(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatBody, chat(**fields))
    assert caught.value.param == param
    assert len(caught.value.message) < 500


JSON_FORMAT = {"type": "json_schema", "schema": SCHEMA}
FORCED = {
    "/v1/chat/completions": chat(
        tools=[TOOL], response_format={"type": "json_object"}, tool_choice=TOOL
    ),
    "/v1/responses": {
        "model": MODEL,
        "input": "hi",
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": JSON_FORMAT | {"name": "answer"}},
    },
    "/v1/messages": chat(
        max_tokens=9,
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
        output_config={"format": JSON_FORMAT},
    ),
}


@pytest.mark.parametrize("path", FORCED)
async def test_response_format_is_ignored_if_a_tool_call_is_required(
    path: str, tmp_path: Path
) -> None:
    backend = FakeBackend()
    async with client_of(app_over(backend, tmp_path)) as client:
        answer = await client.post(path, json=FORCED[path])
        assert answer.status_code == 200, answer.text
        assert "format: has no effect" in answer.headers["x-engine-warnings"]
        assert backend.requests[-1].context.grammar is None
        free = {name: each for name, each in FORCED[path].items() if name != "tool_choice"}
        answer = await client.post(path, json=free)
        assert answer.status_code == 200 and "x-engine-warnings" not in answer.headers
        assert backend.requests[-1].context.grammar is not None
    async with client_of(app_over(backend, tmp_path, strict=True)) as client:
        assert (await client.post(path, json=FORCED[path])).status_code == 400


@pytest.mark.parametrize("kind", ["string", "boolean"])
async def test_uniqueness_that_no_grammar_enforces_is_a_warning(kind: str, tmp_path: Path) -> None:
    """Pydantic's `set[str]` is answered, unless the server is strict."""
    tags = {"type": "array", "items": {"type": kind}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags}}
    fields = chat(response_format=json_schema(schema=schema))
    warning = "response_format: properties.tags.uniqueItems not enforced, check the answer"
    is_enforced = kind == "boolean"
    async with client_of(app_over(FakeBackend(), tmp_path)) as client:
        answer = await client.post("/v1/chat/completions", json=fields)
        assert answer.status_code == 200
        assert answer.headers.get("x-engine-warnings") == (None if is_enforced else warning)
    async with client_of(app_over(FakeBackend(), tmp_path, strict=True)) as client:
        answer = await client.post("/v1/chat/completions", json=fields)
        assert answer.status_code == (200 if is_enforced else 400)


def test_grammar_errors_name_the_field_of_their_api() -> None:
    spec = read_response_format({"type": "json_object"}, where="text.format").grammar
    assert spec == GrammarSpec(kind="json_object", param="text.format")
