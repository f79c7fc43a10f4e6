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
from engine.servers.schema.messages import parse_tool_choice, parse_tools
from engine.servers.schema.structured import ResponseFormat, read_response_format

Tools = tuple[dict[str, Any], ...]
T = TypeVar("T")

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


PLAIN_TEXT = TextFormat(ResponseFormat(None), {"type": "text"})


def parse_flat_tools(value: Any) -> Tools:
    if not isinstance(value, list):
        return parse_tools(value)
    folded = [_fold_tool(tool, f"tools[{i}]") for i, tool in enumerate(value)]
    return _unfolding(".function", lambda: parse_tools(folded))


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


def _fold_tool(tool: Any, where: str) -> Any:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    if kind != "function":
        raise problem(
            f"{where}.type",
            f"this server has no built-in or custom tools, only functions; got {describe(kind)}",
        )
    kept = dict(tool)
    for key in _OFF_ONLY:
        if kept.pop(key, None) not in (None, False):
            raise problem(f"{where}.{key}", "is not supported by this server; leave it out")
    return _fold(kept)


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
