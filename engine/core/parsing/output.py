"""A model's output format, and the parser of one answer: what the backend uses of this package.

One `OutputFormat` per model, made when its tokenizer is loaded; one `OutputParser` per choice of a
request, fed with detokenized text in which `shown_ids` are visible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.base import Tool, ToolFormat
from engine.core.parsing.calls import CallReader
from engine.core.parsing.formats import tool_format
from engine.core.parsing.grammars import marker, with_inner
from engine.core.parsing.messages import Message, prepare_messages
from engine.core.parsing.pieces import Piece
from engine.core.parsing.source import Source, Steps

OPEN, CLOSE = "<think>", "</think>"
_NO_CONTROL: Mapping[str, int] = {}


@dataclass(frozen=True)
class ReasoningFormat:
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def opens(self, prompt_tail: str) -> bool:
        """Whether a rendered prompt ends inside an open block."""
        return prompt_tail.rstrip().endswith(OPEN)

    def parse(self, source: Source, opened: bool) -> Steps[None]:
        """Read the reasoning, if there is any."""
        if not opened:
            yield from source.skip_space()
            if not (yield from source.starts_with(OPEN)):
                return
            source.take(len(OPEN))
            source.discard()
        source.reason(True)
        yield from source.skip_space()
        source.discard()
        ends = yield from source.text_until(CLOSE)
        source.reason(False)
        if ends:
            source.take(len(CLOSE))
            yield from source.skip_space()
            source.discard()


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The format of a model whose template knows reasoning."""
    source = template or ""
    return ReasoningFormat() if OPEN in source or CLOSE in source else None


def with_reasoning(grammar: str, opened: bool, control: Mapping[str, int] = _NO_CONTROL) -> str:
    """Free reasoning, then what `grammar` asks for. If the prompt did not open the block, the model
    may do so, or not reason at all.
    """
    opening = "" if opened else marker(OPEN, control)
    closing = marker(CLOSE, control)
    lines = ["%llguidance {}", r"SPACE: /[ \n]{0,2}/"]
    lines.append("start: thought SPACE @visible" if opened else "start: (thought SPACE)? @visible")
    if closing.startswith("<["):
        lines.append(f"thought: {opening} /(.|\\n)*/ {closing}")
    elif opening.startswith("<["):
        lines += [f"thought: {opening} rest", f"rest[lazy]: /(.|\\n)*/ {closing}"]
    else:
        lines.append(f"thought[lazy]: {opening} /(.|\\n)*/ {closing}")
    return with_inner("\n".join(lines) + "\n", grammar, "visible")


class OutputParser:
    """Text in, final pieces out, in order. Joined, they do not depend on how the text was cut."""

    def __init__(
        self,
        tools: ToolFormat | None,
        names: frozenset[str],
        reasoning: ReasoningFormat | None = None,
        opened: bool = False,
    ) -> None:
        """`names` are the tools that may be called; without any, no calls are looked for."""
        self._source = Source()
        self._tools = tools if names else None
        new_id = tools.new_call_id if tools else str
        self._calls = CallReader(self._source, names, new_id)
        self._steps = self._run(reasoning, opened)
        next(self._steps, None)

    def push(self, text: str) -> list[Piece]:
        if text:
            self._source.push(text)
            next(self._steps, None)
        return self._source.take_pieces()

    def flush(self) -> list[Piece]:
        """What was held back, at the end of generation."""
        self._source.end()
        next(self._steps, None)
        return self._source.take_pieces()

    @property
    def num_calls(self) -> int:
        """Calls that have been announced, complete or not."""
        return self._calls.num_calls

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._source.in_reasoning

    @property
    def num_unread(self) -> int:
        """Characters that will be looked at again; never more than a marker has."""
        return self._source.num_unread

    def _run(self, reasoning: ReasoningFormat | None, opened: bool) -> Steps[None]:
        if reasoning is not None:
            yield from reasoning.parse(self._source, opened)
        if self._tools is not None:
            yield from self._tools.parse(self._source, self._calls)
        else:
            yield from self._source.rest()
        # White space that no text followed: behind a call it is syntax.
        if self.num_calls:
            self._source.discard()
        else:
            self._source.release()


@dataclass(frozen=True)
class OutputFormat:
    """How one model writes reasoning and calls. `control`: its control tokens, text to id."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    control: Mapping[str, int]

    @classmethod
    def of(cls, template: str | None, control: Mapping[str, int]) -> "OutputFormat":
        return cls(tool_format(template), reasoning_format(template), control)

    def by_text(self) -> "OutputFormat":
        """The same with markers as text, whose grammars compile without the model's vocabulary."""
        return replace(self, control={})

    def shown_ids(self, with_tools: bool) -> frozenset[int]:
        """Control tokens whose text the parser must see, though other ones are skipped."""
        texts = [*(self.reasoning.markers if self.reasoning else ())]
        texts += self.tools.markers if with_tools else ()
        return frozenset(self.control[text] for text in texts if text in self.control)

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[Message] | None]:
        """Messages and tools for the chat template."""
        return prepare_messages(messages, tools, self.tools)

    def opens_reasoning(self, prompt_tail: str) -> bool:
        """Whether the prompt, by the text of its last tokens, ends inside reasoning."""
        return self.reasoning is not None and self.reasoning.opens(prompt_tail)

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, opened: bool) -> OutputParser:
        """For one choice; `opened` as `opens_reasoning` says."""
        names = frozenset() if choice.mode == "none" else _names(tools, choice)
        return OutputParser(self.tools, names, self.reasoning, opened)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        answer: str | None,
        opened: bool,
    ) -> str | None:
        """What the whole output must match: reasoning first, then calls, or what `answer` (a
        llguidance grammar) demands of an answer. None if everything is allowed.
        """
        may_think = self.reasoning is not None and not opened
        grammar = self.tools.grammar(
            tools, choice, parallel, self.control, answer=answer, may_think=may_think
        )
        if grammar is None or self.reasoning is None:
            return grammar
        return with_reasoning(grammar, opened, self.control)


def _names(tools: Sequence[Tool], choice: ToolChoice) -> frozenset[str]:
    names: frozenset[str] = frozenset(tool["function"]["name"] for tool in tools)
    return names & {choice.name} if choice.mode == "named" else names
