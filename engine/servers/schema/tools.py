"""Parses tools and tool choice into the form of `ChatRequest`.

Missing parts of a tool get defaults, such as an empty object schema for missing parameters. So chat
templates and grammars always get tools in the same form.
"""

import re
from collections.abc import Iterable
from typing import Any

from engine.core.interfaces.backend import ToolChoice
from engine.servers.http.errors import check_keys, describe, problem

MAX_TOOLS = 512
MAX_DESCRIPTION = 65_536
MAX_TOOL_NAME = 128

_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME}}}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
# "any" is Mistral's word for "required".
_MODES = {
    "none": ToolChoice("none"),
    "auto": ToolChoice(),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def parse_tools(value: Any, where: str = "tools") -> tuple[dict[str, Any], ...]:
    """Parse a list of function tools, whose names must differ. null means no tools."""
    check_tool_list(value, where)
    tools = tuple(parse_tool(item, f"{where}[{i}]") for i, item in enumerate(value or ()))
    check_distinct(enumerate(tools), where + "[{}].function.name")
    return tools


def check_tool_list(value: Any, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise problem(where, f"should be a list of tools, got {describe(value)}")
    if len(value) > MAX_TOOLS:
        raise problem(where, f"should have at most {MAX_TOOLS} tools, got {len(value)}")


def check_distinct(tools: Iterable[tuple[int, dict[str, Any]]], place: str) -> None:
    """Refuse tools with the same name. Each tool comes with its index in the client's list. `place`
    is the path of the name's field for errors, with `{}` for this index.
    """
    seen: set[str] = set()
    for position, tool in tools:
        name = tool["function"]["name"]
        if name in seen:
            raise problem(place.format(position), f"{name} is there twice")
        seen.add(name)


def not_run(kinds: Iterable[str]) -> str:
    """The warning about tools that another company's servers run."""
    return f"left out what this server can't run: {', '.join(dict.fromkeys(kinds))}"


def parse_tool_choice(
    value: Any, tools: tuple[dict[str, Any], ...], where: str = "tool_choice"
) -> tuple[ToolChoice, tuple[dict[str, Any], ...]]:
    """Parse the choice of a tool. Returns the choice and the tools that may be called. If there are
    no tools, only "none" and "auto" are accepted.
    """
    if value is None:
        return ToolChoice("auto" if tools else "none"), tools
    if isinstance(value, str):
        if value not in _MODES:
            raise problem(where, f"should be none, auto, required or an object, got {value[:64]!r}")
        choice = _MODES[value]
        if choice.mode == "required" and not tools:
            raise problem(where, f"{value} needs tools to choose from")
        return choice if tools else ToolChoice("none"), tools
    if not isinstance(value, dict):
        raise problem(where, f"should be a string or an object, got {describe(value)}")
    if value.get("type") == "function":
        name = _chosen_name(value, tools, where)
        return ToolChoice("named", name), tools
    if value.get("type") == "allowed_tools":
        return _allowed(value, tools, where)
    raise problem(
        f"{where}.type",
        f"should be function or allowed_tools, got {describe(value.get('type'))}",
    )


def parse_tool(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise problem(where, f"should be an object, got {describe(item)}")
    kind = item.get("type")
    if kind != "function":
        raise problem(f"{where}.type", f"only function tools are supported, got {describe(kind)}")
    check_keys(item, ("type", "function"), where)
    function = item.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise problem(where, f"should be an object, got {describe(function)}")
    check_keys(function, _FUNCTION_FIELDS, where)
    return function_tool(function, where)


def function_tool(given: dict[str, Any], where: str, schema: str = "parameters") -> dict[str, Any]:
    """Convert a tool to the form of chat completions. `schema` is the API's field for the
    parameters.
    """
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise problem(f"{where}.strict", f"should be a boolean, got {describe(strict)}")
    made: dict[str, Any] = {
        "name": _name(given.get("name"), f"{where}.name"),
        "description": _description(given.get("description"), f"{where}.description"),
        "parameters": _parameters(given.get(schema), f"{where}.{schema}"),
    }
    if strict:
        made["strict"] = True
    return {"type": "function", "function": made}


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        rule = f"should be 1 to {MAX_TOOL_NAME} letters, digits, dots, dashes and underscores"
        raise problem(where, f"{rule}, got {describe(value)}")
    return value


def _description(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_DESCRIPTION:
        rule = f"should be a string of at most {MAX_DESCRIPTION} characters"
        raise problem(where, f"{rule}, got {describe(value)}")
    return value


def _parameters(value: Any, where: str) -> dict[str, Any]:
    if value is None or value == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise problem(where, f"should be a JSON schema, got {describe(value)}")
    if value.get("type", "object") != "object":
        raise problem(f"{where}.type", f"should be object, got {describe(value['type'])}")
    return value


def _chosen_name(value: Any, tools: tuple[dict[str, Any], ...], where: str) -> str:
    """Get the name from `{"type": "function", "function": {"name": ...}}`, and check that there is
    a tool with this name.
    """
    if not isinstance(value, dict) or value.get("type") != "function":
        raise problem(where, "should be an object of type function")
    check_keys(value, ("type", "function"), where)
    function = value.get("function")
    if not isinstance(function, dict):
        raise problem(f"{where}.function", f"should be an object, got {describe(function)}")
    check_keys(function, ("name",), f"{where}.function")
    return known_name(function.get("name"), tools, f"{where}.function.name")


def known_name(value: Any, tools: tuple[dict[str, Any], ...], where: str) -> str:
    name = _name(value, where)
    if all(tool["function"]["name"] != name for tool in tools):
        raise problem(where, f"{name} is not one of the tools")
    return name


def _allowed(
    value: dict[str, Any], tools: tuple[dict[str, Any], ...], where: str
) -> tuple[ToolChoice, tuple[dict[str, Any], ...]]:
    check_keys(value, ("type", "allowed_tools"), where)
    allowed = value.get("allowed_tools")
    where = f"{where}.allowed_tools"
    if not isinstance(allowed, dict):
        raise problem(where, f"should be an object, got {describe(allowed)}")
    check_keys(allowed, ("mode", "tools"), where)
    mode, named = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise problem(f"{where}.mode", f"should be auto or required, got {describe(mode)}")
    if not isinstance(named, list) or not 1 <= len(named) <= MAX_TOOLS:
        raise problem(f"{where}.tools", f"should have 1 to {MAX_TOOLS} of the tools")
    names = {_chosen_name(each, tools, f"{where}.tools[{i}]") for i, each in enumerate(named)}
    kept = tuple(tool for tool in tools if tool["function"]["name"] in names)
    return _MODES[mode], kept
