"""Parses output constraints to a `GrammarSpec`. They are OpenAI's `response_format`, and vLLM's
`guided_*` and `structured_outputs`.

Only types and sizes are checked here. Whether a schema, regex or grammar is valid is found out when
the backend compiles it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.interfaces.backend import GrammarSpec
from engine.servers.http.errors import check_keys, describe, problem
from engine.servers.http.limits import decode_text

MAX_SOURCE = 262_144
MAX_CHOICES = 1_024

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Maps the types of `response_format` to their fields. llama.cpp's `json_object` may have a schema.
# `value` is what Text Generation Inference calls a schema or a regular expression.
_FORMAT_FIELDS = {
    "text": ("type",),
    "json_object": ("type", "schema", "value"),
    "json_schema": ("type", "json_schema"),
    "json": ("type", "value"),
    "regex": ("type", "value"),
}
FORMATS = tuple(_FORMAT_FIELDS)
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    grammar: GrammarSpec | None
    has_description: bool = False


def read_response_format(value: Any, where: str = "response_format") -> ResponseFormat:
    if value is None:
        return ResponseFormat(None)
    if not isinstance(value, dict):
        raise problem(where, f"should be an object, got {describe(value)}")
    kind = value.get("type")
    if kind not in FORMATS:
        rule = f"should be one of {', '.join(FORMATS)}"
        raise problem(f"{where}.type", f"{rule}; got {describe(kind)}")
    check_keys(value, _FORMAT_FIELDS[kind], where)
    if kind == "text":
        return ResponseFormat(None)
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"), where)
    if kind == "regex":
        regex = _text(value.get("value"), f"{where}.value")
        return ResponseFormat(GrammarSpec(kind="regex", source=regex, param=where))
    given = [key for key in ("schema", "value") if value.get(key) is not None]
    if len(given) > 1:
        raise problem(where, "should have schema or value, got both")
    for key in given:
        return ResponseFormat(schema_spec(value[key], f"{where}.{key}", where))
    return ResponseFormat(GrammarSpec(kind="json_object", param=where))


def _json_schema(value: Any, param: str) -> ResponseFormat:
    where = f"{param}.json_schema"
    if not isinstance(value, dict):
        raise problem(where, f"should be an object, got {describe(value)}")
    check_keys(value, _SCHEMA_FIELDS, where)
    name, description, strict = (value.get(key) for key in ("name", "description", "strict"))
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        rule = "should be 1 to 64 letters, digits, dashes and underscores"
        raise problem(f"{where}.name", f"{rule}, got {describe(name)}")
    if description is not None and not isinstance(description, str):
        raise problem(f"{where}.description", f"should be a string, got {describe(description)}")
    if strict is not None and not isinstance(strict, bool):
        raise problem(f"{where}.strict", f"should be a boolean, got {describe(strict)}")
    # The schema is enforced even if `strict` is not set.
    grammar = schema_spec(value.get("schema"), f"{where}.schema", param)
    return ResponseFormat(grammar, has_description=bool(description))


def schema_spec(schema: Any, where: str, param: str) -> GrammarSpec:
    if not isinstance(schema, dict | bool):
        raise problem(where, f"should be a JSON schema, got {describe(schema)}")
    source = msgspec.json.encode(schema).decode()
    return GrammarSpec(kind="json_schema", source=_sized(source, where), param=param)


def _sized(source: str, where: str) -> str:
    if not 1 <= len(source) <= MAX_SOURCE:
        raise problem(where, f"should have 1 to {MAX_SOURCE} characters, got {len(source)}")
    return source


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise problem(where, f"should be a string, got {describe(value)}")
    return _sized(value, where)


def _json(value: Any, where: str) -> GrammarSpec:
    """Parse a JSON schema that is given as an object or as JSON text."""
    if isinstance(value, str):
        value = decode_text(_sized(value, where), where)
    return schema_spec(value, where, where)


def _regex(value: Any, where: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", source=_text(value, where), param=where)


def _grammar(value: Any, where: str) -> GrammarSpec:
    return GrammarSpec(kind="grammar", source=_text(value, where), param=where)


def _choice(value: Any, where: str) -> GrammarSpec:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise problem(where, f"should be a list of 1 to {MAX_CHOICES} strings")
    for position, item in enumerate(value):
        if not isinstance(item, str) or not item:
            rule = f"should be a string that is not empty, got {describe(item)}"
            raise problem(f"{where}[{position}]", rule)
    source = _sized(msgspec.json.encode(value).decode(), where)
    return GrammarSpec(kind="choice", source=source, param=where)


def _json_object(value: Any, where: str) -> GrammarSpec | None:
    if not isinstance(value, bool):
        raise problem(where, f"should be a boolean, got {describe(value)}")
    return GrammarSpec(kind="json_object", param=where) if value else None


_PARSERS: dict[str, Callable[[Any, str], GrammarSpec | None]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
KINDS = tuple(_PARSERS)
GUIDED = ("json", "regex", "choice", "grammar")


def parse_constraint(kind: str, value: Any, where: str) -> GrammarSpec | None:
    """Parse a constraint of one of `KINDS`. `where` is the request parameter that has it."""
    return _PARSERS[kind](value, where)


def guided_parser(kind: str) -> Callable[[Any], GrammarSpec | None]:
    """A validator for the field `guided_<kind>`. null means the same as a missing field."""
    return lambda value: None if value is None else parse_constraint(kind, value, f"guided_{kind}")


def parse_structured_outputs(value: Any, where: str = "structured_outputs") -> GrammarSpec | None:
    """Parse `structured_outputs`, which replaces `guided_*` in vLLM. It is an object with one of
    `KINDS` as its key. A constraint that another parameter was converted to is already parsed.
    """
    if value is None or isinstance(value, GrammarSpec):
        return value
    if not isinstance(value, dict):
        raise problem(where, f"should be an object, got {describe(value)}")
    given = {key: each for key, each in value.items() if each is not None}
    check_keys(given, KINDS, where)
    if len(given) > 1:
        raise problem(where, f"should have one of {', '.join(KINDS)}, got {len(given)}")
    for kind, each in given.items():
        return _PARSERS[kind](each, f"{where}.{kind}")
    return None
