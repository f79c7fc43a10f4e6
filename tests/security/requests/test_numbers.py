"""Every number of every request has bounds; what is outside is a small 400 (SEC-02, SEC-04; T2).

The fields come from the schemas that the server validates with, so a new one is covered, or turns
this red, when it is added. The last test also covers nested numbers, by the JSON schemas.
"""

import importlib
import json
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import engine.servers
from engine.core.config_schema import SECTIONS, Settings
from engine.core.errors import EngineError, InvalidRequestError
from engine.core.observability.metrics import Metrics
from engine.servers.anthropic.schema import PromptBody, parse
from engine.servers.app import create_app
from engine.servers.http.limits import decode_object
from engine.servers.openapi import BODIES
from engine.servers.schema.body import parse_body
from engine_tools import source_trees
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

MESSAGES = [{"role": "user", "content": "say hello"}]
# The least that each route takes.
LEAST: dict[str, dict[str, Any]] = {
    "BatchBody": {
        "input_file_id": "file-0",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "BatchChatBody": {"model": MODEL, "messages": [MESSAGES]},
    "ChatBody": {"model": MODEL, "messages": MESSAGES},
    "ClassifyBody": {"model": MODEL, "input": "x"},
    "CompletionBody": {"model": MODEL, "prompt": "x"},
    "FimBody": {"model": MODEL, "prompt": "x"},
    "CompactBody": {"model": MODEL, "input": "x"},
    "CompleteBody": {"part_ids": ["part_0"]},
    "ConversationBody": {},
    "ConversationUpdate": {"metadata": {}},
    "DetokenizeBody": {"tokens": [1]},
    "EmbedBody": {"inputs": "x"},
    "EmbeddingsBody": {"content": "x"},
    "EmbeddingBody": {"model": MODEL, "input": "x"},
    "EmptyBody": {},
    "FlushBody": {},
    "GenerateBody": {"prompt": "x"},
    "InfillBody": {"input_prefix": "x", "input_suffix": "y"},
    "InferBody": {
        "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}]
    },
    "InvocationBody": {},
    "KeyBody": {"name": "a"},
    "JobBody": {"model": MODEL, "training_file": "file-x"},
    "LevelBody": {"level": "info"},
    "LimitsBody": {},
    "LoadAdapterBody": {"lora_name": "x", "lora_path": "/x"},
    "LoadBody": {"model": "x"},
    "MessageBatchBody": {"requests": [{"custom_id": "a", "params": {}}]},
    "MessagesBody": {"model": MODEL, "max_tokens": 5, "messages": MESSAGES},
    "ModerationBody": {"input": "x"},
    "NamedBody": {"id": "x"},
    "RunBody": {"prompt": "x", "interp": {}},
    "SwapBody": {"id": "x"},
    "NativeBody": {"prompt": "x"},
    "NewItemsBody": {"items": []},
    "PoolingBody": {"model": MODEL, "input": "x"},
    "PromptBody": {"model": MODEL, "messages": MESSAGES},
    "OllamaChatBody": {"model": MODEL, "messages": MESSAGES},
    "OllamaCopyBody": {"source": "x", "destination": "y"},
    "OllamaCreateBody": {"model": "x", "from": MODEL},
    "OllamaEmbedBody": {"model": MODEL, "input": "x"},
    "OllamaEmbeddingsBody": {"model": MODEL, "prompt": "x"},
    "OllamaGenerateBody": {"model": MODEL, "prompt": "x"},
    "OllamaPullBody": {"model": "x"},
    "OllamaShowBody": {"model": MODEL},
    "RerankBody": {"model": MODEL, "query": "x", "documents": ["y"]},
    "ResponseBody": {"model": MODEL, "input": "x"},
    "ScoreBody": {"model": MODEL, "text_1": "x", "text_2": "y"},
    "TemplateBody": {"messages": MESSAGES},
    "StoredChatUpdate": {"metadata": {}},
    "TextBody": {"text_input": "x"},
    "TextGenerationBody": {"inputs": "x"},
    "TokenCountBody": {"input": "x"},
    "TokenizeBody": {"prompt": "x"},
    "UnloadAdapterBody": {"lora_name": "x"},
    "UploadBody": {
        "filename": "a.jsonl",
        "purpose": "batch",
        "bytes": 1,
        "mime_type": "application/jsonl",
    },
    "WarmBody": {"prompts": ["x"]},
}
# As JSON has them, and as text that is no JSON.
NUMBERS = (-1, 0, 2**31, 2**63, 2**64, -(2**64), 1e308, -1e308, 0.5, 10**300)
TEXTS = ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-" + "9" * 5000)
OTHER_WORDS = {("top_k", -1)}  # for what is within the bounds
NEVER = ("1", True, math.nan, math.inf, -math.inf, [], {})


def parsed(kind: type[BaseModel], raw: dict[str, Any]) -> BaseModel:
    if issubclass(kind, PromptBody) and kind.__module__ == PromptBody.__module__:
        return parse(kind, raw)[0]
    return parse_body(kind, raw)


def numeric_fields(model: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Properties that are a number or nothing, with the number's schema."""
    schema = model.model_json_schema()
    for name, each in schema.get("properties", {}).items():
        kinds = [part for part in each.get("anyOf", [each]) if part.get("type") != "null"]
        if len(kinds) == 1 and kinds[0].get("type") in ("integer", "number"):
            yield name, kinds[0]


def is_within(value: Any, schema: dict[str, Any]) -> bool:
    if schema["type"] == "integer" and isinstance(value, float) and not value.is_integer():
        return False
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    assert low is not None and high is not None, schema
    if value in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")):
        return False
    return bool(low <= value <= high)


KINDS = sorted({each.__name__: each for each in BODIES.values()}.items())
FIELDS = [
    pytest.param(kind, name, schema, id=f"{title}.{name}")
    for title, kind in KINDS
    for name, schema in numeric_fields(kind)
]


def test_every_request_kind_has_a_minimal_body_and_numeric_fields() -> None:
    assert set(LEAST) == {title for title, _ in KINDS}
    for title, kind in KINDS:
        parsed(kind, LEAST[title])
    assert len(FIELDS) >= 60


@pytest.mark.parametrize(("kind", "name", "schema"), FIELDS)
def test_numbers_out_of_bounds_are_refused(
    kind: type[BaseModel], name: str, schema: dict[str, Any]
) -> None:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    outside = [
        value
        for value in (*NUMBERS, low - 1, high + 1)
        if not is_within(value, schema) and (name, value) not in OTHER_WORDS
    ]
    assert outside
    for value in [*outside, *NEVER]:
        with pytest.raises(InvalidRequestError) as raised:
            parsed(kind, LEAST[kind.__name__] | {name: value})
        assert len(str(raised.value)) < 4096, (name, value)
        assert name in str(raised.value) or raised.value.param == name, (name, value)
    start = json.dumps(LEAST[kind.__name__])[:-1]
    for text in TEXTS:
        comma = ", " if len(start) > 1 else ""
        with pytest.raises(EngineError):
            parsed(kind, decode_object(f'{start}{comma}"{name}": {text}}}'.encode()))


async def test_numbers_out_of_bounds_over_http_are_small_400s() -> None:
    app = create_app(make_settings(), FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path, kind in BODIES.items():
            for name, _ in list(numeric_fields(kind))[:2]:
                for text in (*TEXTS, '"1"', "true", str(2**65)):
                    body = json.dumps(LEAST[kind.__name__] | {name: None})
                    content = body.replace(f'"{name}": null', f'"{name}": {text}').encode()
                    response = await client.post(
                        path.replace("{name}", "x"),
                        content=content,
                        headers={"content-type": "application/json"},
                    )
                    assert response.status_code == 400, (path, name, text[:20], response.text)
                    assert len(response.content) < 4096
    assert app.state.services.lifecycle.num_admitted == 0


def test_every_number_of_the_settings_is_bounded() -> None:
    defaults = Settings()
    for section in SECTIONS:
        kind = type(getattr(defaults, section))
        for name, schema in numeric_fields(kind):
            assert not is_within(math.inf, schema), f"{section}.{name}"
            assert not is_within(-(10**30), schema), f"{section}.{name}"
            with pytest.raises(ValueError):
                kind(**{name: math.nan})


def request_models() -> list[type[BaseModel]]:
    """Every pydantic model that the servers define."""
    found = set()
    for info in pkgutil.walk_packages(engine.servers.__path__, "engine.servers."):
        for item in vars(importlib.import_module(info.name)).values():
            if isinstance(item, type) and issubclass(item, BaseModel):
                found.add(item)
    ours = [item for item in found if source_trees.is_within(item.__module__, "engine.servers")]
    return sorted(ours, key=lambda item: item.__qualname__)


def numbers(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of a JSON schema that accepts a number."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, value in schema.items():
            yield from numbers(value, f"{path}.{key}")
    elif isinstance(schema, list):
        for value in schema:
            yield from numbers(value, path)


def test_every_number_in_a_request_is_bounded() -> None:
    models = request_models()
    assert models
    unbounded = [
        path
        for model in models
        for path, schema in numbers(model.model_json_schema(), model.__name__)
        if "enum" not in schema
        and "const" not in schema
        and not (
            {"minimum", "exclusiveMinimum"} & schema.keys()
            and {"maximum", "exclusiveMaximum"} & schema.keys()
        )
    ]
    assert not unbounded
