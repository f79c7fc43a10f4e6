"""Conversations with tools, as chat templates take them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.core.parsing.formats import Tool, ToolFormat

Message = dict[str, Any]


@dataclass(frozen=True)
class TemplateHabits:
    """What a chat template does with parts of a conversation."""

    takes_system: bool = True  # whether it renders a system message
    # Where it reads tools from: its variable `tools`, JSON text in the system message, or nowhere.
    tools_in: Literal["variable", "system", "nowhere"] = "variable"
    writes_calls: bool = True  # whether it renders the calls of earlier turns
    json_arguments: bool = False  # whether it wants arguments as JSON text, not as an object
    null_content: bool = False  # whether calls are only rendered if the content is None


_USUAL = TemplateHabits()


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
