"""Reasoning in a model's output: its markers, its parser and its grammar."""

from collections.abc import Mapping

from engine.core.parsing.calls import CallReader
from engine.core.parsing.grammars import ANY, channel_grammar, sequence, with_inner
from engine.core.parsing.row_reader import RowReader
from engine.core.parsing.rows import REASONING_ROWS, ReasoningRow
from engine.core.parsing.source import NotACall, Source, Steps

_MAX_HEADER_CHARS = 256
_MESSAGE = "<|message|>"
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>")


def reasoning_row(template: str | None) -> ReasoningRow | None:
    """The reasoning format that the template shows, or None."""
    source = template or ""
    for row in REASONING_ROWS:
        if row.signs and all(sign in source for sign in row.signs):
            return row
        if not row.signs and (row.open.strip() in source or row.close in source):
            return row
    return None


def opens(row: ReasoningRow, prompt_tail: str) -> bool:
    """Whether a rendered prompt ends inside an open reasoning block."""
    return prompt_tail.rstrip().endswith(row.open.rstrip())


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
