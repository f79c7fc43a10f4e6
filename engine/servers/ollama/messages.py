"""Parses Ollama's chat messages into the form of `ChatRequest`.

Unlike OpenAI's, tool calls may lack an id, and their arguments are objects. Then a tool's result
belongs to the oldest call that has none yet.
"""

from collections.abc import Sequence
from typing import Any

from engine.servers.http.errors import check_keys, describe, problem, short_text
from engine.servers.schema.images import Content, image_from_base64
from engine.servers.schema.messages import (
    MAX_CALL_ID,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_NAME,
    parse_arguments,
)

_FIELDS = {
    "system": ("role", "content"),
    "user": ("role", "content", "images"),
    "assistant": ("role", "content", "thinking", "tool_calls"),
    "tool": ("role", "content", "tool_name", "tool_call_id", "name"),
}
_EMPTY_ONLY = ("images", "thinking", "tool_calls", "tool_name", "tool_call_id")


def parse_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Parse the messages. An empty list is accepted; such a request only loads the model."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        rule = f"should be a list of at most {MAX_MESSAGES} messages"
        raise problem("messages", f"{rule}, got {describe(value)}")
    unanswered: dict[str, str] = {}  # id of a call without a result -> name of the tool
    return tuple(_message(item, i, unanswered) for i, item in enumerate(value))


def _message(item: Any, index: int, unanswered: dict[str, str]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(item, dict):
        raise problem(where, f"should be an object, got {describe(item)}")
    role = item.get("role")
    if not isinstance(role, str) or role.lower() not in _FIELDS:
        expected = ", ".join(_FIELDS)
        raise problem(f"{where}.role", f"should be one of {expected}; got {describe(role)}")
    role = role.lower()
    given = {key: each for key, each in item.items() if each is not None}
    kept = {key: each for key, each in given.items() if each or key not in _EMPTY_ONLY}
    check_keys(kept, _FIELDS[role], where)
    content = kept.get("content", "")
    if not isinstance(content, str):
        raise problem(f"{where}.content", f"should be a string, got {describe(content)}")
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "user":
        return message | with_images(content, kept.get("images"), f"{where}.images")
    if role == "assistant":
        if (thinking := kept.get("thinking")) is not None:
            if not isinstance(thinking, str):
                rule = f"should be a string, got {describe(thinking)}"
                raise problem(f"{where}.thinking", rule)
            message["reasoning_content"] = thinking
        if "tool_calls" in kept:
            message["tool_calls"] = _calls(kept["tool_calls"], index, unanswered)
    elif role == "tool":
        message |= _answered(kept, where, unanswered)
    return message


def with_images(text: str, images: Any, where: str) -> dict[str, Any]:
    """The fields of a user message whose images come before its text."""
    if images is None:
        return {"content": text}
    if not isinstance(images, list):
        raise problem(where, f"should be a list of base64 texts, got {describe(images)}")
    content = Content()
    for position, image in enumerate(images):
        place = f"{where}[{position}]"
        # The format of the image is found when it is decoded.
        content.add_image(image_from_base64(image, "image/png", place), place)
    content.add_text(text)
    return content.fields


def _calls(value: Any, index: int, unanswered: dict[str, str]) -> list[dict[str, Any]]:
    where = f"messages[{index}].tool_calls"
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise problem(where, f"should be a list of at most {MAX_CALLS} calls")
    unanswered.clear()
    calls = [_call(call, f"{where}[{i}]", f"call_{index}_{i}") for i, call in enumerate(value)]
    unanswered.update({call["id"]: call["function"]["name"] for call in calls})
    return calls


def _call(call: Any, where: str, default_id: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise problem(where, f"should be an object, got {describe(call)}")
    check_keys(call, ("id", "type", "index", "function"), where)
    function = call.get("function")
    if not isinstance(function, dict):
        raise problem(f"{where}.function", f"should be an object, got {describe(function)}")
    check_keys(function, ("index", "name", "arguments"), f"{where}.function")
    place = f"{where}.function"
    return {
        "id": short_text(call.get("id") or default_id, f"{where}.id", MAX_CALL_ID),
        "type": "function",
        "function": {
            "name": short_text(function.get("name"), f"{place}.name", MAX_NAME),
            "arguments": parse_arguments(function.get("arguments"), f"{place}.arguments"),
        },
    }


def _answered(item: dict[str, Any], where: str, unanswered: dict[str, str]) -> dict[str, Any]:
    """The fields of a tool's result: the call that it belongs to, and the tool's name."""
    named = item.get("tool_name") or item.get("name")
    if named is not None:
        named = short_text(named, f"{where}.tool_name", MAX_NAME)
    call_id = item.get("tool_call_id")
    if call_id is None:
        of_tool = [key for key, name in unanswered.items() if named in (None, name)]
        call_id = (of_tool or _invented(where, named))[0]
    call_id = short_text(call_id, f"{where}.tool_call_id", MAX_CALL_ID)
    name = unanswered.pop(call_id, None) or named
    return {"tool_call_id": call_id} | ({} if name is None else {"name": name})


def _invented(where: str, name: str | None) -> Sequence[str]:
    """An id for a result of which no call is in the conversation, which Ollama accepts."""
    if name is None:
        raise problem(f"{where}.tool_name", "is needed: no call without a result comes before")
    return (f"call_{name}",)
