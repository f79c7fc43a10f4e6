"""Mistral: `[TOOL_CALLS]` and a list of objects with name and arguments, or, since its version 11,
`[TOOL_CALLS]` before every call, then the name, `[ARGS]` and the arguments.

The templates refuse ids that are not nine letters and digits.
"""

import hashlib
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.parsing.base import Tool, ToolFormat, call_object
from engine.core.parsing.calls import CallReader
from engine.core.parsing.grammars import (
    CallSyntax,
    arguments_rule,
    literal,
    marker,
    object_calls,
)
from engine.core.parsing.source import NotACall, Source, Steps

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"[A-Za-z0-9]{9}")
_MAX_ID_CHARS = 64


@dataclass(frozen=True)
class MistralFormat(ToolFormat):
    name = "mistral"
    markers = (OPEN, CALL_ID, ARGS)
    has_args_marker: bool = False

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        yield from source.skip_space()
        while (yield from source.text_until(OPEN)):
            source.take(len(OPEN))
            try:
                if (yield from source.skip_space()) == "[":
                    yield from calls.read_list()
                else:
                    yield from _named_call(source, calls)
            except NotACall:
                calls.give_up()
            else:
                yield from source.skip_space()

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        opening = marker(OPEN, control)
        if not self.has_args_marker:
            more = '(", " call)*' if parallel else ""
            listed = f'listed: SPACE "[" call {more} "]"'
            rules = f"{listed}\n{object_calls(tools, 'arguments')}"
            return CallSyntax(rules, opening, "listed", "")
        args = marker(ARGS, control)
        lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            name = literal(tool["function"]["name"])
            lines.append(f"call_{index}: {name} {args} {arguments_rule(tool)}")
        more = f"({opening} call)*" if parallel else ""
        return CallSyntax("\n".join(lines), opening, "call", more)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        if self.has_args_marker:
            return "".join(f"{OPEN}{name}{ARGS}{arguments}" for name, arguments in calls)
        objects = [call_object(*call, "arguments") for call in calls]
        return f"{OPEN}[{', '.join(objects)}]"

    def new_call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def template_call_id(self, call_id: str) -> str:
        if _ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _named_call(source: Source, calls: CallReader) -> Steps[None]:
    name = yield from source.word(calls.max_name_chars)
    if name not in calls.names:
        raise NotACall
    if (yield from source.starts_with(CALL_ID)):
        source.take(len(CALL_ID))
        yield from source.word(_MAX_ID_CHARS)
    if (yield from source.starts_with(ARGS)):
        source.take(len(ARGS))
    if (yield from source.skip_space()) != "{":
        raise NotACall
    calls.begin(name)
    yield from calls.stream()
