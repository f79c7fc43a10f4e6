"""The output format of a model, and the parser of its answers. Backends use only this module of the
package.

There is one `OutputFormat` per chat template, made when the tokenizer is loaded. There is one
`OutputParser` per choice. The parser gets detokenized text, in which the control tokens of
`OutputFormat.shown_ids` must be kept as text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.call_rows import JSON
from engine.core.parsing.calls import CallReader
from engine.core.parsing.formats import Tool, ToolFormat, guessed_format, known_format, uses_tools
from engine.core.parsing.messages import Message, TemplateHabits, prepare_messages
from engine.core.parsing.pieces import Piece
from engine.core.parsing.probe import Render, probed_format, probed_habits
from engine.core.parsing.reasoning import (
    ChannelReader,
    opens,
    read_reasoning,
    reasoning_row,
    with_reasoning,
)
from engine.core.parsing.row_reader import FENCE, RowReader
from engine.core.parsing.rows import ReasoningRow
from engine.core.parsing.source import Source, Steps

_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = {}


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


@dataclass(frozen=True)
class OutputFormat:
    """How one model writes reasoning and calls. `control` maps control token text to id.

    `render` renders messages by the chat template; it is None if there is no template.
    """

    tools: ToolFormat
    reasoning: ReasoningRow | None
    control: Mapping[str, int]
    render: Render | None = None

    @classmethod
    def of(
        cls, template: str | None, control: Mapping[str, int], render: Render | None = None
    ) -> "OutputFormat":
        """The format that a template's source shows. If it shows none but renders tools, a call is
        rendered to find out.
        """
        tools = known_format(template)
        if tools is None and render is not None and uses_tools(template or ""):
            tools = probed_format(render)
        reasoning = reasoning_row(template)
        tools = tools or guessed_format(template) or ToolFormat(JSON, native=False)
        return cls(tools, reasoning, control, render)

    @cached_property
    def habits(self) -> TemplateHabits:
        return TemplateHabits() if self.render is None else probed_habits(self.render, self.tools)

    def by_text(self) -> "OutputFormat":
        """The same format with all markers as plain text. Grammars for it compile without the
        model's vocabulary.
        """
        return replace(self, control={})

    @property
    def is_framed(self) -> bool:
        """Whether even an answer without tools and reasoning has markers to be removed."""
        return bool(self.tools.row.frame)

    def shown_ids(self, with_tools: bool) -> frozenset[int]:
        """The control tokens that the parser must see as text. All other control tokens are
        skipped.
        """
        texts: list[str] = [*self.tools.row.frame]
        if self.reasoning is not None:
            texts += [self.reasoning.open, self.reasoning.close, *self.reasoning.frame]
        if with_tools:
            texts += self.tools.row.literals
        return frozenset(
            token for mark, token in self.control.items() if any(mark in text for text in texts)
        )

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[Message] | None]:
        """Prepare messages and tools for the chat template; see `prepare_messages`."""
        has_calls = any(message.get("tool_calls") for message in messages)
        habits = self.habits if tools or has_calls else TemplateHabits()
        return prepare_messages(messages, tools, self.tools, habits)

    def opens_reasoning(self, prompt_tail: str) -> bool:
        """Whether the prompt, given the text of its last tokens, ends inside reasoning."""
        return self.reasoning is not None and opens(self.reasoning, prompt_tail)

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, opened: bool) -> OutputParser:
        """A parser for one choice. `opened` is the result of `opens_reasoning`."""
        names = frozenset() if choice.mode == "none" else _names(tools, choice)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        known = {name: schema for name, schema in schemas.items() if isinstance(schema, dict)}
        return OutputParser(self.tools, names, self.reasoning, opened, known)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        answer: str | None,
        opened: bool,
    ) -> str | None:
        """The grammar of the whole output: reasoning, then tool calls or text that matches `answer`
        (an llguidance grammar). None if any text is allowed.
        """
        reasoning = self.reasoning
        thought = "" if reasoning is None or opened else reasoning.open.rstrip()
        grammar = answer
        if tools:
            grammar = self.tools.grammar(
                tools, choice, parallel, self.control, answer=answer, thought=thought
            )
            if self.tools.row.messages is not None and choice.mode != "none":
                return grammar
        if grammar is None or reasoning is None:
            return grammar
        return with_reasoning(reasoning, grammar, opened, self.control)


def _names(tools: Sequence[Tool], choice: ToolChoice) -> frozenset[str]:
    names: frozenset[str] = frozenset(tool["function"]["name"] for tool in tools)
    return names & {choice.name} if choice.mode == "named" else names
