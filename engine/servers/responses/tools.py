"""Parses tools, tool choice and `text.format` of the Responses API. They are less deeply nested
than in chat completions.

They are converted to the form of chat completions and parsed by the same functions. Field paths in
error messages are converted back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import ToolChoice
from engine.servers.http.errors import describe, problem
from engine.servers.schema.structured import ResponseFormat, read_response_format
from engine.servers.schema.tools import (
    check_distinct,
    check_tool_list,
    parse_tool,
    parse_tool_choice,
)

Tools = tuple[dict[str, Any], ...]
T = TypeVar("T")

# Types of tools that run at OpenAI, or whose calls are not JSON objects. Clients such as Codex
# offer some of them in every request.
NOT_RUN = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom"),
        *("file_search", "image_generation", "local_shell", "mcp", "namespace", "shell"),
        *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
        "web_search_preview_2025_03_11",
    }
)
# Options of function tools that are not supported. They are accepted only if they are null or
# false.
_OFF_ONLY = ("defer_loading", "allowed_callers", "output_schema")


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The parsed output format, and the format as the client wrote it, which the response
    repeats.
    """

    parsed: ResponseFormat
    echo: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions that the model may call, and the types of the other offered tools, which are
    left out because this server can't run them.
    """

    functions: Tools
    left_out: tuple[str, ...] = ()


NO_TOOLS = OfferedTools(())
PLAIN_TEXT = TextFormat(ResponseFormat(None), {"type": "text"})


def parse_flat_tools(value: Any) -> OfferedTools:
    check_tool_list(value, "tools")
    functions: dict[int, dict[str, Any]] = {}
    left_out: list[str] = []
    for position, tool in enumerate(value or ()):
        if isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] in NOT_RUN:
            left_out.append(tool["type"])
        else:
            functions[position] = _parse_function(tool, f"tools[{position}]")
    check_distinct(functions.items(), "tools[{}].name")
    return OfferedTools(tuple(functions.values()), tuple(left_out))


def parse_flat_choice(value: Any, tools: Tools) -> tuple[ToolChoice, Tools]:
    if isinstance(value, dict):
        if value.get("type") == "allowed_tools":
            rest = {key: item for key, item in value.items() if key != "type"}
            if isinstance(rest.get("tools"), list):
                rest["tools"] = [_fold(each) for each in rest["tools"]]
            value = {"type": "allowed_tools", "allowed_tools": rest}
            return _unfolding(".allowed_tools", lambda: parse_tool_choice(value, tools))
        value = _fold(value)
    return _unfolding(".function", lambda: parse_tool_choice(value, tools))


def parse_format(value: Any) -> TextFormat:
    if value is None:
        return PLAIN_TEXT
    folded = value
    if isinstance(value, dict) and value.get("type") == "json_schema":
        schema = {key: item for key, item in value.items() if key != "type"}
        folded = {"type": "json_schema", "json_schema": schema}
    return _unfolding(
        ".json_schema", lambda: TextFormat(read_response_format(folded, "text.format"), value)
    )


def echo_tools(tools: Tools) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "name": function["name"],
            "description": function["description"] or None,
            "parameters": function["parameters"],
            "strict": function.get("strict", False),
        }
        for function in (tool["function"] for tool in tools)
    ]


def _parse_function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise problem(where, f"should be an object, got {describe(tool)}")
    if tool.get("type") != "function":
        rule = f"should be function, or a tool of OpenAI's API; got {describe(tool.get('type'))}"
        raise problem(f"{where}.type", rule)
    kept = dict(tool)
    for key in _OFF_ONLY:
        if kept.pop(key, None) not in (None, False):
            raise problem(f"{where}.{key}", "is not supported by this server; leave it out")
    return _unfolding(".function", lambda: parse_tool(_fold(kept), where))


def _fold(flat: Any) -> Any:
    if not isinstance(flat, dict) or flat.get("type") != "function":
        return flat
    return {
        "type": "function",
        "function": {key: item for key, item in flat.items() if key != "type"},
    }


def _unfolding(level: str, parse: Callable[[], T]) -> T:
    """Call `parse()`. Removes `level`, which the conversion added, from the field paths in its
    errors.
    """
    try:
        return parse()
    except InvalidRequestError as error:
        place = (error.param or "").replace(level, "").replace(".function", "")
        message = error.message.replace(error.param or "", place, 1)
        raise InvalidRequestError(message, param=place, code=error.error_code) from None
