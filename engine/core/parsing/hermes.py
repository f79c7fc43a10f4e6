"""Hermes, Qwen and their kin: `<tool_call>`, an object with name and arguments, `</tool_call>`.

Calls may follow text and each other. A missing end marker is forgiven, and so is an object that the
model forgot to close before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.parsing.base import Tool, ToolFormat, call_object
from engine.core.parsing.calls import CallReader
from engine.core.parsing.grammars import CallSyntax, marker, object_calls
from engine.core.parsing.source import NotACall, Source, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class HermesFormat(ToolFormat):
    name = "hermes"
    markers = (OPEN, CLOSE)

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        yield from source.skip_space()
        while (yield from source.text_until(OPEN)):
            source.take(len(OPEN))
            try:
                yield from calls.read()
            except NotACall:
                calls.give_up()
                continue
            yield from source.skip_space()
            if (yield from source.starts_with(CLOSE)):
                source.take(len(CLOSE))
                source.discard()
                yield from source.skip_space()

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        opening = marker(OPEN, control)
        block = f"block: SPACE call SPACE {marker(CLOSE, control)}"
        return CallSyntax(
            rules=f"{block}\n{object_calls(tools, 'arguments')}",
            opening=opening,
            first="block",
            more=f"(SPACE {opening} block)*" if parallel else "",
        )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(f"{OPEN}\n{call_object(*call, 'arguments')}\n{CLOSE}" for call in calls)
