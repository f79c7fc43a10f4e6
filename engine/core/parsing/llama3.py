"""Llama 3: the whole answer is an object with name and parameters, or several with semicolons.

`<|python_tag|>` may stand before them, also behind text. Without it, text that does not begin with
a brace is only text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.parsing.base import Tool, ToolFormat, call_object
from engine.core.parsing.calls import CallReader
from engine.core.parsing.grammars import CallSyntax, marker, object_calls
from engine.core.parsing.source import NotACall, Source, Steps

TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Llama3Format(ToolFormat):
    name = "llama3"
    markers = (TAG,)
    one_call_per_message = True

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        if (yield from source.skip_space()) == "{":
            yield from _series(source, calls)
        while (yield from source.text_until(TAG)):
            source.take(len(TAG))
            yield from _series(source, calls)

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        return CallSyntax(
            rules=object_calls(tools, "parameters"),
            opening=marker(TAG, control),
            first="call",
            more="(/; ?/ call)*" if parallel else "",
            bare_text=r"/([ \n]*[^ \n{](.|\n)*)?/",
        )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(call_object(*call, "parameters") for call in calls)


def _series(source: Source, calls: CallReader) -> Steps[None]:
    try:
        yield from calls.read_series()
    except NotACall:
        calls.give_up()
