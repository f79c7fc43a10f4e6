"""Parses chat messages into the form of `ChatRequest`.

The parser is hand-written, so that it stops at the first mistake. A list of a million wrong items
causes only one error. Arguments of earlier tool calls arrive as JSON text and are parsed to
objects.
"""

from collections.abc import Iterator
from typing import Any

from engine.servers.http.errors import check_keys, describe, problem, short_text
from engine.servers.http.limits import decode_text
from engine.servers.schema.images import Content, Image, check_detail, image_from_url

MAX_MESSAGES = 4_096
MAX_PARTS = 1_024
MAX_NAME = 128
MAX_CALLS = 128
MAX_CALL_ID = 512

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("role", "content", "name")
# Fields that only messages of some roles accept.
_ROLE_FIELDS = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning", "reasoning_details"),
    "tool": ("tool_call_id",),
}
# Fields that SDKs add when they send an earlier answer back. A message may have them only if they
# are empty, unless `_ROLE_FIELDS` allows them for its role.
_EMPTY_ONLY = (
    "annotations",
    "audio",
    "function_call",
    "images",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "refusal",
    "thinking_blocks",
    "tool_calls",
    "tool_call_id",
)
# Fields that SDKs add to an answer, such as its parsed text. They are ignored.
_NOTES = ("parsed", "provider_specific_fields")
_FUNCTION_NOTES = ("parsed_arguments",)


def check_number(value: Any, where: str = "messages") -> None:
    if not isinstance(value, list):
        raise problem(where, f"should be a list of messages, got {describe(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise problem(where, f"should have 1 to {MAX_MESSAGES} messages, got {len(value)}")


def parse_messages(value: Any) -> tuple[dict[str, Any], ...]:
    check_number(value)
    called: dict[str, str] = {}  # tool call id -> function name
    return tuple(_message(item, f"messages[{i}]", called) for i, item in enumerate(value))


def _message(item: Any, where: str, called: dict[str, str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise problem(where, f"should be an object, got {describe(item)}")
    role = item.get("role")
    if role == "function":
        raise problem(f"{where}.role", "function is not supported; use tool, with tool_call_id")
    if not isinstance(role, str) or role not in ROLES:
        expected = ", ".join(ROLES)
        raise problem(f"{where}.role", f"should be one of {expected}; got {describe(role)}")
    own = _FIELDS + _ROLE_FIELDS.get(role, ())
    for key, value in item.items():
        if key in own or key in _NOTES:
            continue
        if key not in _EMPTY_ONLY:
            raise problem(f"{where}.{key[:64]}", "is not a field of a message")
        if value not in (None, [], ""):
            raise problem(f"{where}.{key}", f"is not supported in a message of role {role}")
    # `developer` is the newer name of `system`; chat templates only know `system`.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if item.get("name") is not None:
        message["name"] = short_text(item["name"], f"{where}.name", MAX_NAME)
    content = item.get("content")
    if role == "assistant":
        content = "" if content in (None, []) else content
        _add_assistant_fields(message, item, where, called)
    elif role == "tool":
        _add_tool_fields(message, item, where, called)
    if role == "user" and not isinstance(content, str):
        return message | _content_of(content, f"{where}.content").fields
    message["content"] = text_of(content, f"{where}.content")
    return message


def _add_assistant_fields(
    message: dict[str, Any], item: dict[str, Any], where: str, called: dict[str, str]
) -> None:
    for key in ("reasoning_content", "reasoning"):
        text = item.get(key)
        if text is not None and not isinstance(text, str):
            raise problem(f"{where}.{key}", f"should be a string, got {describe(text)}")
        if text:
            message.setdefault("reasoning_content", text)
    if details := item.get("reasoning_details"):
        message.setdefault(
            "reasoning_content", _details_text(details, f"{where}.reasoning_details")
        )
    calls = item.get("tool_calls")
    if calls is None or calls == []:
        return
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise problem(f"{where}.tool_calls", f"should be a list of at most {MAX_CALLS} calls")
    message["tool_calls"] = [
        _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
    ]
    for call in message["tool_calls"]:
        called[call["id"]] = call["function"]["name"]


def _details_text(details: Any, where: str) -> str:
    """The reasoning in OpenRouter's form: a list of texts, or of summaries."""
    if not isinstance(details, list) or len(details) > MAX_PARTS:
        raise problem(where, f"should be a list of at most {MAX_PARTS} objects")
    texts: list[str] = []
    for position, each in enumerate(details):
        kind = each.get("type") if isinstance(each, dict) else None
        key = {"reasoning.text": "text", "reasoning.summary": "summary"}.get(str(kind))
        if key is None:
            rule = "should be an object of type reasoning.text or reasoning.summary"
            raise problem(f"{where}[{position}]", f"{rule}, got {describe(kind)}")
        text = each.get(key)
        if not isinstance(text, str):
            raise problem(f"{where}[{position}].{key}", "should be a string")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise problem(where, f"should be an object, got {describe(call)}")
    if call.get("type", "function") != "function":
        raise problem(f"{where}.type", f"should be function, got {describe(call['type'])}")
    for key in call:
        # The chunks of a streamed call have an `index`. Clients that collect chunks send it back.
        if key not in ("id", "type", "function", "index"):
            raise problem(f"{where}.{key[:64]}", "is not a field of a tool call")
    function = call.get("function")
    if not isinstance(function, dict):
        raise problem(f"{where}.function", f"should be an object, got {describe(function)}")
    for key in function:
        if key not in ("name", "arguments", *_FUNCTION_NOTES):
            raise problem(f"{where}.function.{key[:64]}", "is not a field of a called function")
    return {
        "id": short_text(call.get("id"), f"{where}.id", MAX_CALL_ID),
        "type": "function",
        "function": {
            "name": short_text(function.get("name"), f"{where}.function.name", MAX_NAME),
            "arguments": parse_arguments(function.get("arguments"), f"{where}.function.arguments"),
        },
    }


def parse_arguments(value: Any, where: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = decode_text(value, where)
    if not isinstance(value, dict):
        raise problem(where, f"should be JSON text of an object, got {describe(value)}")
    return value


def _add_tool_fields(
    message: dict[str, Any], item: dict[str, Any], where: str, called: dict[str, str]
) -> None:
    call_id = short_text(item.get("tool_call_id"), f"{where}.tool_call_id", MAX_CALL_ID)
    if call_id not in called:
        rule = "answers no call: no assistant message before it has a tool call of this id"
        raise problem(f"{where}.tool_call_id", rule)
    message["tool_call_id"] = call_id
    message.setdefault("name", called[call_id])


def text_of(content: Any, where: str) -> str:
    """The text of a message's content. A list of text parts is joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(_text_part(part, place) for part, place in _parts(content, where))


def _content_of(content: Any, where: str) -> Content:
    """The texts and images in the parts of a user message's content."""
    read = Content()
    for part, place in _parts(content, where):
        if part.get("type") == "image_url":
            read.add_image(_image_part(part, place), place)
        else:
            read.add_text(_text_part(part, place))
    return read


def _parts(content: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The parts of a content, and the place of each."""
    if not isinstance(content, list):
        raise problem(where, f"should be a string or a list of parts, got {describe(content)}")
    if not 1 <= len(content) <= MAX_PARTS:
        raise problem(where, f"should have 1 to {MAX_PARTS} parts, got {len(content)}")
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise problem(place, f"should be an object, got {describe(part)}")
        yield part, place


def _image_part(part: dict[str, Any], where: str) -> Image:
    check_keys(part, ("type", "image_url", "cache_control"), where)
    given = part.get("image_url")
    where = f"{where}.image_url"
    if not isinstance(given, dict):
        raise problem(where, f"should be an object with a url, got {describe(given)}")
    check_keys(given, ("url", "detail"), where)
    check_detail(given.get("detail"), f"{where}.detail")
    return image_from_url(given.get("url"), f"{where}.url")


def _text_part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind != "text":
        raise problem(
            f"{where}.type",
            "this server takes text parts, and image_url parts in user messages; "
            f"got {describe(kind)}",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise problem(f"{where}.text", f"should be a string, got {describe(text)}")
    for key in part:
        # `cache_control` is ignored: every prefix is cached anyway.
        if key not in ("type", "text", "cache_control"):
            raise problem(f"{where}.{key[:64]}", "is not a field of a text part")
    return text
