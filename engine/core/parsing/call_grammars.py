"""Grammar rules for the calls of a row, with each tool's arguments held to its schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.parsing.grammars import (
    ANY,
    CallSyntax,
    any_text,
    arguments_rule,
    enforceable,
    is_supported,
    literal,
    sequence,
    text_lead,
)
from engine.core.parsing.rows import CallRow, Part, parts_of
from engine.core.parsing.values import (
    element_text,
    python_literal,
    quoted_literal,
    resolved,
    types_of,
)

Control = Mapping[str, int]
# Free text of a format whose calls have no marker. It must not begin like a call.
_BARE_TEXT = {
    "llama3": r"/([ \n]*[^ \n{](.|\n)*)?/",
    "json": r"/([ \n]*([^ \n{\[]|\[[^{])(.|\n)*)?/",
    "pythonic": r"/([ \n]*[^ \n\[](.|\n)*)?/",
    "llama4": r"/([ \n]*[^ \n\[](.|\n)*)?/",
}
_SLOTS = {"index": "/[0-9]{1,3}/", "id": "/[A-Za-z0-9]{9}/"}
_ID_MEMBER = r'(", \"id\": \"" /[A-Za-z0-9]{9}/ "\"")?'
_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]*/"
# Keywords whose meaning the rules for elements and literals keep, or that only describe.
_KEPT = frozenset(
    {
        *("type", "properties", "required", "enum", "const", "items", "additionalProperties"),
        *("minimum", "maximum", "minItems", "maxItems", "$ref"),
        *("title", "description", "default", "examples", "$schema", "$defs", "definitions"),
    }
)


def call_syntax(
    row: CallRow, tools: Sequence[Mapping[str, Any]], parallel: bool, control: Control
) -> CallSyntax:
    """Grammar rules for calls of these tools."""
    rules = Rules(row, control)
    calls = [rules.call(index, tool) for index, tool in enumerate(tools)]
    names = [f"call_{index}" for index in range(len(tools))]
    lines = ["call: " + " | ".join(names)]
    lines += [f"{name}: {rule}" for name, rule in zip(names, calls, strict=True)]
    lines += rules.lines
    opening = _marker(row.trigger, control) if row.trigger else None
    lead = text_lead(row.trigger, control)
    bare_text = _BARE_TEXT[row.name] if row.bare else None
    primed = row.frame[0].removeprefix(row.primed) if row.primed else ""
    between = sequence(row.between, control)
    if row.messages is not None:
        joint = sequence(row.messages.close, control)
        more = f"({joint} call)*" if parallel and not row.one_call_per_message else ""
        return CallSyntax("\n".join(lines), "", "call", more)
    if row.before:
        first = f"SPACE {sequence(row.before.removeprefix(row.trigger), control)} call"
        more = f"({between} call)*" if parallel else ""
        more += f" {sequence(row.after, control)}"
        return CallSyntax("\n".join(lines), opening, first, more, bare_text, primed, lead)
    if row.bare:
        if row.trigger:
            return CallSyntax(
                "\n".join(lines),
                opening,
                "call",
                f"(/{row.between.strip()} ?/ call)*" if parallel else "",
                bare_text,
            )
        several = f'| "[" call ({between} call)* "]"' if parallel else ""
        lines.append(f"calls: call {several}")
        return CallSyntax("\n".join(lines), None, "calls", "", bare_text)
    more = f"({between} {opening} call)*" if parallel else ""
    return CallSyntax("\n".join(lines), opening, "call", more, primed=primed, lead=lead)


def _marker(text: str, control: Control) -> str:
    """Rule for a marker. The parser finds it only if its whitespace is exact."""
    has_control = any(mark in text for mark in control)
    return sequence(text, control) if has_control else literal(text)


class Rules:
    """Builds the rules of one grammar. `lines` are the rules that the calls refer to."""

    def __init__(self, row: CallRow, control: Control) -> None:
        self._row = row
        self._control = control
        self.lines: list[str] = []
        pattern = row.call.replace("{object}", row.object)
        if row.messages is not None:
            pattern = f"{row.before}{pattern}{row.after}"
        # The marker of the first call is matched apart from the rest.
        elif not row.before and not row.bare:
            pattern = pattern.removeprefix(row.trigger)
        self._parts = parts_of(pattern)
        if row.encoding in ("python", "quoted"):
            self._add_literals()

    def call(self, index: int, tool: Mapping[str, Any]) -> str:
        """The rule for a call of one tool."""
        headers = [self._rule(parts_of(header), index, tool) for header in self._row.headers]
        lead = f"({' | '.join(headers)}) " if headers else ""
        return lead + self._rule(self._parts, index, tool)

    def _rule(self, parts: Sequence[Part], index: int, tool: Mapping[str, Any]) -> str:
        function = tool["function"]
        rules: list[str] = []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                if self._row.short_ids and part.startswith("}") and number:
                    # The call's id may follow as another member.
                    rules.append(_ID_MEMBER)
                rules.append(sequence(part, self._control))
            elif part.name == "name":
                rules.append(literal(function["name"]))
            elif part.name == "args":
                rules.append(self._arguments(index, tool))
            else:
                rules.append(_SLOTS[part.name])
        return " ".join(rules)

    def _arguments(self, index: int, tool: Mapping[str, Any]) -> str:
        if self._row.encoding == "json":
            return arguments_rule(tool)
        function = tool["function"]
        schema = function.get("parameters") or {"properties": {}}
        where = f"tools.{function['name']}.parameters"
        if function.get("strict") is True:
            _check_strict(schema, where)
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        is_open = not isinstance(schema.get("properties"), dict) or (
            schema.get("additionalProperties") not in (None, False)
        )
        listed = schema.get("required")
        required = set(listed) if isinstance(listed, list) else set()
        if self._row.encoding == "tags":
            return self._elements(index, schema, properties, required, is_open)
        members = []
        for key, value in properties.items():
            rule = f"{literal(self._key(key))} {self._literal(value, schema)}"
            members.append((rule, key in required))
        if is_open:
            return f"{self._open} free {self._close}"
        return f"{self._open} {self._members(f'm_{index}', members)} {self._close}"

    # Formats that write each argument as an XML element.

    def _elements(
        self,
        index: int,
        schema: Mapping[str, Any],
        properties: Mapping[str, Any],
        required: set[str],
        is_open: bool,
    ) -> str:
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        rules = []
        for number, (key, value) in enumerate(properties.items()):
            name = f"p_{index}_{number}"
            self._element(name, key, resolved(value, schema), shared)
            rules.append(name if key in required else f"{name}?")
        if is_open:
            name = f"p_{index}_more"
            self._element(name, None, {"type": "string"}, {})
            rules.append(f"{name}*")
        return " ".join(rules)

    def _element(self, name: str, key: str | None, schema: Any, shared: Mapping[str, Any]) -> None:
        """Add the rule `name` for one argument. Any key is allowed if `key` is None."""
        types = types_of(schema)
        is_text = types == {"string"}
        kinds = {"string": str(is_text).lower(), "type": next(iter(types), "string")}
        opening: list[str] = []
        closing = ""
        parts = parts_of(self._row.param)
        place = next(i for i, part in enumerate(parts) if part == _VALUE)
        for part in parts[:place]:
            if isinstance(part, str):
                opening.append(sequence(part, self._control))
            elif part.name == "key":
                opening.append(_KEY if key is None else literal(key))
            else:
                opening.append(
                    literal(_type_name(kinds["type"]) if part.name == "type" else kinds["string"])
                )
        for part in parts[place + 1 :]:
            closing += part if isinstance(part, str) else key or ""
        before = " ".join(opening)
        after = sequence(closing.lstrip("\n"), self._control)
        if is_text and not (isinstance(schema, Mapping) and {"enum", "const"} & schema.keys()):
            lead = text_lead(closing.lstrip("\n"), self._control)
            if lead or after.startswith("<["):
                rest = sequence(closing.lstrip("\n").removeprefix(lead), self._control)
                self.lines.append(f"{name}: {before} {any_text(lead)} {rest}")
            else:
                self.lines += [
                    f"{name}: {before} {name}_text {self._rest(closing)}",
                    f"{name}_text[lazy]: {ANY} {literal(closing.split()[0])}",
                ]
            return
        end = sequence(closing, self._control)
        self.lines.append(f"{name}: {before} ({self._value(schema, shared)}) {end}")

    def _rest(self, closing: str) -> str:
        """What follows the first word of an element's end."""
        text = closing.lstrip("\n")
        return sequence(text.removeprefix(text.split()[0]), self._control)

    def _value(self, schema: Any, shared: Mapping[str, Any]) -> str:
        """The rule for a value that is not free text: JSON, or one of some strings."""
        if isinstance(schema, Mapping) and ("enum" in schema or "const" in schema):
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            if isinstance(values, list) and values:
                return " | ".join(literal(element_text(value)) for value in values)
        whole = {**shared, **schema} if isinstance(schema, Mapping) else {}
        if "string" in types_of(whole) or not types_of(whole):
            return r"/[^<\n]*/"  # the type is open, and the closing marker begins with "<"
        return f"%json {json.dumps(enforceable(whole, '', False) if is_supported(whole) else {})}"

    # Literals.

    def _add_literals(self) -> None:
        if self._row.encoding == "python":
            words = '"True" | "False" | "None"'
            self._open, self._close, self._joint = "", "", literal(", ")
            string = r'/"([^"\\]|\\[^uxN])*"/ | ' + r"/'([^'\\]|\\[^uxN])*'/"
            self.lines.append(f"str: {string}")
            member = 'str ": " any'
            self.lines.append('free: (/[A-Za-z_][A-Za-z0-9_]*/ "=" any ("," " "? free)?)?')
        else:
            words = '"true" | "false" | "null"'
            self._open, self._close, self._joint = literal("{"), literal("}"), literal(",")
            quote = sequence(self._row.quote, self._control)
            if quote.startswith("<["):
                self.lines.append(f"str: {quote} {ANY} {quote}")
            else:
                self.lines += ["str: " + quote + " str_end", f"str_end[lazy]: {ANY} {quote}"]
            member = '/[A-Za-z_][A-Za-z0-9_.\\-]*/ ":" any'
            self.lines.append('free: (member ("," member)*)?')
        number = '%json {"type": "number"}'
        joint = self._joint
        self.lines += [
            f"member: {member}",
            f"any: str | {number} | {words} | list | dict",
            f'list: "[" (any ({joint} any)*)? "]"',
            f'dict: "{{" (member ({joint} member)*)? "}}"',
        ]

    def _key(self, key: str) -> str:
        return f"{key}=" if self._row.encoding == "python" else f"{key}:"

    def _members(self, name: str, members: Sequence[tuple[str, bool]]) -> str:
        """A rule for members in this order; the optional ones may be left out."""
        following = ""
        for index in reversed(range(len(members))):
            rule, is_required = members[index]
            rest = f"({following})" if following else ""
            tail = f"({self._joint} {name}_{index}_next)?" if rest else ""
            if rest:
                self.lines.append(f"{name}_{index}_next: {following}")
                if any(needed for _, needed in members[index + 1 :]):
                    tail = tail.removesuffix("?")
            own = f"{rule} {tail}"
            following = own if is_required or not rest else f"{own} | {following}"
        if not following:
            return ""
        is_needed = any(needed for _, needed in members)
        return f"({following})" if is_needed else f"({following})?"

    def _literal(self, schema: Any, root: Mapping[str, Any]) -> str:
        schema = resolved(schema, root)
        if not isinstance(schema, Mapping):
            return "any"
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            if isinstance(values, list) and values:
                return f"({' | '.join(self._constant(value) for value in values)})"
        kind = schema.get("type")
        if kind in ("integer", "number") and is_supported(schema):
            return f"%json {json.dumps(enforceable(dict(schema), '', False))}"
        if kind == "boolean":
            is_python = self._row.encoding == "python"
            return '("True" | "False")' if is_python else '("true" | "false")'
        if kind == "string":
            return "str"
        if kind == "array":
            return self._array(schema, root)
        return "dict" if kind == "object" else "any"

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        item = self._literal(schema.get("items"), root)
        most, least = schema.get("maxItems"), schema.get("minItems") or 0
        if most == 0:
            return literal("[]")
        further = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self._joint} {item}){further}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _constant(self, value: Any) -> str:
        if self._row.encoding == "python":
            return literal(python_literal(value))
        return sequence(quoted_literal(value, self._row.quote), self._control)


_VALUE: Part = parts_of("{value}")[0]


def _type_name(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _check_strict(schema: Any, where: str) -> None:
    """Refuse a strict tool whose schema has a keyword that these formats can't enforce."""
    if not isinstance(schema, Mapping):
        return
    unknown = sorted(schema.keys() - _KEPT)
    if unknown:
        raise InvalidRequestError(
            f"{where}: keyword {unknown[0]!r} can't be enforced in this model's tool call format; "
            "leave it out, or set strict to false.",
            param="tools",
        )
    properties = schema.get("properties")
    for key, value in properties.items() if isinstance(properties, dict) else ():
        _check_strict(value, f"{where}.properties.{key}")
    _check_strict(schema.get("items"), f"{where}.items")
