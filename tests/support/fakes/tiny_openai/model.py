"""The words, and how an answer is made of them: limits, stops, biases, seeds, schemas and tools."""

import json
import random
import re
import zlib
from dataclasses import dataclass
from typing import Any

CONTEXT_LENGTH = 2_048
NUM_TOKENS = 1_000
ANSWER = ["The", " capital", " of", " France", " is", " Paris", ",", " they", " say", "."]
EMOJI = ["\N{GRINNING FACE}", "\N{HEAVY BLACK HEART}"]
TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


class Mistake(Exception):
    """The client's; `status` and the parameter's name go into the error body."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


@dataclass
class Answer:
    tokens: list[str]
    finish: str
    stop: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def token_id(word: str) -> int:
    return zlib.crc32(word.encode()) % 200


def num_tokens(text: str) -> int:
    return len(text.split())


def fixed(text: str) -> Answer:
    """A text that is already decided, such as JSON: a token for each character."""
    return Answer(list(text), "stop")


def generate(prompt: str, body: dict[str, Any], limit: int, choice: int = 0) -> Answer:
    words = list(ANSWER) if prompt.isascii() else EMOJI * 3
    if body.get("temperature"):
        random.Random(f"{body.get('seed', random.random())} {choice}").shuffle(words)
    bias = body.get("logit_bias") or {}
    forced = [key for key, value in bias.items() if value > 50]
    words = [word for word in words if bias.get(str(token_id(word)), 0) > -50]
    if forced:
        words = [f" w{forced[0]}"] * limit
    return _cut(words, body, limit)


def _cut(words: list[str], body: dict[str, Any], limit: int) -> Answer:
    stops = body.get("stop") or body.get("stop_sequences") or []
    stops = [stops] if isinstance(stops, str) else stops
    answer = Answer(words[:limit], "length" if len(words) > limit else "stop")
    for stop in stops:
        place = answer.text.find(stop)
        if place >= 0:
            kept = answer.text[:place]
            answer = Answer(re.findall(r"\s?\S+|\s", kept), "stop", stop)
    return answer


def example(schema: Any, root: Any = None) -> Any:
    """A value that follows the schema; raises `Mistake` for what is no schema."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        raise Mistake("a schema should be an object", "response_format")
    if "$ref" in schema:
        found = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            if part and part not in found:
                raise Mistake(f"{schema['$ref']} leads nowhere", "response_format")
            found = found[part] if part else found
        return example(found, root)
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(schema["anyOf"][-1], root)
    return _typed(schema, root)


def _typed(schema: dict[str, Any], root: Any) -> Any:
    kind = schema.get("type")
    if kind not in TYPES:
        raise Mistake(f"{kind} is no type", "response_format")
    if kind == "object":
        return {key: example(value, root) for key, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [example(schema["items"], root)] * schema.get("minItems", 1)
    if kind == "string" and "pattern" in schema:
        try:
            re.compile(schema["pattern"])
        except re.error:
            raise Mistake("the pattern is broken", "response_format") from None
        return "AB-12"
    return {"boolean": False, "integer": 1, "number": 1.5, "null": None}.get(kind, "text")


def structured(response_format: Any) -> str | None:
    """The answer under a response_format, or None for plain text."""
    kind = (response_format or {"type": "text"}).get("type")
    if kind == "json_object":
        return '{"colour": "green"}'
    if kind == "json_schema":
        schema = response_format.get("json_schema", response_format).get("schema")
        return json.dumps(example(schema))
    if kind != "text":
        raise Mistake(f"response_format {kind} is unknown", "response_format")
    return None


def called(tools: list[dict[str, Any]], choice: Any) -> tuple[str, str] | None:
    """Name and arguments of the call that is made, if one is."""
    functions = {}
    for tool in tools:
        name = (tool.get("function") or {}).get("name")
        if not name:
            raise Mistake("a tool has no name", "tools")
        functions[name] = tool["function"]
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, dict):
        wanted = choice.get("function", {}).get("name")
        if wanted not in functions:
            raise Mistake(f"there is no tool {wanted}", "tool_choice")
    elif choice == "required" and functions:
        wanted = next(iter(functions))
    else:
        raise Mistake("tool_choice should be none, auto, required or a tool", "tool_choice")
    return wanted, json.dumps(example(functions[wanted].get("parameters", {"type": "object"})))
