"""Rules for structured output: JSON mode must give valid JSON, and a schema must be followed.

Each schema allows only few texts, so that even a small model completes its answer. If the token
limit still cuts the answer, the rule is skipped.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from engine_tools.conformance.expect import RuleFailed, RuleSkipped, expect, field, is_number, short
from engine_tools.conformance.rule import Group
from engine_tools.conformance.rules.streaming import joined, reasons
from engine_tools.conformance.target import CHAT, Target

SDK = "openai-python"
PARSE = "openai-python's .parse(), LangChain"
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["red", "green"]},
        "dark": {"type": "boolean"},
    },
    "required": ["name", "dark"],
    "additionalProperties": False,
}
_REF: dict[str, Any] = {
    "type": "object",
    "properties": {"first": {"$ref": "#/$defs/colour"}},
    "required": ["first"],
    "additionalProperties": False,
    "$defs": {"colour": {"type": "string", "enum": ["red", "green"]}},
}
_TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "value": {"type": "string", "enum": ["a", "b"]},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
_PATTERN: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2}$"}},
    "required": ["code"],
    "additionalProperties": False,
}
_NUMBERS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "enum": [1, 2, 3]},
    "minItems": 2,
    "maxItems": 2,
}
PROMPT = "Describe the colour of grass. Answer in JSON."


def _format(schema: Any, name: str = "answer") -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "strict": True, "schema": schema},
    }


async def _missing(target: Target) -> str | None:
    body = target.chat(PROMPT, response_format=_format(COLOUR), max_tokens=8)
    reply = await target.post(CHAT, body)
    refused = 400 <= reply.status < 500
    return f"response_format is refused: {reply.message[:120]}" if refused else None


STRUCTURED = Group("structured", _missing)


async def _answer(target: Target, prompt: str, response_format: Any, **fields: Any) -> Any:
    """The answer, parsed as JSON. None if the token limit cut it off."""
    body = target.chat(prompt, response_format=response_format, max_tokens=200, **fields)
    choice = field((await target.post(CHAT, body)).ok(), "choices", 0)
    raw = field(choice, "message", "content")
    if choice["finish_reason"] == "length":
        return None
    return parsed(raw)


def parsed(raw: Any) -> Any:
    try:
        return json.loads(raw)
    except (TypeError, ValueError):
        raise RuleFailed(f"not JSON: {short(raw)}") from None


async def _follows(
    target: Target, schema: Any, is_valid: Callable[[Any], bool], prompt: str = PROMPT
) -> None:
    for temperature in (0, 1):
        value = await _answer(target, prompt, _format(schema), temperature=temperature, seed=3)
        if value is None and temperature == 0:
            raise RuleSkipped("the model did not come to an end within 200 tokens")
        expect(value is None or is_valid(value), f"{short(value)} does not follow the schema")


def is_colour(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"name", "dark"}
        and value["name"] in ("red", "green")
        and isinstance(value["dark"], bool)
    )


def _is_tree(value: Any) -> bool:
    while value is not None:
        if not isinstance(value, dict) or set(value) != {"value", "next"}:
            return False
        if value["value"] not in ("a", "b"):
            return False
        value = value["next"]
    return True


@STRUCTURED.rule(
    "JSON-01",
    "json_object gives a JSON object",
    client="LangChain JSON mode",
    sees="an output parser error",
)
async def json_object(target: Target) -> None:
    value = await _answer(target, PROMPT, {"type": "json_object"})
    expect(value is None or isinstance(value, dict), f"{short(value)} is no object")


@STRUCTURED.rule(
    "JSON-02",
    "A strict json_schema is followed: objects, enums, booleans",
    client=PARSE,
    sees="a validation error instead of an object",
)
async def json_schema(target: Target) -> None:
    await _follows(target, COLOUR, is_colour)


@STRUCTURED.rule(
    "JSON-03",
    "A schema with $ref and $defs is followed",
    client=PARSE,
    sees="a validation error: pydantic writes every nested model so",
)
async def references(target: Target) -> None:
    await _follows(
        target,
        _REF,
        lambda value: isinstance(value, dict) and value.get("first") in ("red", "green"),
    )


@STRUCTURED.rule(
    "JSON-04",
    "A recursive schema is followed, or refused",
    client=PARSE,
    sees="a server failure, or a validation error",
)
async def recursion(target: Target) -> None:
    prompt = 'Write this JSON: {"value": "a", "next": {"value": "b", "next": null}}'
    await _follows_or_refuses(target, _TREE, _is_tree, prompt)


@STRUCTURED.rule(
    "JSON-05",
    "A pattern is followed, or refused",
    client=PARSE,
    sees="a validation error in the client's own model",
)
async def pattern(target: Target) -> None:
    def is_code(value: Any) -> bool:
        code = value.get("code") if isinstance(value, dict) else None
        return isinstance(code, str) and re.fullmatch(r"[A-Z]{2}-[0-9]{2}", code) is not None

    await _follows_or_refuses(target, _PATTERN, is_code, 'Write this JSON: {"code": "AB-12"}')


@STRUCTURED.rule(
    "JSON-06",
    "Bounds of an array are followed, or refused",
    client=PARSE,
    sees="a validation error in the client's own model",
)
async def bounds(target: Target) -> None:
    def is_pair(value: Any) -> bool:
        if not isinstance(value, list) or len(value) != 2:
            return False
        return all(is_number(each) and each in (1, 2, 3) for each in value)

    await _follows_or_refuses(target, _NUMBERS, is_pair, "Write this JSON: [1, 2]")


async def _follows_or_refuses(
    target: Target, schema: Any, is_valid: Callable[[Any], bool], prompt: str
) -> None:
    body = target.chat(prompt, response_format=_format(schema), max_tokens=2)
    reply = await target.post(CHAT, body)
    if reply.status != 200:
        reply.refused()
        return
    await _follows(target, schema, is_valid, prompt)


@STRUCTURED.rule(
    "JSON-07",
    "A stream under a schema joins to JSON that follows it",
    client=PARSE,
    sees="a validation error at the end of the stream",
)
async def streamed(target: Target) -> None:
    body = target.chat(PROMPT, response_format=_format(COLOUR), max_tokens=200)
    stream = await target.stream(CHAT, body)
    if reasons(stream) == ["length"]:
        raise RuleSkipped("the model did not come to an end within 200 tokens")
    value = parsed(joined(stream))
    expect(is_colour(value), f"{short(value)} does not follow the schema")


@STRUCTURED.rule(
    "JSON-08",
    "A complete structured answer has finish_reason stop",
    client=PARSE,
    sees="LengthFinishReasonError for an answer that is complete",
)
async def finish(target: Target) -> None:
    body = target.chat(PROMPT, response_format=_format(COLOUR), max_tokens=200)
    choice = field((await target.post(CHAT, body)).ok(), "choices", 0)
    try:
        value = json.loads(choice["message"]["content"])
    except ValueError:
        raise RuleSkipped("the model did not come to an end within 200 tokens") from None
    reason = choice["finish_reason"]
    expect(not is_colour(value) or reason == "stop", f"finish_reason is {short(reason)}")


@STRUCTURED.rule(
    "JSON-09",
    "A json_schema without a schema is refused",
    client=SDK,
    sees="prose where JSON was asked for, or three failures",
)
async def no_schema(target: Target) -> None:
    (await target.post(CHAT, target.chat(response_format={"type": "json_schema"}))).refused()


@STRUCTURED.rule(
    "JSON-10",
    "A schema that is no JSON schema is refused",
    client=SDK,
    sees="prose where JSON was asked for, or three failures",
)
async def bad_schema(target: Target) -> None:
    body = target.chat(response_format=_format({"type": "unicorn"}))
    (await target.post(CHAT, body)).refused()


@STRUCTURED.rule(
    "JSON-11",
    "A schema with a broken pattern is refused",
    client=SDK,
    sees="InternalServerError, after the request was sent three times",
)
async def bad_pattern(target: Target) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}
    body = target.chat(response_format=_format(schema | {"required": ["a"]}))
    (await target.post(CHAT, body)).refused()


@STRUCTURED.rule(
    "JSON-12",
    "A reference to nothing is refused",
    client=SDK,
    sees="InternalServerError, after the request was sent three times",
)
async def dangling(target: Target) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]}
    (await target.post(CHAT, target.chat(response_format=_format(schema)))).refused()
