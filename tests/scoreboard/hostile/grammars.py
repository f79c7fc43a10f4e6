"""Grammars, schemas, tools and formats for answers: sound ones, and ones made to hurt."""

import json
import random
from typing import Any

from tests.scoreboard.hostile.values import text
from tests.security.requests.test_grammar_bombs import GRAMMAR_BOMBS, REGEX_BOMBS, SCHEMA_BOMBS
from tests.support.files.dialect_examples import GRAMMAR, SCHEMA, TOOL

LARK = 'start: "a" | "b"'
BOMB_SHARE = 0.15


def grammar(rng: random.Random) -> str:
    if rng.random() < BOMB_SHARE:
        return rng.choice(list(GRAMMAR_BOMBS.values()))
    return rng.choice((GRAMMAR, LARK, 'root ::= [a-z]{1,9} "\\n" root?', f"# {text(rng)}\n{LARK}"))


def regex(rng: random.Random) -> str:
    if rng.random() < BOMB_SHARE:
        return rng.choice(list(REGEX_BOMBS.values()))
    return rng.choice(("a+", "[a-z]{1,20}", ".*", "(yes|no)", r"\d{3}-\d{4}", r"\p{L}+", "", "("))


def schema_text(rng: random.Random) -> str:
    if rng.random() < BOMB_SHARE:
        return rng.choice(list(SCHEMA_BOMBS.values()))
    return json.dumps(_schema(rng))


def schema(rng: random.Random) -> Any:
    try:
        return json.loads(schema_text(rng))
    except (ValueError, RecursionError):
        return _schema(rng)


def _schema(rng: random.Random) -> Any:
    many = {f"p{number}": {"type": "string"} for number in range(rng.choice((3, 60, 400)))}
    return rng.choice(
        (
            SCHEMA,
            {"type": "object", "properties": many, "required": list(many)},
            {"type": "array", "items": SCHEMA, "maxItems": rng.choice((1, 10**6))},
            {"enum": [text(rng), 1, None, [1], {"a": 1}] * rng.choice((1, 50))},
            {"type": "string", "pattern": regex(rng)},
            {"type": "integer", "minimum": -(10**30), "maximum": 1e300},
            {"$ref": "#/$defs/absent"},
            {"anyOf": [SCHEMA, {"type": "null"}] * rng.choice((1, 100))},
            True,
            {},
        )
    )


def choices(rng: random.Random) -> list[str]:
    return [text(rng) + str(number) for number in range(rng.choice((1, 2, 100, 1024, 1025)))]


def structured(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 1, 2))):
        found |= rng.choice(
            (
                {"json": schema(rng)},
                {"regex": regex(rng)},
                {"choice": choices(rng)},
                {"grammar": grammar(rng)},
                {"json_object": True},
                {"structural_tag": json.dumps(structural_tag(rng))},
                {"whitespace_pattern": regex(rng)},
            )
        )
    return found


def structural_tag(rng: random.Random) -> dict[str, Any]:
    count = rng.choice((1, 2, 100))
    parts = [{"begin": f"<f{n}>", "schema": schema(rng), "end": f"</f{n}>"} for n in range(count)]
    return {"type": "structural_tag", "structures": parts, "triggers": ["<f"] * count}


def response_format(rng: random.Random) -> dict[str, Any]:
    named = {"name": rng.choice(("a", "x" * 65, text(rng))), "schema": schema(rng)}
    if rng.random() < 0.3:
        named["strict"] = True
    return rng.choice(
        (
            {"type": "json_schema", "json_schema": named},
            {"type": "json_schema", "schema": schema(rng)},
            {"type": "json_object"},
            {"type": "json_object", "schema": schema(rng)},
            {"type": "text"},
            structural_tag(rng),
            {"type": text(rng)},
        )
    )


def tools(rng: random.Random) -> list[Any]:
    """Tools in the form of chats."""
    count = rng.choice((1, 1, 2, 2, 20, 128, 512, 513))
    if count > 20:
        return [_tool(rng, number if rng.random() < 0.9 else 0) for number in range(count)]
    return [TOOL, *(_tool(rng, number) for number in range(count - 1))]


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    name = f"f{number}" if rng.random() < 0.97 else text(rng)
    function = {"name": name, "description": text(rng), "parameters": SCHEMA}
    if rng.random() < 0.05:
        function |= {"parameters": schema(rng), "strict": True}
    return {"type": "function", "function": function}


def flat_tools(rng: random.Random) -> list[Any]:
    """Tools in the form of responses."""
    return [{"type": "function", **each["function"]} for each in tools(rng)] + (
        [] if rng.random() < 0.9 else [{"type": rng.choice(("web_search", "mcp", text(rng)))}]
    )


def anthropic_tools(rng: random.Random) -> list[Any]:
    return [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
        for each in tools(rng)
    ]


def tool_choice(rng: random.Random) -> Any:
    named = {"type": "function", "function": {"name": rng.choice(("look", "absent", text(rng)))}}
    flat = {"type": "function", "name": "look"}
    return rng.choice(("auto", "none", "required", "required", named, flat, {"type": "any"}))
