"""Parses the tool calls of an answer by the row of its format.

Whitespace between the parts of a call does not matter. A missing closing marker is forgiven. Text
that turns out not to be a call is emitted as text.
"""

from functools import cached_property

from engine.core.parsing.calls import CallReader
from engine.core.parsing.json_scanner import is_object
from engine.core.parsing.pieces import ToolCallPiece
from engine.core.parsing.rows import CallPart, CallRow, parts_of
from engine.core.parsing.source import NotACall, Source, Steps
from engine.core.parsing.tool_formats import JSON, ROWS_BY_NAME
from engine.core.parsing.values import ElementReader, LiteralReader

FENCE = "```"
_MAX_ID_CHARS = 64


class RowReader:
    """Reads calls that are written as `row` says."""

    def __init__(self, row: CallRow, source: Source, calls: CallReader) -> None:
        self.row = row
        self._source = source
        self._calls = calls
        self._literals = LiteralReader(source, calls, row.quote)

    @cached_property
    def _other(self) -> "RowReader | None":
        other = ROWS_BY_NAME.get(self.row.other)
        return None if other is None else RowReader(other, self._source, self._calls)

    def begin(self) -> Steps[None]:
        """Read calls at the start of an answer, if the format's calls may have no marker."""
        if not self.row.bare:
            return
        try:
            yield from self._bare()
        except NotACall:
            self._calls.give_up()

    def section(self) -> Steps[None]:
        """Read calls. The format's marker comes next."""
        try:
            yield from self._marked()
        except NotACall:
            self._calls.give_up()
        else:
            yield from self._source.skip_space()

    def fenced(self) -> Steps[None]:
        """Read a code block. It is a call if it has a call as JSON and the answer ends after it.
        The text is held until then.
        """
        source = Source()
        calls = CallReader(source, self._calls.names, str, self._calls.schemas)
        steps = _whole(RowReader(JSON, source, calls), source)
        next(steps, None)
        pieces: list[ToolCallPiece] = []
        while True:
            text = yield from self._source.available()
            source.push(text) if text else source.end()
            next(steps, None)
            for piece in source.take_pieces():
                if not isinstance(piece, ToolCallPiece):
                    self._source.unread(len(FENCE))
                    return
                pieces.append(piece)
            if not text:
                break
        if self._emit(pieces):
            self._source.discard()
        else:
            self._source.unread(len(FENCE))

    def _emit(self, pieces: list[ToolCallPiece]) -> bool:
        """Emit complete calls. Returns False if there is none, or an incomplete one."""
        found: list[tuple[str, str]] = []
        for piece in pieces:
            if piece.name is not None:
                found.append((piece.name, ""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + piece.arguments)
        if not found or not all(is_object(arguments) for _, arguments in found):
            return False
        for name, arguments in found:
            self._calls.begin(name)
            self._calls.add(arguments)
        return True

    def _bare(self) -> Steps[None]:
        char = yield from self._source.skip_space()
        if self.row.encoding == "python":
            if char == "[":
                yield from self._series()
            elif char == "{":
                yield from self._calls.read_series()
            return
        if self.row.trigger:
            if char == "{":
                yield from self._calls.read_series()
            return
        is_fenced = yield from self._source.starts_with(FENCE)
        if is_fenced:
            self._source.take(len(FENCE))
            yield from self._source.word(len("json"))
        yield from self._objects()
        yield from self._source.skip_space()
        if is_fenced and (yield from self._source.starts_with(FENCE)):
            self._source.take(len(FENCE))
            self._source.discard()
            yield from self._source.skip_space()

    def _objects(self) -> Steps[None]:
        opening = yield from self._source.skip_space()
        if opening == "[":
            yield from self._calls.read_list()
        elif opening == "{":
            yield from self._calls.read_series()
        else:
            raise NotACall

    def _marked(self) -> Steps[None]:
        trigger = self.row.trigger
        self._source.take(len(trigger))
        if self.row.bare:
            yield from self._tagged()
            return
        reader = self
        if self._other is not None and not (yield from self._fits()):
            reader = self._other
        pattern = reader.row.before or reader.row.call
        yield from reader._series(pattern.removeprefix(trigger))

    def _fits(self) -> Steps[bool]:
        """Whether the text after the marker begins as this row says."""
        char = yield from self._source.skip_space()
        pattern = f"{self.row.before}{self.row.call}".removeprefix(self.row.trigger).lstrip()
        first = parts_of(pattern)[0]
        if isinstance(first, str):
            return char == first[0]
        return char == "{" if first.name == "object" else char.isalnum() or char == "_"

    def _tagged(self) -> Steps[None]:
        """Read what follows `<|python_tag|>`: JSON objects, or calls in Python."""
        char = yield from self._source.skip_space()
        if char == "{" or (char == "[" and self.row.encoding == "python"):
            yield from (self._calls.read_series() if char == "{" else self._series())
            return
        word = yield from self._source.word(self._calls.max_name_chars + len(".call"))
        name = word.removesuffix(".call")
        if name not in self._calls.names or not (yield from self._source.expect("(")):
            raise NotACall
        self._calls.begin(name)
        yield from self._literals.keywords()
        yield from self._source.expect(")")
        self._source.discard()

    def _series(self, opening: str | None = None) -> Steps[None]:
        """Read calls up to the end of their section. `opening` is the part of the first pattern
        that comes next, if some of it was read.
        """
        row, source = self.row, self._source
        if row.before:
            if not (yield from source.expect(row.before if opening is None else opening)):
                raise NotACall
            yield from self._call(row.call)
        else:
            yield from self._call(row.call if opening is None else opening)
            return
        while True:
            yield from source.expect(row.between)
            if row.after and (yield from source.expect(row.after)):
                source.discard()
                return
            if not (yield from self._has_more()):
                return
            yield from self._call(row.call)

    def _has_more(self) -> Steps[bool]:
        if self._source.is_over:
            return False
        first = parts_of(self.row.call)[0]
        if isinstance(first, str):
            more = yield from self._source.starts_with(first.split()[0])
            return more
        char = yield from self._source.peek()
        return char == "{" if first.name == "object" else char.isalnum() or char == "_"

    def _call(self, pattern: str) -> Steps[None]:
        parts = parts_of(pattern)
        name = ""
        skips_id = False
        for index, part in enumerate(parts):
            following = parts[index + 1] if index + 1 < len(parts) else ""
            if isinstance(part, str):
                is_last = index + 1 == len(parts)
                if (yield from self._source.expect(part)) or is_last:
                    if is_last:
                        self._source.discard()
                    continue
                if following != CallPart("id"):
                    raise NotACall
                skips_id = True
            elif part.name == "object":
                yield from self._calls.read()
            elif part.name == "name":
                yield from self._source.skip_space()
                name = yield from self._source.word(self._calls.max_name_chars)
                if name not in self._calls.names:
                    raise NotACall
            elif part.name == "args":
                assert isinstance(following, str)
                yield from self._arguments(name, following.strip())
            elif not skips_id:
                yield from self._source.word(_MAX_ID_CHARS)

    def _arguments(self, name: str, closing: str) -> Steps[None]:
        """Read the arguments of a call, up to the text `closing`."""
        source, calls, row = self._source, self._calls, self.row
        char = yield from source.skip_space()
        word = closing.split()[0] if closing else ""
        if row.encoding == "tags":
            calls.begin(name)
            yield from ElementReader(source, calls, row).read(name, word)
        elif row.encoding == "python":
            calls.begin(name)
            yield from self._literals.keywords()
        elif char == "{":
            calls.begin(name)
            yield from (self._literals.value() if row.encoding == "quoted" else calls.stream())
        elif word and (yield from source.starts_with(word)):
            calls.begin(name)
            calls.add("{}")
        else:
            raise NotACall


def _whole(reader: RowReader, source: Source) -> Steps[None]:
    yield from reader.begin()
    yield from source.rest()
