"""Reads and writes arguments that are not JSON: one element per argument, and literals.

Readers convert arguments to JSON while they arrive. Elements have no types, so the tool's schema
decides whether a value is a string. All readers raise `NotACall` at invalid text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.core.parsing.calls import CallReader
from engine.core.parsing.json_scanner import MAX_DEPTH, JsonScanner
from engine.core.parsing.rows import CallPart, CallRow, parts_of
from engine.core.parsing.source import NotACall, Source, Steps

_MAX_KEY_CHARS = 256
_MAX_REFERENCES = 8
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_ATOM = re.compile(r"[A-Za-z0-9_.+\-]*")
_MAX_ATOM_CHARS = 512
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false"}
_WORDS["null"] = "null"
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"'}
_ESCAPES |= {"'": "'", "/": "/", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4}
_HEX = re.compile("[0-9A-Fa-f]*")
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
_JSON_TYPES |= {dict: "object", type(None): "null"}


def types_of(schema: Any) -> frozenset[str]:
    """JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        values = values if isinstance(values, list) else []
        return frozenset(_JSON_TYPES.get(type(value), "") for value in values)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        found = [types_of(option) for option in options]
        return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a local `$ref` names, or the schema itself."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        _, _, path = schema["$ref"].partition("#/")
        schema = root
        for key in path.split("/"):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ElementReader:
    """Reads the arguments of a tool call that writes each argument as an XML-like element, such as
    `<parameter=city>Paris</parameter>`. The `param` of the format's row gives the element's form.
    """

    def __init__(self, source: Source, calls: CallReader, row: CallRow) -> None:
        self._source = source
        self._calls = calls
        self._has_cdata = row.cdata
        self._is_nested = row.nested
        parts = parts_of(row.param)
        place = parts.index(CallPart("value"))
        self._opening, self._closing = parts[:place], parts[place + 1 :]
        first, last = self._opening[0], self._opening[-1]
        assert isinstance(first, str) and isinstance(last, str), row.param
        self._first_word = first.split()[0]
        self._is_padded = last.endswith("\n")

    def read(self, name: str, closing: str) -> Steps[None]:
        """Read all arguments of a call of the tool `name`, up to the text `closing`."""
        schema = self._calls.schemas.get(name) or {}
        properties = schema.get("properties")
        self._calls.add("{")
        separator = ""
        while True:
            yield from self._source.skip_space()
            if (yield from self._source.starts_with(closing)):
                break
            if self._source.is_over:
                raise NotACall
            if not (yield from self._source.starts_with(self._first_word)):
                break
            key, is_text = yield from self._open()
            own = properties.get(key) if isinstance(properties, dict) else None
            types = types_of(resolved(own, schema))
            self._calls.add(f'{separator}"{escaped(key)}": ')
            yield from self._value(key, types, is_text)
            separator = ", "
        self._calls.add("}")

    def _open(self) -> Steps[tuple[str, bool | None]]:
        """Read up to the value. Returns the key, and whether the element says that its value is a
        string (None if it says nothing).
        """
        found = {"key": "", "string": "", "type": ""}
        for part, following in zip(self._opening, (*self._opening[1:], ""), strict=True):
            if isinstance(part, str):
                if not (yield from self._source.expect(part)):
                    raise NotACall
            else:
                assert isinstance(following, str) and following
                found[part.name] = yield from self._until(following.split()[0])
        self._source.discard()
        if self._is_padded and (yield from self._source.peek()) == "\n":
            self._source.take(1)
            self._source.discard()
        if found["string"] or found["type"]:
            return found["key"], found["string"] == "true" or found["type"] == "string"
        return found["key"], None

    def _until(self, marker: str) -> Steps[str]:
        text, found = "", ""
        while not found:
            chunk, found = yield from self._source.raw_until(marker)
            self._source.hold(chunk)
            text += chunk
            if len(text) > _MAX_KEY_CHARS:
                raise NotACall
        return text

    def _value(self, key: str, types: frozenset[str], is_text: bool | None) -> Steps[None]:
        closing = "".join(part if isinstance(part, str) else key for part in self._closing)
        word = closing.split()[0]
        if self._has_cdata and (yield from self._source.expect(_CDATA)):
            self._source.discard()
            word, is_text, closing = _CDATA_END, True, f"{_CDATA_END}{closing}"
        if is_text if is_text is not None else types == {"string"}:
            self._calls.add('"')
            yield from self._stream(word)
            self._calls.add('"')
        else:
            parts: list[str] = []
            found = ""
            while not found:
                chunk, found = yield from self._source.raw_until(word)
                parts.append(chunk)
            text = "".join(parts)
            if self._is_padded:
                text = text.removesuffix("\n")
            inner = _nested(text, self._first_word) if self._is_nested else None
            self._calls.add(_as_json(text, types) if inner is None else inner)
        yield from self._source.expect(closing)
        self._source.discard()

    def _stream(self, closing: str) -> Steps[None]:
        """Stream a string up to `closing`. A line end before it belongs to the element."""
        pending = found = ""
        while not found:
            chunk, found = yield from self._source.raw_until(closing)
            chunk = pending + chunk
            pending = "\n" if self._is_padded and chunk.endswith("\n") else ""
            self._calls.add(escaped(chunk.removesuffix(pending)))


def _nested(text: str, opening: str, depth: int = 1) -> str | None:
    """JSON for a value whose members or items are elements: tags that begin with `opening`. None
    if the text has no such elements.
    """
    members: list[tuple[str, str]] = []
    place = 0
    while place < len(text) and depth < MAX_DEPTH:
        start = text.find(opening, place)
        name, closed, _ = text[start + len(opening) :].partition(">") if start >= 0 else ("",) * 3
        end = text.find(f"{opening}/{name}>", start) if closed else -1
        if end < 0 or text[place:start].strip() or len(name) > _MAX_KEY_CHARS:
            return None
        value = text[start + len(opening) + len(name) + 1 : end]
        inner = _nested(value, opening, depth + 1)
        members.append((name, _as_json(value, frozenset()) if inner is None else inner))
        place = end + len(opening) + len(name) + 2
    if not members:
        return None
    if all(name == "item" for name, _ in members):
        return f"[{', '.join(value for _, value in members)}]"
    pairs = (f'"{escaped(name)}": {value}' for name, value in members)
    return f"{{{', '.join(pairs)}}}"


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value of an element as JSON: the value itself if it is JSON of an allowed type, else a
    string.
    """
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped) if "string" not in types else stripped
    scanner = JsonScanner(depth=1)
    end = scanner.feed(f"{stripped} ", 0, len(stripped) + 1)
    if scanner.done and end >= len(stripped):
        kind = _JSON_TYPES[type(json.loads(stripped))]
        allowed = types | {"integer"} if "number" in types else types
        if kind in allowed or ("string" not in types and kind != "string"):
            return stripped
    return f'"{escaped(text)}"'


class LiteralReader:
    """Reads literals and converts them to JSON. Without `quote`, they are Python's. With `quote`,
    strings stand between two of these markers, and keys are bare.
    """

    def __init__(self, source: Source, calls: CallReader, quote: str) -> None:
        self._source = source
        self._calls = calls
        self._quote = quote

    def keywords(self) -> Steps[None]:
        """Read keyword arguments up to the closing parenthesis, which stays unread."""
        self._calls.add("{")
        separator = ""
        while (yield from self._source.skip_space()) not in (")", ""):
            key = yield from self._source.word(_MAX_KEY_CHARS)
            if not key or not (yield from self._source.expect("=")):
                raise NotACall
            self._source.discard()
            self._calls.add(f'{separator}"{escaped(key)}": ')
            yield from self.value(1)
            separator = ", "
            yield from self._comma(")")
        if self._source.is_over:
            raise NotACall
        self._calls.add("}")

    def value(self, depth: int = 0) -> Steps[None]:
        if depth >= MAX_DEPTH:
            raise NotACall
        char = yield from self._source.skip_space()
        if char == "{":
            yield from self._object(depth)
        elif char in ("[", "("):
            yield from self._list("]" if char == "[" else ")", depth)
        elif self._quote and (yield from self._source.starts_with(self._quote)):
            yield from self._string(self._quote, has_escapes=False)
        elif char in ('"', "'"):
            yield from self._string(char, has_escapes=True)
        else:
            yield from self._word()

    def _object(self, depth: int) -> Steps[None]:
        self._drop(1)
        self._calls.add("{")
        separator = ""
        while (yield from self._source.skip_space()) != "}":
            self._calls.add(separator)
            yield from self._key()
            if not (yield from self._source.expect(":")):
                raise NotACall
            self._source.discard()
            self._calls.add(": ")
            yield from self.value(depth + 1)
            separator = ", "
            yield from self._comma("}")
        self._drop(1)
        self._calls.add("}")

    def _list(self, closing: str, depth: int) -> Steps[None]:
        self._drop(1)
        self._calls.add("[")
        separator = ""
        while (yield from self._source.skip_space()) != closing:
            self._calls.add(separator)
            yield from self.value(depth + 1)
            separator = ", "
            yield from self._comma(closing)
        self._drop(1)
        self._calls.add("]")

    def _comma(self, closing: str) -> Steps[None]:
        char = yield from self._source.skip_space()
        if char == ",":
            self._drop(1)
        elif char != closing:
            raise NotACall

    def _key(self) -> Steps[None]:
        char = yield from self._source.skip_space()
        if self._quote and (yield from self._source.starts_with(self._quote)):
            yield from self._string(self._quote, has_escapes=False)
        elif char in ('"', "'"):
            yield from self._string(char, has_escapes=True)
        else:
            key = yield from self._source.word(_MAX_KEY_CHARS)
            if not key or not self._quote:
                raise NotACall
            self._calls.add(f'"{escaped(key)}"')

    def _string(self, quote: str, has_escapes: bool) -> Steps[None]:
        self._drop(len(quote))
        self._calls.add('"')
        markers = (quote, "\\") if has_escapes else (quote,)
        while True:
            chunk, found = yield from self._source.raw_until(*markers)
            self._calls.add(escaped(chunk))
            if found == quote:
                break
            if found:
                yield from self._escape()
        self._drop(len(quote))
        self._calls.add('"')

    def _escape(self) -> Steps[None]:
        self._source.take(1)
        char = yield from self._source.peek()
        if not char:
            raise NotACall
        self._source.take(1)
        if char in _HEX_DIGITS:
            size = _HEX_DIGITS[char]
            digits = yield from self._source.word(size, _HEX)
            if len(digits) < size:
                raise NotACall
            self._calls.add(f"\\u{digits:0>4}")
        else:
            self._calls.add(_ESCAPES.get(char, "\\\\" + escaped(char)))
        self._source.discard()

    def _word(self) -> Steps[None]:
        word = yield from self._source.word(_MAX_ATOM_CHARS, _ATOM)
        scanner = JsonScanner()
        scanner.feed(f"{word} ", 0, len(word) + 1)
        if word in _WORDS:
            self._calls.add(_WORDS[word])
        elif word and scanner.done:
            self._calls.add(word)
        elif word and self._quote:
            self._calls.add(f'"{escaped(word)}"')
        else:
            raise NotACall
        self._source.discard()

    def _drop(self, count: int) -> None:
        self._source.take(count)
        self._source.discard()


def python_literal(value: Any) -> str:
    """A JSON value as a Python literal. Strings are in double quotes, as in JSON."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(python_literal, value))}]"
    if isinstance(value, dict):
        members = (f"{python_literal(key)}: {python_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(members)}}}"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value)


def quoted_literal(value: Any, quote: str) -> str:
    """A JSON value with bare keys, and strings between two `quote` markers."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(quoted_literal(each, quote) for each in value)}]"
    if isinstance(value, dict):
        members = (f"{key}:{quoted_literal(each, quote)}" for key, each in value.items())
        return f"{{{','.join(members)}}}"
    return json.dumps(value)


def element_text(value: Any) -> str:
    """A JSON value as the text of an element."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
