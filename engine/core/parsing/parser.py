"""Parses the output of a model into reasoning, tool calls and visible text.

There is one `OutputParser` per choice. It gets detokenized text, in which the control tokens of
`OutputFormat.shown_ids` must be kept as text.
"""

from collections.abc import Callable, Mapping
from typing import Any

from engine.core.parsing.calls import CallReader
from engine.core.parsing.formats import ToolFormat
from engine.core.parsing.pieces import Piece
from engine.core.parsing.row_reader import FENCE, RowReader
from engine.core.parsing.rows import ReasoningRow
from engine.core.parsing.source import NotACall, Source, Steps

_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = {}
_MAX_HEADER_CHARS = 256
_MESSAGE = "<|message|>"
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>")


class OutputParser:
    """Parses the text of one choice into pieces, which are final and in order. All pieces of one
    kind, joined, don't depend on how the text was split.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        names: frozenset[str],
        reasoning: ReasoningRow | None = None,
        opened: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS,
    ) -> None:
        """`names` are the tools that may be called, and `schemas` describe their parameters. If
        there are none, no calls are parsed.
        """
        self._source = Source()
        self._row = None if tools is None else tools.row
        new_id = tools.new_call_id if tools else str
        self._calls = CallReader(self._source, names, new_id, schemas)
        self._reasoning = reasoning
        self._steps = self._run(opened)
        if self._row is not None and self._row.primed:
            self._source.push(self._row.primed)
        next(self._steps, None)

    def push(self, text: str) -> list[Piece]:
        if text:
            self._source.push(text)
            next(self._steps, None)
        return self._source.take_pieces()

    def flush(self) -> list[Piece]:
        """End the input. Call this at the end of generation. Returns the pieces of the text still
        held back.
        """
        self._source.end()
        next(self._steps, None)
        return self._source.take_pieces()

    @property
    def num_calls(self) -> int:
        """Number of announced calls, complete or not."""
        return self._calls.num_calls

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._source.in_reasoning

    @property
    def num_unread(self) -> int:
        """Number of characters not parsed yet; never more than the length of a marker."""
        return self._source.num_unread

    def _run(self, opened: bool) -> Steps[None]:
        source = self._source
        reader = None
        if self._row is not None and self._calls.names:
            reader = RowReader(self._row, source, self._calls)
        if self._reasoning is not None and self._reasoning.channels:
            yield from ChannelReader(source, self._calls, reader).read()
        else:
            if self._reasoning is not None:
                yield from read_reasoning(self._reasoning, source, opened)
            yield from self._answer(reader)
        # If only whitespace follows the last call, it belongs to the call's syntax.
        if self.num_calls:
            source.discard()
        else:
            source.release()

    def _answer(self, reader: RowReader | None) -> Steps[None]:
        source, reasoning = self._source, self._reasoning
        handlers: dict[str, Callable[[], Steps[None]]] = {}
        frame = (*(reasoning.frame if reasoning else ()), *(self._row.frame if self._row else ()))
        for marker in frame:
            handlers[marker] = self._dropper(marker)
        if reasoning is not None and reasoning.repeats:
            handlers[reasoning.open.rstrip()] = lambda: read_reasoning(reasoning, source, False)
        if reader is not None:
            yield from source.skip_space()
            yield from reader.begin()
            if reader.row.trigger:
                handlers[reader.row.trigger] = reader.section
            if not reader.row.bare:
                handlers.setdefault(FENCE, reader.fenced)
        while marker := (yield from source.text_until(*handlers)):
            yield from handlers[marker]()

    def _dropper(self, marker: str) -> Callable[[], Steps[None]]:
        def drop() -> Steps[None]:
            self._source.take(len(marker))
            self._source.discard()
            yield from ()

        return drop


def read_reasoning(row: ReasoningRow, source: Source, opened: bool) -> Steps[None]:
    """Parse the reasoning block that comes next, if there is one."""
    if not opened:
        yield from source.skip_space()
        is_closed = yield from source.starts_with(row.close)
        if is_closed or not (yield from source.starts_with(row.open.rstrip())):
            if is_closed:  # the answer begins with the end of an empty block
                yield from _drop(source, row.close)
            return
        source.take(len(row.open.rstrip()))
        source.discard()
    source.reason(True)
    yield from source.skip_space()
    source.discard()
    ends = yield from source.text_until(row.close)
    source.reason(False)
    if ends:
        yield from _drop(source, row.close)


def _drop(source: Source, marker: str) -> Steps[None]:
    source.take(len(marker))
    yield from source.skip_space()
    source.discard()


class ChannelReader:
    """Parses an answer that is a series of messages, each with a header that ends at `<|message|>`.

    The header says whether a message is reasoning, a call or visible text. The first message may
    have no header; it is text.
    """

    def __init__(self, source: Source, calls: CallReader, reader: RowReader | None) -> None:
        self._source = source
        self._calls = calls
        self._reader = reader

    def read(self) -> Steps[None]:
        source = self._source
        while not source.is_over:
            header = yield from self._header()
            name = _recipient(header)
            if name in self._calls.names and self._reader is not None:
                yield from self._call(self._reader, name)
            else:
                source.reason("analysis" in header or "to=self" in header)
            marker = yield from source.text_until(*_ENDS, *_STARTS)
            source.reason(False)
            if not marker:
                return
            if marker in _ENDS:
                source.take(len(marker))
                source.discard()
            yield from source.peek()

    def _header(self) -> Steps[str]:
        """Read a header. Returns "" if the text that comes next has none."""
        source = self._source
        yield from source.skip_space()
        for start in (*_STARTS, "to="):
            if (yield from source.starts_with(start)):
                break
        else:
            return ""
        header, found = "", ""
        try:
            while not found and len(header) <= _MAX_HEADER_CHARS:
                chunk, found = yield from source.raw_until(_MESSAGE)
                source.hold(chunk)
                header += chunk
        except NotACall:
            pass
        if not found:
            source.release()
            return ""
        source.take(len(_MESSAGE))
        source.discard()
        return header

    def _call(self, reader: RowReader, name: str) -> Steps[None]:
        if reader.row.before:
            if (yield from self._source.text_until(reader.row.trigger, *_ENDS, *_STARTS)) == (
                reader.row.trigger
            ):
                yield from reader.section()
            return
        try:
            if (yield from self._source.skip_space()) != "{":
                raise NotACall
            self._calls.begin(name)
            yield from self._calls.stream()
        except NotACall:
            self._calls.give_up()


def _recipient(header: str) -> str:
    """The tool that a message is for, or ""."""
    words = header.replace("<|", " <|").split()
    target = next((word[len("to=") :] for word in words if word.startswith("to=")), "")
    return target.removeprefix("functions.")
