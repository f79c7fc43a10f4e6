"""Builds grammars in llguidance's syntax that force a model to write well-formed tool calls.

Each tool's arguments are a separate `%json` rule with the tool's own schema, so that its `$ref`s
resolve. The object around the arguments has the spacing that chat templates use. If a marker is a
control token, it can't be part of text and is matched by its id. Other markers are plain text, so a
lazy rule matches text up to the first marker.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.grammar.schema_rules import compile_schema

# Schema keywords that may allow an object to have keys not listed in `properties`.
_OPEN_ENDED = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"),
    }
)
# Schema keys that the schema of a property may depend on.
_SHARED = ("$schema", "$defs", "definitions")
_OBJECT = {"type": "object"}
_MAX_CACHED_CHARS = 16 * 1024
# Max total size of the schemas that are compiled to find out which properties can be enforced. Each
# property is compiled with a copy of all definitions.
_MAX_TRIED_CHARS = 256 * 1024
_ANY = r"/(.|\n)*/"


@dataclass(frozen=True)
class CallSyntax:
    """Grammar rules for the tool calls of one model family. The calls of an answer match `opening`
    (the marker), then `first` (the first call), then `more` (any further calls).

    Some families may call without a marker. They have `bare_text`, a pattern of text that is not a
    call. If such a family has a marker, the model may leave it out; otherwise `opening` is None.
    """

    rules: str
    opening: str | None
    first: str
    more: str
    bare_text: str | None = None

    @property
    def is_bare(self) -> bool:
        return self.bare_text is not None


def literal(text: str) -> str:
    return json.dumps(text)


def marker(text: str, control: Mapping[str, int]) -> str:
    """The grammar rule for a marker. A control token is matched by its id, other markers as
    text.
    """
    return f"<[{control[text]}]>" if text in control else literal(text)


def arguments_rule(tool: Mapping[str, Any]) -> str:
    """The grammar rule for a tool's arguments: an object that matches the schema of its parameters.

    For a strict tool the whole schema is enforced, or the request is refused. For other tools,
    parts of the schema that can't be enforced are ignored.
    """
    function = tool["function"]
    parameters = json.dumps(function.get("parameters") or {"properties": {}})
    rule = _arguments_rule if len(parameters) <= _MAX_CACHED_CHARS else _arguments_rule.__wrapped__
    return rule(parameters, f"tools.{function['name']}.parameters", function.get("strict") is True)


@lru_cache(maxsize=256)  # cached, because agents send the same tools in every turn
def _arguments_rule(parameters: str, where: str, strict: bool) -> str:
    schema = {**json.loads(parameters), "type": "object"}
    if "properties" in schema and not schema.keys() & _OPEN_ENDED:
        schema["additionalProperties"] = False  # otherwise a model could invent endless parameters
    return f"%json {json.dumps(_enforceable(schema, where, strict))}"


def _enforceable(schema: dict[str, Any], where: str, strict: bool) -> dict[str, Any]:
    try:
        return compile_schema(schema, where)
    except InvalidRequestError:
        if strict:
            raise
    loose = _loosened(schema)
    return compile_schema(loose if _is_supported(loose) else _OBJECT, where)


def _loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an object schema. Schemas of properties that can't be enforced are replaced by {},
    which allows any value.
    """
    given, required = schema.get("properties"), schema.get("required")
    properties = given if isinstance(given, dict) else {}
    shared = {key: schema[key] for key in _SHARED if key in schema}
    is_tried = len(properties) * len(json.dumps(shared)) <= _MAX_TRIED_CHARS

    def loose(value: Any) -> Any:
        if not is_tried:
            return {}
        alone = {**shared, "type": "object", "properties": {"value": value}}
        return value if _is_supported(alone) else {}

    return {
        **shared,
        "type": "object",
        "properties": {name: loose(value) for name, value in properties.items()},
        "required": [
            name for name in properties if isinstance(required, list) and name in required
        ],
        "additionalProperties": schema.get("additionalProperties") is not False,
    }


def _is_supported(schema: Mapping[str, Any]) -> bool:
    try:
        compile_schema(schema, "")
    except InvalidRequestError:
        return False
    return True


def object_calls(tools: Sequence[Mapping[str, Any]], arguments_key: str) -> str:
    """The grammar rule `call`: a JSON object with a tool's name and its arguments, in this
    order.
    """
    lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"])
        opening = f'{{"name": {name}, "{arguments_key}": '
        lines.append(f'call_{index}: {literal(opening)} {arguments_rule(tool)} "}}"')
    return "\n".join(lines)


def tool_grammar(syntax: CallSyntax, *, forced: bool, may_think: bool) -> str:
    """A grammar for an answer that may or must call tools. If `forced` is true, the answer consists
    of calls only. Otherwise it is text that may contain calls, and each call in it is well-formed.
    """
    calls = f"{syntax.first} {syntax.more}"
    lines = ["%llguidance {}", r"SPACE: /[ \n]{0,2}/", syntax.rules]
    if forced:
        opening = f"({syntax.opening})?" if syntax.is_bare and syntax.opening else syntax.opening
        lines.append(f"start: SPACE {opening or ''} {calls}")
        return _joined(lines)
    if syntax.is_bare:
        behind_text = f"({syntax.opening} {calls})?" if syntax.opening else ""
        lines += [f"start: TEXT {behind_text} | SPACE {calls}", f"TEXT: {syntax.bare_text}"]
        return _joined(lines)
    # If the reasoning marker is plain text, its lazy rule competes with the rule for calls. So text
    # must not start with this marker.
    lines.append(f"TEXT: {_ANY} & ~/<think>(.|\\n)*/" if may_think else f"TEXT: {_ANY}")
    if syntax.opening is not None and syntax.opening.startswith("<["):
        lines.append(f"start: TEXT ({syntax.opening} {calls})?")
    else:
        lines += [f"start: TEXT | opened {calls}", f"opened[lazy]: TEXT {syntax.opening}"]
    return _joined(lines)


def answer_grammar(syntax: CallSyntax, answer: str) -> str:
    """A grammar for either calls with their marker, or an answer that matches the grammar
    `answer`.
    """
    lines = [
        "%llguidance {}",
        r"SPACE: /[ \n]{0,2}/",
        syntax.rules,
        f"start: {syntax.opening} {syntax.first} {syntax.more} | @answer",
    ]
    return with_inner(_joined(lines), answer, "answer")


def with_inner(outer: str, inner: str, name: str) -> str:
    """Combine two grammars. `outer` refers to `inner` (a Lark grammar or llguidance JSON) as
    `@name`.
    """
    if inner.lstrip().startswith("{"):
        first, *others = json.loads(inner)["grammars"]
    else:
        first, others = {"lark_grammar": inner}, []
    return json.dumps({"grammars": [{"lark_grammar": outer}, {**first, "name": name}, *others]})


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
