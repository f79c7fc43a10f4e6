"""Rules for tool calls, in complete and in streamed answers.

Agents depend on tool calls. If the index, id or JSON of a call is wrong, the call is lost and the
agent's step fails.
"""

import json
from typing import Any

from engine_tools.conformance.expect import RuleFailed, expect, field, items, short, text
from engine_tools.conformance.rule import Group
from engine_tools.conformance.rules.chat import WEATHER_TURNS
from engine_tools.conformance.rules.streaming import choices, reasons
from engine_tools.conformance.sse import SseStream
from engine_tools.conformance.target import CHAT, Target

SDK = "openai-python"
AGENTS = "LangChain and other agents"
CITIES = ("Paris", "Rome")
# The schema allows only few words, so that even a small model completes the call.
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time of day",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
QUESTION = "What is the weather in Paris?"


def body(target: Target, **fields: Any) -> dict[str, Any]:
    return target.chat(QUESTION, **{"tools": [WEATHER], "max_tokens": 160} | fields)


async def _missing(target: Target) -> str | None:
    reply = await target.post(CHAT, body(target, tool_choice="required", max_tokens=4))
    refused = 400 <= reply.status < 500
    return f"tools are refused: {reply.message[:120]}" if refused else None


TOOLS = Group("tools", _missing)


async def _message(target: Target, **fields: Any) -> dict[str, Any]:
    answer = (await target.post(CHAT, body(target, **fields))).ok()
    found: dict[str, Any] = field(answer, "choices", 0)
    return found


async def _required(target: Target) -> dict[str, Any]:
    return await target.once("required", lambda: _message(target, tool_choice="required"))


async def _required_stream(target: Target) -> SseStream:
    wanted = body(target, tool_choice="required")
    return await target.once("required stream", lambda: target.stream(CHAT, wanted))


def _arguments(call: Any) -> dict[str, Any]:
    raw = text(call, "function", "arguments")
    try:
        value = json.loads(raw)
    except ValueError:
        raise RuleFailed(f"arguments are no JSON: {short(raw)}") from None
    expect(isinstance(value, dict), f"arguments are {short(raw)}, not an object")
    found: dict[str, Any] = value
    return found


def _deltas(stream: SseStream) -> list[Any]:
    """The streamed pieces of all tool calls, in order. Fails the rule if there are none."""
    found = [piece for each in choices(stream) for piece in (each["delta"].get("tool_calls") or [])]
    expect(bool(found), "no tool_calls in the stream")
    return found


@TOOLS.rule(
    "TOOL-01",
    "tool_choice required gives a call",
    client=AGENTS,
    sees="prose where the agent needs a call",
)
async def required(target: Target) -> None:
    items(await _required(target), "message", "tool_calls")


@TOOLS.rule(
    "TOOL-02",
    "A call has an id, the type function and the name of a tool",
    client=SDK,
    sees="a call that can't be answered",
)
async def call_fields(target: Target) -> None:
    for call in items(await _required(target), "message", "tool_calls"):
        expect(bool(text(call, "id")), "a call's id is empty")
        expect(field(call, "type") == "function", f"type is {short(call['type'])}")
        name = text(call, "function", "name")
        expect(name == "get_weather", f"the function is {short(name)}")


@TOOLS.rule(
    "TOOL-03",
    "Arguments are a string that holds a JSON object",
    client=AGENTS,
    sees="an invalid_tool_call: the step is lost",
)
async def arguments(target: Target) -> None:
    for call in items(await _required(target), "message", "tool_calls"):
        _arguments(call)


@TOOLS.rule(
    "TOOL-04",
    "With strict, arguments follow the tool's schema",
    client=SDK,
    sees="a validation error in the tool's own code",
)
async def strict_arguments(target: Target) -> None:
    function = WEATHER["function"] | {"strict": True}
    tool = {"type": "function", "function": function}
    choice = await _message(target, tools=[tool], tool_choice="required")
    for call in items(choice, "message", "tool_calls"):
        value = _arguments(call)
        expect(set(value) == {"city"} and value["city"] in CITIES, f"arguments: {short(value)}")


@TOOLS.rule(
    "TOOL-05",
    "finish_reason is tool_calls when there are calls",
    client="Cursor, OpenClaw",
    sees="the agent takes the turn for finished and drops the call",
)
async def finish_reason(target: Target) -> None:
    found = field(await _required(target), "finish_reason")
    expect(found == "tool_calls", f"finish_reason is {short(found)}")


@TOOLS.rule(
    "TOOL-06",
    "content is null or a string beside calls",
    client=SDK,
    sees="another type than declared",
)
async def content(target: Target) -> None:
    found = field(await _required(target), "message").get("content")
    expect(found is None or isinstance(found, str), f"content is {short(found)}")


@TOOLS.rule(
    "TOOL-07",
    "A named tool is the one that is called",
    client="LangChain with_structured_output",
    sees="prose, or a call of another tool",
)
async def named(target: Target) -> None:
    pick = {"type": "function", "function": {"name": "get_time"}}
    choice = await _message(target, tools=[WEATHER, CLOCK], tool_choice=pick)
    found = items(choice, "message", "tool_calls")
    names = {text(call, "function", "name") for call in found}
    expect(names == {"get_time"}, f"called: {sorted(names)}")
    reason = field(choice, "finish_reason")
    expect(reason in ("stop", "tool_calls"), f"finish_reason is {short(reason)}")


@TOOLS.rule(
    "TOOL-08",
    "A call without parameters has the arguments {}",
    client=AGENTS,
    sees="a JSON error on an empty string",
)
async def no_arguments(target: Target) -> None:
    pick = {"type": "function", "function": {"name": "get_time"}}
    choice = await _message(target, tools=[CLOCK], tool_choice=pick)
    value = _arguments(field(choice, "message", "tool_calls", 0))
    expect(value == {}, f"arguments are {short(value)}")


@TOOLS.rule(
    "TOOL-09",
    "tool_choice none gives text and no call",
    client=AGENTS,
    sees="a call where the last step must be an answer",
)
async def none(target: Target) -> None:
    choice = await _message(target, tool_choice="none", max_tokens=16)
    expect(not choice["message"].get("tool_calls"), "there are calls")
    text(choice, "message", "content")


@TOOLS.rule(
    "TOOL-10",
    "tool_choice auto: calls and finish_reason agree",
    client=AGENTS,
    sees="calls that are not run, or a wait for calls that are not there",
)
async def auto(target: Target) -> None:
    choice = await _message(target, tool_choice="auto")
    calls = choice["message"].get("tool_calls") or []
    reason = field(choice, "finish_reason")
    expect(not calls or reason in ("tool_calls", "length"), f"calls and {short(reason)}")
    expect(bool(calls) or reason != "tool_calls", "finish_reason tool_calls without calls")
    for call in calls:
        _arguments(call)


@TOOLS.rule(
    "TOOL-11",
    "parallel_tool_calls false gives one call at most",
    client="LangChain",
    sees="several calls where the agent runs one",
)
async def one_call(target: Target) -> None:
    choice = await _message(target, tool_choice="required", parallel_tool_calls=False)
    count = len(items(choice, "message", "tool_calls"))
    expect(count == 1, f"{count} calls")


@TOOLS.rule(
    "TOOL-12",
    "A tool's answer can be sent back",
    client=AGENTS,
    sees="the second step of every agent fails",
)
async def round_trip(target: Target) -> None:
    choice = await _message(target, messages=WEATHER_TURNS, max_tokens=8, tool_choice="none")
    text(choice, "message", "content")


@TOOLS.rule(
    "TOOL-13",
    "A named tool that is not there is refused",
    client=SDK,
    sees="a call of a tool that does not exist, or three failures",
)
async def unknown_tool(target: Target) -> None:
    pick = {"type": "function", "function": {"name": "no_such_tool"}}
    (await target.post(CHAT, body(target, tool_choice=pick))).refused()


@TOOLS.rule(
    "TOOL-14",
    "A tool without a name is refused",
    client=SDK,
    sees="calls without a name, or three failures",
)
async def nameless_tool(target: Target) -> None:
    (await target.post(CHAT, body(target, tools=[{"type": "function", "function": {}}]))).refused()


@TOOLS.rule(
    "TOOL-15",
    "A tool_choice without tools is no server failure",
    client="agents whose tools were all switched off",
    sees="InternalServerError, after the request was sent three times",
)
async def choice_without_tools(target: Target) -> None:
    reply = await target.post(CHAT, target.chat(tool_choice="required", max_tokens=4))
    expect(reply.status < 500, reply.summary)


@TOOLS.rule(
    "TOOL-16",
    "A tool_choice of an unknown kind is refused",
    client=SDK,
    sees="the choice is silently ignored, or three failures",
)
async def bad_choice(target: Target) -> None:
    (await target.post(CHAT, body(target, tool_choice="sometimes", max_tokens=4))).refused()


@TOOLS.rule(
    "TOOL-17",
    "Forty tools are accepted",
    client="Cline, Claude Code",
    sees="a 400 at the start of every session",
)
async def many_tools(target: Target) -> None:
    parameters = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "parameters": parameters}}
        for n in range(40)
    ]
    await _message(target, tools=tools, tool_choice="none", max_tokens=4)


@TOOLS.rule(
    "TOOL-21",
    "Stream: every piece of a call has its index",
    client="LangChain",
    sees="pieces without an index are dropped: the call is empty",
)
async def stream_index(target: Target) -> None:
    for piece in _deltas(await _required_stream(target)):
        index = piece.get("index")
        expect(isinstance(index, int), f"a piece has the index {short(index)}")


@TOOLS.rule(
    "TOOL-22",
    "Stream: id and name come with a call's first piece",
    client=SDK,
    sees="a call that can't be run or answered",
)
async def stream_first(target: Target) -> None:
    first = _deltas(await _required_stream(target))[0]
    expect(bool(text(first, "id")), "the id is empty")
    expect(bool(text(first, "function", "name")), "the name is empty")
    expect(field(first, "type") == "function", f"type is {short(first['type'])}")


@TOOLS.rule(
    "TOOL-23",
    "Stream: id and name come once for each call",
    client="clients that join deltas key by key",
    sees="a tool named get_weatherget_weather",
)
async def stream_once(target: Target) -> None:
    known: set[Any] = set()
    for piece in _deltas(await _required_stream(target)):
        index = piece.get("index")
        is_first = index not in known
        known.add(index)
        name = (piece.get("function") or {}).get("name")
        expect(is_first or not name, f"the name {short(name)} comes again")
        expect(is_first or not piece.get("id"), f"the id {short(piece.get('id'))} comes again")


@TOOLS.rule(
    "TOOL-24",
    "Stream: the pieces of arguments join to a JSON object",
    client=AGENTS,
    sees="an invalid_tool_call: the step is lost",
)
async def stream_arguments(target: Target) -> None:
    pieces: dict[Any, str] = {}
    for piece in _deltas(await _required_stream(target)):
        more = (piece.get("function") or {}).get("arguments") or ""
        pieces[piece.get("index")] = pieces.get(piece.get("index"), "") + more
    for raw in pieces.values():
        _arguments({"function": {"arguments": raw}})


@TOOLS.rule(
    "TOOL-25",
    "Stream: it ends with finish_reason tool_calls",
    client="Cursor, OpenClaw",
    sees="the agent takes the turn for finished and drops the call",
)
async def stream_finish(target: Target) -> None:
    stream = await _required_stream(target)
    _deltas(stream)
    expect(reasons(stream) == ["tool_calls"], f"finish reasons are {reasons(stream)}")


@TOOLS.rule(
    "TOOL-26",
    "Stream: the role comes first, and once",
    client="LangChain",
    sees="chunks that don't join to one AIMessage",
)
async def stream_role(target: Target) -> None:
    roles = [each["delta"].get("role") for each in choices(await _required_stream(target))]
    expect(roles[0] == "assistant", f"the first chunk has the role {short(roles[0])}")
    expect(not any(roles[1:]), "the role is in several chunks")
