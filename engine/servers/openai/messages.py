"""The messages of a chat, from the forms that clients send to plain role and text.

Written by hand so that the first mistake ends it: a list of a million wrong items costs one error.
"""

from typing import Any

from pydantic_core import PydanticCustomError

from engine.servers.errors import describe

MAX_MESSAGES = 4_096
MAX_PARTS = 1_024
MAX_NAME = 64

_ROLES = ("system", "developer", "user", "assistant")
# What SDKs add when an earlier answer is sent back; accepted only where it says nothing.
_EMPTY_ONLY = (
    "annotations",
    "audio",
    "function_call",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_calls",
)


def problem(param: str, rule: str) -> PydanticCustomError:
    """A complaint about one place deep inside a field."""
    return PydanticCustomError("described", "{rule}", {"param": param, "rule": rule})


def parse_messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise problem("messages", f"should be a list of messages, got {describe(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise problem("messages", f"should have 1 to {MAX_MESSAGES} messages, got {len(value)}")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise problem(where, f"should be an object, got {describe(item)}")
    role = item.get("role")
    if role in ("tool", "function"):
        raise problem(f"{where}.role", "tool results are not supported by this server")
    if not isinstance(role, str) or role not in _ROLES:
        expected = ", ".join(_ROLES)
        raise problem(f"{where}.role", f"should be one of {expected}; got {describe(role)}")
    # `developer` is the newer name of `system`; chat templates know only that one.
    message = {"role": "system" if role == "developer" else role}
    for key, value in item.items():
        if key == "name" and value is not None:
            message["name"] = _name(value, f"{where}.name")
        elif key in _EMPTY_ONLY:
            if value not in (None, [], ""):
                raise problem(f"{where}.{key}", "is not supported by this server")
        elif key not in ("role", "content", "name"):
            raise problem(f"{where}.{key[:64]}", "is not a field of a message")
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""
    message["content"] = _text(content, f"{where}.content")
    return message


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise problem(where, f"should be a string of 1 to {MAX_NAME} characters")
    return value


def _text(content: Any, where: str) -> str:
    """A string as it is; text parts joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise problem(where, f"should be a string or a list of parts, got {describe(content)}")
    if not 1 <= len(content) <= MAX_PARTS:
        raise problem(where, f"should have 1 to {MAX_PARTS} parts, got {len(content)}")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise problem(where, f"should be an object, got {describe(part)}")
    kind = part.get("type")
    if kind != "text":
        raise problem(
            f"{where}.type", f"only text parts are supported by this server, got {describe(kind)}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise problem(f"{where}.text", f"should be a string, got {describe(text)}")
    extra = [key for key in part if key not in ("type", "text")]
    if extra:
        raise problem(f"{where}.{extra[0][:64]}", "is not a field of a text part")
    return text
