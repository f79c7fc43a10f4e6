"""Builds grammars in llguidance's syntax that force a model to write well-formed tool calls, after
its reasoning.

Each tool's arguments are a separate `%json` rule with the tool's own schema, so that its `$ref`s
resolve. The object around the arguments has the spacing that chat templates use. If a marker is a
control token, it can't be part of text and is matched by its id. Other markers are plain text, so a
lazy rule matches text up to the first marker.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.grammar.schema_rules import compile_schema, unchecked_keywords
from engine.core.parsing.rows import ReasoningRow

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
ANY = r"/(.|\n)*/"
_LINE_END = re.compile(r"(\s*\n\s*)")


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
    primed: str = ""  # text before a visible answer whose first marker is in the prompt
    lead: str = ""  # plain text at the beginning of `opening`, if a control token follows it

    @property
    def is_bare(self) -> bool:
        return self.bare_text is not None


def literal(text: str) -> str:
    return json.dumps(text)


def sequence(text: str, control: Mapping[str, int]) -> str:
    """Rule for a literal text. Control tokens in it are matched by id, line ends by any whitespace
    of about this length.
    """
    known = sorted((mark for mark in control if mark in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
    rules: list[str] = []
    for piece in pieces:
        if piece in control:
            rules.append(f"<[{control[piece]}]>")
            continue
        for part in _LINE_END.split(piece):
            if part and part.isspace() and "\n" in part:
                rules.append(rf"/[ \n]{{0,{max(2, len(part))}}}/")
            elif part:
                rules.append(literal(part))
    return " ".join(rules)


def text_lead(text: str, control: Mapping[str, int]) -> str:
    """The plain text before the first control token in a literal text; "" if it has no control
    token. Such text can't be distinguished from free text, so the rule for free text must end with
    it.
    """
    places = [text.find(mark) for mark in control if mark in text]
    return text[: min(places)] if places else ""


def any_text(ending: str) -> str:
    """Rule for any text that ends with `ending`."""
    return f"/(.|\\n)*{_regex(ending)}/"


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
    return f"%json {json.dumps(enforceable(schema, where, strict))}"


def enforceable(schema: dict[str, Any], where: str, strict: bool) -> dict[str, Any]:
    if strict:
        if unchecked := unchecked_keywords(schema, where):
            problem = f"{unchecked[0]}: no grammar can enforce it, as a strict tool demands"
            raise InvalidRequestError(f"{problem}; leave it out or unset 'strict'.", param=where)
        return compile_schema(schema, where)
    try:
        return compile_schema(schema, where)
    except InvalidRequestError:
        pass
    loose = _loosened(schema)
    return compile_schema(loose if is_supported(loose) else _OBJECT, where)


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
        return value if is_supported(alone) else {}

    return {
        **shared,
        "type": "object",
        "properties": {name: loose(value) for name, value in properties.items()},
        "required": [
            name for name in properties if isinstance(required, list) and name in required
        ],
        "additionalProperties": schema.get("additionalProperties") is not False,
    }


def is_supported(schema: Mapping[str, Any]) -> bool:
    try:
        compile_schema(schema, "")
    except InvalidRequestError:
        return False
    return True


def tool_grammar(syntax: CallSyntax, *, forced: bool, thought: str) -> str:
    """If `forced`, a grammar for calls only. Otherwise a grammar for text that may contain calls;
    each call that it contains is well-formed. `thought` is the marker of reasoning that may precede
    the output, or "".
    """
    calls = f"{syntax.first} {syntax.more}"
    lines = ["%llguidance {}", r"SPACE: /[ \n]{0,2}/", syntax.rules]
    if forced:
        opening = f"({syntax.opening})?" if syntax.is_bare and syntax.opening else syntax.opening
        opening = "" if syntax.primed else opening
        lines.append(f"start: SPACE {opening or ''} {calls}")
        return _joined(lines)
    if syntax.is_bare:
        behind_text = f"({syntax.opening} {calls})?" if syntax.opening else ""
        lines += [f"start: TEXT {behind_text} | SPACE {calls}", f"TEXT: {syntax.bare_text}"]
        return _joined(lines)
    # If the reasoning marker is plain text, its lazy rule competes with the rule for calls. So text
    # must not start with this marker.
    excluded = f" & ~/{_regex(thought)}(.|\\n)*/" if thought else ""
    lines.append(f"TEXT: {ANY}{excluded}")
    if syntax.primed:
        shown = f"{literal(syntax.primed)} {ANY}"
        lines += [f"start: SHOWN | opened {calls} | {calls}", f"SHOWN: {shown}"]
        lines.append(f"opened[lazy]: {shown} {syntax.opening}")
    elif syntax.lead and syntax.opening is not None:
        rest = syntax.opening.removeprefix(literal(syntax.lead))
        lines += [f"start: TEXT | LEAD {rest} {calls}", f"LEAD: {any_text(syntax.lead)}{excluded}"]
    elif syntax.opening is not None and syntax.opening.startswith("<["):
        lines.append(f"start: TEXT ({syntax.opening} {calls})?")
    else:
        lines += [f"start: TEXT | opened {calls}", f"opened[lazy]: TEXT {syntax.opening}"]
    return _joined(lines)


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def channel_grammar(
    row: ReasoningRow,
    syntax: CallSyntax | None,
    control: Mapping[str, int],
    *,
    forced: bool,
    answer: str | None,
) -> str:
    """Grammar for an answer that is a series of messages: reasoning and remarks, then calls or the
    final message, which matches `answer` if it is given.
    """
    close = sequence(row.close, control)
    lazy = "" if close.startswith("<[") else "[lazy]"
    asides = " | ".join(f"({sequence(text, control)})" for text in (row.open, *row.remarks))
    lines = [
        "%llguidance {}",
        r"SPACE: /[ \n]{0,2}/",
        f"aside{lazy}: ({asides}) {ANY} {close}",
    ]
    final = " | ".join(f"({sequence(text, control)})" for text in row.finals)
    final = f"({final}) " + ("@answer" if answer is not None else ANY)
    choices = [] if forced else [final]
    if syntax is not None:
        lines.append(syntax.rules)
        choices.append(f"{syntax.opening} {syntax.first} {syntax.more}")
    lines.append(f"start: aside* ({' | '.join(choices)})")
    grammar = _joined(lines)
    return grammar if answer is None or forced else with_inner(grammar, answer, "answer")


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


def with_reasoning(
    row: ReasoningRow, grammar: str, opened: bool, control: Mapping[str, int]
) -> str:
    """A grammar for free reasoning followed by text that matches `grammar`. If the prompt did not
    open the reasoning block, reasoning is optional.
    """
    if row.channels:
        return channel_grammar(row, None, control, forced=False, answer=grammar)
    opening = "" if opened else sequence(row.open.rstrip(), control)
    closing = sequence(row.close, control)
    lines = ["%llguidance {}", r"SPACE: /[ \n]{0,2}/"]
    lines.append("start: thought SPACE @visible" if opened else "start: (thought SPACE)? @visible")
    if closing.startswith("<["):
        lines.append(f"thought: {opening} {ANY} {closing}")
    elif opening.startswith("<["):
        lines += [f"thought: {opening} rest", f"rest[lazy]: {ANY} {closing}"]
    else:
        lines.append(f"thought[lazy]: {opening} {ANY} {closing}")
    return with_inner("\n".join(lines) + "\n", grammar, "visible")
