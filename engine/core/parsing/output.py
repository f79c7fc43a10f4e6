"""The output format of a model, and the parser of its answers. Backends use only this module of the
package.

There is one `OutputFormat` per model, made when its tokenizer is loaded. There is one
`OutputParser` per choice. The parser gets detokenized text, in which the control tokens of
`OutputFormat.shown_ids` must be kept as text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.calls import CallReader
from engine.core.parsing.formats import Tool, ToolFormat, tool_format
from engine.core.parsing.grammars import marker, with_inner
from engine.core.parsing.pieces import Piece
from engine.core.parsing.source import Source, Steps

Message = dict[str, Any]


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> tuple[list[Message], list[Message] | None]:
    """Prepare messages and tools for the chat template. If the template can't render tools, they
    become text in the messages, and no tools are returned. A missing `content` becomes "". The
    arguments are not modified.
    """
    copies = [{**message, "content": message.get("content") or ""} for message in messages]
    _name_results(copies)
    if tool_format.native:
        given = [dict(tool) for tool in tools]
        return _for_family(copies, tool_format), given or None
    emulated = _as_text(copies, tool_format)
    return (_with_description(emulated, tools, tool_format) if tools else emulated), None


def _name_results(messages: Sequence[Message]) -> None:
    """Add the function's name to each tool message that lacks it. The call with the same id has the
    name.
    """
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name"):
            name = names.get(message["tool_call_id"])
            if name is not None:
                message["name"] = name


def _for_family(messages: Sequence[Message], tool_format: ToolFormat) -> list[Message]:
    rendered: list[Message] = []
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = tool_format.template_call_id(message["tool_call_id"])
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [
                {**call, "id": tool_format.template_call_id(call["id"])} for call in calls
            ]
        rendered.append(message)
    return _one_call_each(rendered) if tool_format.one_call_per_message else rendered


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Split a message with several calls into one message per call, each before its result."""
    results = {each["tool_call_id"]: each for each in messages if each["role"] == "tool"}
    split: list[Message] = []
    moved: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool" and message["tool_call_id"] in moved:
            continue
        if len(calls) < 2:
            split.append(message)
            continue
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else ""
            split.append({**message, "content": content, "tool_calls": [call]})
            if call["id"] in results:
                split.append(results[call["id"]])
                moved.add(call["id"])
    return split


def _as_text(messages: Sequence[Message], tool_format: ToolFormat) -> list[Message]:
    """Rewrite tool calls as assistant text and tool results as user text. Adjacent results and the
    user text after them become one message, because many templates require that roles alternate.
    """
    plain: list[Message] = []
    follows_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        calls = message.get("tool_calls") or ()
        if calls:
            pairs = [(call["function"]["name"], _arguments(call)) for call in calls]
            content = "\n".join(filter(None, [content, tool_format.write(pairs)]))
        elif role == "tool":
            content = f"Result of {message.get('name') or 'the call'}:\n{content}"
        if follows_result and role in ("tool", "user"):
            plain[-1]["content"] += f"\n\n{content}"
        elif role == "tool":
            plain.append({"role": "user", "content": content})
        else:
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**kept, "content": content})
        follows_result = role == "tool"
    return plain


def _arguments(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _with_description(
    messages: Sequence[Message], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[Message]:
    """Describe the tools in the system message. If the template accepts no system message, describe
    them before the first user text.
    """
    text = _description(tools, tool_format)
    home = "system" if tool_format.has_system else "user"
    first = next((index for index, each in enumerate(messages) if each["role"] == home), None)
    if first is None or (home == "system" and first != 0):
        return [{"role": home, "content": text}, *messages]
    content = messages[first]["content"]
    parts = [content, text] if home == "system" else [text, content]
    merged = {**messages[first], "content": "\n\n".join(filter(None, parts))}
    return [*messages[:first], merged, *messages[first + 1 :]]


def _description(tools: Sequence[Tool], tool_format: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = tool_format.write([("<name of the tool>", "{<its arguments>}")])
    several = tool_format.write([("<first>", "{...}"), ("<second>", "{...}")])
    return (
        "You can use these tools. Each line describes one, with a JSON schema of its parameters:\n"
        f"{listed}\n\n"
        f"To use a tool, answer with nothing but the call, in this form:\n{form}\n"
        f"To use several at once:\n{several}\n"
        "The results come in the next message. If no tool helps, answer in plain text."
    )


OPEN, CLOSE = "<think>", "</think>"
_NO_CONTROL: Mapping[str, int] = {}


@dataclass(frozen=True)
class ReasoningFormat:
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def opens(self, prompt_tail: str) -> bool:
        """Whether a rendered prompt ends inside an open reasoning block."""
        return prompt_tail.rstrip().endswith(OPEN)

    def parse(self, source: Source, opened: bool) -> Steps[None]:
        """Parse the reasoning block, if there is one."""
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
    """The reasoning format that the template shows, or None."""
    source = template or ""
    return ReasoningFormat() if OPEN in source or CLOSE in source else None


def with_reasoning(grammar: str, opened: bool, control: Mapping[str, int] = _NO_CONTROL) -> str:
    """A grammar for free reasoning followed by text that matches `grammar`. If the prompt did not
    open the reasoning block, reasoning is optional.
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
    """Parses the text of one choice into pieces, which are final and in order. All pieces of one
    kind, joined, don't depend on how the text was split.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        names: frozenset[str],
        reasoning: ReasoningFormat | None = None,
        opened: bool = False,
    ) -> None:
        """Create a parser. `names` are the tools that may be called. If there are none, no calls
        are parsed.
        """
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

    def _run(self, reasoning: ReasoningFormat | None, opened: bool) -> Steps[None]:
        if reasoning is not None:
            yield from reasoning.parse(self._source, opened)
        if self._tools is not None:
            yield from self._tools.parse(self._source, self._calls)
        else:
            yield from self._source.rest()
        # If only whitespace follows the last call, it belongs to the call's syntax.
        if self.num_calls:
            self._source.discard()
        else:
            self._source.release()


@dataclass(frozen=True)
class OutputFormat:
    """How one model writes reasoning and tool calls. `control` maps control token texts to ids."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    control: Mapping[str, int]

    @classmethod
    def of(cls, template: str | None, control: Mapping[str, int]) -> "OutputFormat":
        return cls(tool_format(template), reasoning_format(template), control)

    def by_text(self) -> "OutputFormat":
        """The same format with all markers as plain text. Grammars for it compile without the
        model's vocabulary.
        """
        return replace(self, control={})

    def shown_ids(self, with_tools: bool) -> frozenset[int]:
        """The control tokens that the parser must see as text. All other control tokens are
        skipped.
        """
        texts = [*(self.reasoning.markers if self.reasoning else ())]
        texts += self.tools.markers if with_tools else ()
        return frozenset(self.control[text] for text in texts if text in self.control)

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[Message] | None]:
        """Prepare messages and tools for the chat template; see `prepare_messages`."""
        return prepare_messages(messages, tools, self.tools)

    def opens_reasoning(self, prompt_tail: str) -> bool:
        """Whether the prompt, given the text of its last tokens, ends inside reasoning."""
        return self.reasoning is not None and self.reasoning.opens(prompt_tail)

    def parser(self, tools: Sequence[Tool], choice: ToolChoice, opened: bool) -> OutputParser:
        """A parser for one choice. `opened` is the result of `opens_reasoning`."""
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
        """The grammar of the whole output: reasoning, then tool calls or text that matches `answer`
        (an llguidance grammar). None if any text is allowed.
        """
        may_think = self.reasoning is not None and not opened
        grammar = answer
        if tools:
            grammar = self.tools.grammar(
                tools, choice, parallel, self.control, answer=answer, may_think=may_think
            )
        if grammar is None or self.reasoning is None:
            return grammar
        return with_reasoning(grammar, opened, self.control)


def _names(tools: Sequence[Tool], choice: ToolChoice) -> frozenset[str]:
    names: frozenset[str] = frozenset(tool["function"]["name"] for tool in tools)
    return names & {choice.name} if choice.mode == "named" else names
