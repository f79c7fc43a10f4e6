"""How one model takes conversations with tools, and how it writes reasoning and calls. Outside of
this package, only this module and `parser` are used.

There is one `OutputFormat` per chat template, made when the tokenizer is loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engine.core.interfaces.backend import ToolChoice
from engine.core.parsing.formats import (
    TemplateHabits,
    Tool,
    ToolFormat,
    guessed_format,
    known_format,
    uses_tools,
)
from engine.core.parsing.grammars import with_reasoning
from engine.core.parsing.parser import OutputParser
from engine.core.parsing.rendered_calls import Render, rendered_format, rendered_habits
from engine.core.parsing.rows import ReasoningRow, reasoning_row
from engine.core.parsing.tool_formats import JSON

Message = dict[str, Any]
_USUAL = TemplateHabits()


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
            tools = rendered_format(render)
        reasoning = reasoning_row(template)
        tools = tools or guessed_format(template) or ToolFormat(JSON, native=False)
        return cls(tools, reasoning, control, render)

    @cached_property
    def habits(self) -> TemplateHabits:
        return TemplateHabits() if self.render is None else rendered_habits(self.render, self.tools)

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
        row = self.reasoning
        return row is not None and prompt_tail.rstrip().endswith(row.open.rstrip())

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


def prepare_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    tool_format: ToolFormat,
    habits: TemplateHabits = _USUAL,
) -> tuple[list[Message], list[Message] | None]:
    """Prepare messages and tools for the chat template. If the template can't render tools, they
    become text in the messages, and no tools are returned. A missing `content` becomes "". The
    arguments are not modified.
    """
    copies = [{**message, "content": message.get("content") or ""} for message in messages]
    _name_results(copies)
    if tool_format.native and habits.tools_in != "nowhere":
        given = [dict(tool) for tool in tools]
        prepared = _for_family(copies, tool_format, habits)
        if habits.tools_in == "variable" or not tools:
            return prepared, given or None
        functions = [tool["function"] for tool in tools]
        return _with_system_tools(prepared, json.dumps(functions, ensure_ascii=False)), None
    emulated = _as_text(copies, tool_format)
    if tools:
        emulated = _with_description(emulated, tools, tool_format, habits.takes_system)
    return emulated, None


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


def _for_family(
    messages: Sequence[Message], tool_format: ToolFormat, habits: TemplateHabits
) -> list[Message]:
    rendered: list[Message] = []
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = tool_format.template_call_id(message["tool_call_id"])
        calls = message.pop("tool_calls", None)
        thoughts = message.get("reasoning_content")
        if thoughts:
            # Templates disagree on the name. One refuses "thinking" beside content and calls.
            message.setdefault("reasoning", thoughts)
            if not calls or not message["content"]:
                message.setdefault("thinking", thoughts)
        if calls and not habits.writes_calls:
            message["content"] = _with_calls(message["content"], calls, tool_format)
        elif calls:
            message["tool_calls"] = [_for_template(call, tool_format, habits) for call in calls]
            if habits.null_content and not message["content"]:
                message["content"] = None
        rendered.append(message)
    return _one_call_each(rendered) if tool_format.row.one_call_per_message else rendered


def _with_system_tools(messages: Sequence[Message], tools: str) -> list[Message]:
    """Put the tools, as text, into a field of the system message."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": tools}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": tools}, *messages]


def _for_template(
    call: Mapping[str, Any], tool_format: ToolFormat, habits: TemplateHabits
) -> Message:
    function = dict(call["function"])
    if habits.json_arguments:
        function["arguments"] = _arguments(call)
    return {**call, "id": tool_format.template_call_id(call["id"]), "function": function}


def _with_calls(content: str, calls: Sequence[Message], tool_format: ToolFormat) -> str:
    """A message's content with its calls in the model's own format."""
    pairs = [(call["function"]["name"], _arguments(call)) for call in calls]
    return "\n".join(filter(None, [content, tool_format.write(pairs)]))


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
            content = _with_calls(content, calls, tool_format)
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
    messages: Sequence[Message],
    tools: Sequence[Tool],
    tool_format: ToolFormat,
    takes_system: bool,
) -> list[Message]:
    """Describe the tools in the system message. If the template accepts no system message, describe
    them before the first user text.
    """
    text = _description(tools, tool_format)
    home = "system" if takes_system else "user"
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
