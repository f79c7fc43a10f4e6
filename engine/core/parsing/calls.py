"""Parses tool calls written as JSON objects, and streams their arguments.

A call is announced to the client when the name of a tool was read and its arguments object opens.
Until then, the text may still turn out not to be a call. After that, the call can't be taken back,
and its arguments are streamed as long as they are valid JSON. If the output ends or has an invalid
character, the call stays incomplete and the rest of the output becomes text. Calls without
arguments get "{}".
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.parsing.json_scanner import JsonScanner, is_object
from engine.core.parsing.pieces import ToolCallPiece
from engine.core.parsing.source import NotACall, Source, Steps

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
NAME_KEYS = frozenset({"name", "tool_name"})
# An object with any other key is not a call. So most JSON answers are recognized at their first
# key, and streamed as text.
_KEYS = ARGUMENT_KEYS | NAME_KEYS | {"type", "id", "tool_call_id"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_KEY_CHARS = max(len(key) for key in _KEYS)
_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = {}


@dataclass(slots=True)
class _Call:
    name: str | None = None
    arguments: str | None = None  # arguments, if they came before the name
    complete: bool = False


class CallReader:
    """Parses calls of the tools in `names`, and numbers the calls from 0."""

    def __init__(
        self,
        source: Source,
        names: frozenset[str],
        new_id: Callable[[], str],
        schemas: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS,
    ) -> None:
        """`schemas` maps names to JSON schemas of their parameters."""
        self.num_calls = 0
        self.names = names
        self.schemas = schemas
        self.max_name_chars = max((len(name) for name in names), default=0)
        self._source = source
        self._new_id = new_id

    def read(self) -> Steps[None]:
        """Parse one JSON object with a tool's name and arguments.

        Raises `NotACall` if the object turns out not to be a call. If invalid text follows complete
        arguments, the call is kept and that text becomes plain text.
        """
        call = _Call()
        try:
            yield from self._members(call)
        except NotACall:
            if not call.complete:
                raise
            if not self._source.holds_only_space():
                self.give_up()
            return
        self._source.discard()

    def read_series(self) -> Steps[None]:
        """Parse one or more calls, separated by whitespace or semicolons."""
        char = "{"
        while char == "{":
            yield from self.read()
            char = yield from self._source.skip_space()
            if char == ";":
                self._source.take(1)
                char = yield from self._source.skip_space()

    def read_list(self) -> Steps[None]:
        """Parse a JSON array of calls."""
        yield from self._punctuation("[")
        more = True
        while more:
            yield from self.read()
            more = (yield from self._punctuation(",]")) == ","
        self._source.discard()

    def give_up(self) -> None:
        """Emit the held text as plain text. But if the output has ended after at least one call,
        drop the held text, because it is the start of another call.
        """
        if self.num_calls and self._source.is_over:
            self._source.discard()
        else:
            self._source.release()

    def begin(self, name: str) -> None:
        """Announce a call. `stream` sends its arguments next."""
        self._source.discard()
        self._source.emit(ToolCallPiece(self.num_calls, "", self._new_id(), name))
        self.num_calls += 1

    def stream(self) -> Steps[None]:
        """Stream an arguments object to the client while it arrives."""
        scanner = JsonScanner()
        while scanner.open:
            self.add((yield from self._source.scan(scanner)))
        if scanner.bad:
            raise NotACall

    def add(self, arguments: str) -> None:
        """Emit more of the arguments of the last call."""
        if arguments:
            self._source.emit(ToolCallPiece(self.num_calls - 1, arguments))

    def _members(self, call: _Call) -> Steps[None]:
        yield from self._punctuation("{")
        more = True
        while more:
            key = yield from self._string(_MAX_KEY_CHARS)
            if key not in _KEYS:
                raise NotACall
            yield from self._punctuation(":")
            yield from self._member(call, key)
            more = (yield from self._punctuation(",}")) == ","
        if call.name is None:
            raise NotACall
        if not call.complete:
            self._finish(call, call.name, "{}")

    def _member(self, call: _Call, key: str) -> Steps[None]:
        if key in NAME_KEYS and call.name is None:
            name = yield from self._string(self.max_name_chars)
            if name not in self.names:
                raise NotACall
            call.name = name
            if call.arguments is not None:
                self._finish(call, name, call.arguments)
        elif key in ARGUMENT_KEYS and call.arguments is None and not call.complete:
            yield from self._arguments(call)
        else:
            yield from self._value()

    def _arguments(self, call: _Call) -> Steps[None]:
        opening = yield from self._source.skip_space()
        if opening == "{" and call.name is not None:
            self.begin(call.name)
            yield from self.stream()
            call.complete = True
            return
        raw = yield from self._value()
        # Some models write the arguments as a JSON string.
        text = json.loads(raw) if opening == '"' else "{}" if opening == "n" else raw
        # Escapes in the string may encode a lone surrogate, which UTF-8 can't encode.
        if not is_object(text) or _SURROGATE.search(text):
            raise NotACall
        if call.name is None:
            call.arguments = text
        else:
            self._finish(call, call.name, text)

    def _finish(self, call: _Call, name: str, arguments: str) -> None:
        self.begin(name)
        self.add(arguments.strip())
        call.complete = True

    def _string(self, max_chars: int) -> Steps[str]:
        """Parse a JSON string of up to `max_chars` characters. Any character may be written as an
        escape.
        """
        if (yield from self._source.skip_space()) != '"':
            raise NotACall
        text: str = json.loads((yield from self._value(6 * max_chars + 2)))
        return text

    def _value(self, max_chars: int | None = None) -> Steps[str]:
        """Parse any JSON value and hold its text. Returns the raw text."""
        scanner = JsonScanner()
        parts: list[str] = []
        left = max_chars
        while scanner.open and left != 0:
            chunk = yield from self._source.scan(scanner, left)
            self._source.hold(chunk)
            parts.append(chunk)
            left = None if left is None else left - len(chunk)
        if not scanner.done:
            raise NotACall
        return "".join(parts)

    def _punctuation(self, allowed: str) -> Steps[str]:
        char = yield from self._source.skip_space()
        if not char or char not in allowed:
            raise NotACall
        self._source.take(1)
        return char
