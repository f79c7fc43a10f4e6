"""Models without a syntax of their own: the whole answer is an object with name and arguments, or a
list of them, maybe in a Markdown fence. Text that begins otherwise is only text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.parsing.base import Tool, ToolFormat, call_object
from engine.core.parsing.calls import CallReader
from engine.core.parsing.grammars import CallSyntax, object_calls
from engine.core.parsing.source import NotACall, Source, Steps

FENCE = "```"
# Free text: it may begin with a bracket, but not with one that opens a list of objects.
_TEXT = r"/([ \n]*([^ \n{\[]|\[[^{])(.|\n)*)?/"


@dataclass(frozen=True)
class GenericJsonFormat(ToolFormat):
    name = "json"
    markers = ()

    def parse(self, source: Source, calls: CallReader) -> Steps[None]:
        try:
            yield from _answer(source, calls)
        except NotACall:
            calls.give_up()
        yield from source.rest()

    def syntax(
        self, tools: Sequence[Tool], parallel: bool, control: Mapping[str, int]
    ) -> CallSyntax:
        several = '| "[" call (", " call)* "]"' if parallel else ""
        return CallSyntax(
            rules=f"calls: call {several}\n{object_calls(tools, 'arguments')}",
            opening=None,
            first="calls",
            more="",
            bare_text=_TEXT,
        )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        objects = [call_object(*call, "arguments") for call in calls]
        return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _answer(source: Source, calls: CallReader) -> Steps[None]:
    yield from source.skip_space()
    is_fenced = yield from source.starts_with(FENCE)
    if is_fenced:
        source.take(len(FENCE))
        yield from source.word(len("json"))
    opening = yield from source.skip_space()
    if opening == "[":
        yield from calls.read_list()
    elif opening == "{":
        yield from calls.read_series()
    else:
        raise NotACall
    yield from source.skip_space()
    if is_fenced and (yield from source.starts_with(FENCE)):
        source.take(len(FENCE))
        source.discard()
        yield from source.skip_space()
