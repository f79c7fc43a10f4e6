"""Conversations with tools, as a chat template takes them.

A template that knows tools gets them, with what its family insists on. For any other, tools are
described in a message, earlier calls become text in the form that we ask for, and results become
the user's.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.parsing.base import Tool, ToolFormat

Message = dict[str, Any]


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> tuple[list[Message], list[Message] | None]:
    """The messages and tools to render. `content` is always a string; inputs are not changed."""
    copies = [{**message, "content": message.get("content") or ""} for message in messages]
    _name_results(copies)
    if tool_format.native:
        given = [dict(tool) for tool in tools]
        return _for_family(copies, tool_format), given or None
    emulated = _as_text(copies, tool_format)
    return (_with_description(emulated, tools, tool_format) if tools else emulated), None


def _name_results(messages: Sequence[Message]) -> None:
    """Give a tool's message the name of the call that it answers, if the client left it out."""
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
    """Several calls of one message become messages of one call, each before its result."""
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
    """Calls and results as plain messages. Neighbouring results, and what the user says to them,
    are one message, since many templates want roles to alternate.
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
    """The tools in the system message; before the user's first words where there can't be one."""
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
