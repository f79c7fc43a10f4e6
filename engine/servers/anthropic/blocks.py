"""Converts Anthropic's content blocks, tools and system prompts to the messages and tools of a
`ChatRequest`.

The parser is hand-written, so that it stops at the first mistake. If a chat template can't express
a feature, it is added to the text (`is_error` of a tool result) or reported in `warnings`.
`cache_control` is accepted, because prefixes are always cached. Its lifetime and scope are not
supported.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.servers.http.errors import describe, problem, short_text
from engine.servers.schema.images import (
    Content,
    Image,
    image_from_base64,
    image_from_url,
    without_marks,
)
from engine.servers.schema.messages import check_number
from engine.servers.schema.tools import (
    MAX_TOOL_NAME,
    check_distinct,
    check_tool_list,
    function_tool,
    not_run,
)

MAX_BLOCKS = 1_024
MAX_ID = 512

# Claude Code's first system block is a billing note that differs in every request. It is removed.
# The model does not need it, and at the start of the prompt it would prevent all prefix cache hits.
_BILLING_NOTE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")
# Maps fields of blocks and tools to the values that are accepted because they have no effect. Other
# values are refused.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (None, ["direct"]),
    "caller": (None, {"type": "direct"}),
    "citations": (None, []),
    "defer_loading": (None, False),
    "eager_input_streaming": (None, False, True),  # arguments are always streamed
    "toolset_name": (None,),
}
_TEXT_FIELDS = ("type", "text", "cache_control", "citations")
_BLOCK_FIELDS = {
    "text": _TEXT_FIELDS,
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller", "toolset_name"),
    "tool_result": (
        *("type", "tool_use_id", "content", "is_error"),
        *("cache_control", "toolset_name"),
    ),
    "image": ("type", "source", "cache_control"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
}
_BLOCKS_OF = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
# Tools that run at Anthropic. Clients that offer them have other tools beside them.
_RUN_ELSEWHERE = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25))_\d{8}|mcp_toolset"
)
_TOOL_FIELDS = (
    *("type", "name", "description", "input_schema", "strict", "input_examples"),
    *("cache_control", "allowed_callers", "defer_loading", "eager_input_streaming"),
)


@dataclass
class BlockReader:
    """Parses the messages, the system prompt and the tools of one request. `warnings` maps fields
    that are ignored to a message for the client.
    """

    warnings: dict[str, str] = field(default_factory=dict)
    _called: dict[str, str] = field(default_factory=dict)  # tool call id -> tool name

    def messages(self, value: Any) -> list[dict[str, Any]]:
        """Parse the messages. Consecutive messages of the same role are merged, as Anthropic
        does.
        """
        check_number(value)
        read: list[dict[str, Any]] = []
        for position, item in enumerate(value):
            for message in self._message(item, f"messages[{position}]"):
                if read and message["role"] == read[-1]["role"] and message["role"] != "tool":
                    _merge(read[-1], message)
                else:
                    read.append(message)
        return read

    def system(self, value: str | list[Any]) -> str:
        blocks = [value] if isinstance(value, str) else self._blocks(value, "system", "system")
        texts = [each if isinstance(each, str) else each["text"] for each in blocks]
        if texts:
            texts[0] = _BILLING_NOTE.sub("", texts[0], count=1)
        return _joined(texts)

    def tools(self, value: Any) -> tuple[dict[str, Any], ...]:
        check_tool_list(value, "tools")
        tools: dict[int, dict[str, Any]] = {}
        left_out: list[str] = []
        for position, item in enumerate(value or ()):
            kind = item.get("type") if isinstance(item, dict) else None
            if isinstance(kind, str) and _RUN_ELSEWHERE.fullmatch(kind):
                left_out.append(kind)
            else:
                tools[position] = self._tool(item, f"tools[{position}]")
        check_distinct(tools.items(), "tools[{}].name")
        if left_out:
            self.warnings["tools"] = not_run(left_out)
        return tuple(tools.values())

    def cache_control(self, value: Any, where: str) -> None:
        if value is None:
            return
        if not isinstance(value, dict) or value.get("type") != "ephemeral":
            raise problem(where, "should be an object of type ephemeral")
        for key in value:
            if key not in ("type", "ttl", "scope"):
                raise problem(f"{where}.{key[:64]}", "is not a field of cache_control")
        if value.get("ttl") not in (None, "5m", "1h"):
            raise problem(f"{where}.ttl", f"should be 5m or 1h, got {describe(value['ttl'])}")
        if value.get("ttl") == "1h" or value.get("scope") is not None:
            self.warnings["cache_control"] = (
                "prefixes are cached for one key, and for as long as there is room"
            )

    def _message(self, item: Any, where: str) -> Iterable[dict[str, Any]]:
        if not isinstance(item, dict):
            raise problem(where, f"should be an object, got {describe(item)}")
        role = item.get("role")
        if not isinstance(role, str) or role not in _BLOCKS_OF:
            expected = ", ".join(_BLOCKS_OF)
            raise problem(f"{where}.role", f"should be one of {expected}; got {describe(role)}")
        _only_known(item, ("role", "content"), where, "a message")
        content, where = item.get("content"), f"{where}.content"
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        blocks = self._blocks(content, role, where)
        if role == "assistant":
            return [self._assistant(blocks, where)]
        if role == "system":
            return [{"role": role, "content": _joined([block["text"] for block in blocks])}]
        return self._user(blocks, where)

    def _blocks(self, value: Any, role: str, where: str) -> list[dict[str, Any]]:
        """Check a list of content blocks. Only block types that `role` may send are accepted, and
        unknown fields are refused.
        """
        if not isinstance(value, list):
            raise problem(where, f"should be a string or a list of blocks, got {describe(value)}")
        if len(value) > MAX_BLOCKS:
            raise problem(where, f"should have at most {MAX_BLOCKS} blocks, got {len(value)}")
        for position, block in enumerate(value):
            self._check_block(block, role, f"{where}[{position}]")
        return value

    def _check_block(self, block: Any, role: str, where: str) -> None:
        if not isinstance(block, dict):
            raise problem(where, f"should be an object, got {describe(block)}")
        kind, allowed = block.get("type"), _BLOCKS_OF[role]
        if not isinstance(kind, str) or kind not in allowed:
            rule = f"this server takes {' and '.join(allowed)} here, got {describe(kind)}"
            raise problem(f"{where}.type", rule)
        _only_known(block, _BLOCK_FIELDS[kind], where, f"a {kind} block")
        self.cache_control(block.get("cache_control"), f"{where}.cache_control")
        if kind == "text":
            _text(block.get("text"), f"{where}.text")

    def _assistant(self, blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
        texts, thoughts, calls = [], [], []
        for position, block in enumerate(blocks):
            here = f"{where}[{position}]"
            if block["type"] == "text":
                texts.append(block["text"])
            elif block["type"] == "tool_use":
                calls.append(self._call(block, here))
            elif block["type"] == "thinking":
                thoughts.append(_text(block.get("thinking"), f"{here}.thinking"))
                _text(block.get("signature", ""), f"{here}.signature")
            else:
                _text(block.get("data"), f"{here}.data")
                self.warnings["redacted_thinking"] = "only Anthropic can read it; it was left out"
        message: dict[str, Any] = {"role": "assistant", "content": _joined(texts)}
        if any(thoughts):
            message["reasoning_content"] = _joined(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, block: dict[str, Any], where: str) -> dict[str, Any]:
        call_id = short_text(block.get("id"), f"{where}.id", MAX_ID)
        name = short_text(block.get("name"), f"{where}.name", MAX_TOOL_NAME)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise problem(f"{where}.input", f"should be an object, got {describe(arguments)}")
        self._called[call_id] = name
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _user(self, blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        """Convert the blocks of a user message. Each tool result becomes a separate message. Texts
        and results keep their order.
        """
        made: list[dict[str, Any]] = []
        said: Content | None = None
        for position, block in enumerate(blocks):
            place = f"{where}[{position}]"
            if block["type"] == "tool_result":
                if said is not None:
                    made.append({"role": "user", **said.fields})
                    said = None
                made.append(self._result(block, place))
                continue
            said = said or Content()
            if block["type"] == "image":
                said.add_image(_image(block, place), place)
            elif block["text"]:
                said.add_text(block["text"])
        if said is not None or not made:
            made.append({"role": "user", **(said or Content()).fields})
        return made

    def _result(self, block: dict[str, Any], where: str) -> dict[str, Any]:
        call_id = short_text(block.get("tool_use_id"), f"{where}.tool_use_id", MAX_ID)
        if call_id not in self._called:
            rule = "answers no call: no assistant message before it has a tool_use of this id"
            raise problem(f"{where}.tool_use_id", rule)
        content, is_error = block.get("content"), block.get("is_error")
        if is_error not in (None, False, True):
            raise problem(f"{where}.is_error", f"should be a boolean, got {describe(is_error)}")
        if content is None:
            text = ""
        elif isinstance(content, str):
            text = content
        else:
            inner = self._blocks(content, "system", f"{where}.content")
            text = _joined([each["text"] for each in inner])
        if is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        return {
            "role": "tool",
            "tool_call_id": call_id,
            "name": self._called[call_id],
            "content": text,
        }

    def _tool(self, item: Any, where: str) -> dict[str, Any]:
        if not isinstance(item, dict):
            raise problem(where, f"should be an object, got {describe(item)}")
        kind = item.get("type")
        if kind not in (None, "custom"):
            rule = f"should be custom, with a name and an input_schema, got {describe(kind)}"
            raise problem(f"{where}.type", rule)
        _only_known(item, _TOOL_FIELDS, where, "a custom tool")
        self.cache_control(item.get("cache_control"), f"{where}.cache_control")
        if not isinstance(item.get("input_schema"), dict):
            raise problem(f"{where}.input_schema", "should be a JSON schema of type object")
        if item.get("input_examples") not in (None, []):
            self.warnings["input_examples"] = "the model is not shown them"
        return function_tool(item, where, "input_schema")


def with_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Add the system prompt as the first message. If the first message is a system message already,
    the two are merged.
    """
    if not system:
        return messages
    first: dict[str, Any] = {"role": "system", "content": system}
    if messages[0]["role"] == "system":
        _merge(first, messages[0])
        messages = messages[1:]
    return [first, *messages]


def _image(block: dict[str, Any], where: str) -> Image:
    source, where = block.get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise problem(f"{where}.type", f"should be base64 or url, got {describe(kind)}")
    if kind == "url":
        _only_known(source, ("type", "url"), where, "a url source")
        return image_from_url(source.get("url"), f"{where}.url")
    _only_known(source, ("type", "media_type", "data"), where, "a base64 source")
    return image_from_base64(source.get("data"), source.get("media_type"), f"{where}.data")


def _merge(turn: dict[str, Any], more: dict[str, Any]) -> None:
    if "images" in turn or "images" in more:
        for each in (turn, more):
            if "images" not in each:
                each["content"] = without_marks(each.get("content", ""))
        turn["images"] = turn.get("images", []) + more.get("images", [])
    for key in ("content", "reasoning_content"):
        if text := _joined([turn.get(key, ""), more.get(key, "")]):
            turn[key] = text
    if "tool_calls" in more:
        turn["tool_calls"] = turn.get("tool_calls", []) + more["tool_calls"]


def _joined(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)


def _only_known(item: dict[str, Any], known: tuple[str, ...], where: str, what: str) -> None:
    for key, value in item.items():
        if key not in known:
            raise problem(f"{where}.{key[:64]}", f"is not a field of {what}")
        if key in _HARMLESS and value not in _HARMLESS[key]:
            raise problem(f"{where}.{key}", "is not supported by this server; leave it out")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise problem(where, f"should be a string, got {describe(value)}")
    return value
