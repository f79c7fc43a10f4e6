"""Rules for /v1/messages, Anthropic's API, which Claude Code and the anthropic SDK use."""

from typing import Any

from engine_tools.conformance.expect import expect, field, is_count, items, short, text
from engine_tools.conformance.rule import Group
from engine_tools.conformance.sse import SseStream
from engine_tools.conformance.target import QUESTION, Reply, Target

PATH = "/v1/messages"
SDK = "anthropic-python"
CLAUDE = "Claude Code"
STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "pause_turn")


def body(target: Target, content: Any = QUESTION, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    plain = {"model": target.model, "messages": messages, "max_tokens": 16, "temperature": 0}
    return plain | fields


async def _missing(target: Target) -> str | None:
    return await target.lacks(PATH, body(target, max_tokens=1))


MESSAGES = Group("messages", _missing)


async def _plain(target: Target) -> Any:
    async def ask() -> Any:
        return (await target.post(PATH, body(target))).ok()

    return await target.once("message", ask)


async def _streamed(target: Target) -> SseStream:
    return await target.once("message stream", lambda: target.stream(PATH, body(target)))


def _said(message: Any) -> str:
    blocks = items(message, "content")
    return "".join(block["text"] for block in blocks if block.get("type") == "text")


def num_input(message: Any) -> int:
    """The number of all prompt tokens. Anthropic's usage counts cached tokens in separate fields,
    which are added here.
    """
    usage = field(message, "usage")
    apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return int(field(usage, "input_tokens")) + sum(usage.get(name) or 0 for name in apart)


def _error(reply: Reply) -> None:
    """Check Anthropic's error body, which differs from OpenAI's."""
    whole = reply.json()
    expect(field(whole, "type") == "error", f"type is {short(whole['type'])}")
    text(whole, "error", "type")
    text(whole, "error", "message")


@MESSAGES.rule(
    "MSG-01",
    "An answer has id, type, role, model, content and stop_reason",
    client=SDK,
    sees="None in fields that are declared as present",
)
async def shape(target: Target) -> None:
    message = await _plain(target)
    text(message, "id")
    text(message, "model")
    expect(field(message, "type") == "message", f"type is {short(message['type'])}")
    expect(field(message, "role") == "assistant", f"role is {short(message['role'])}")
    expect(bool(_said(message)), f"content is {short(message['content'])}")
    reason = field(message, "stop_reason")
    expect(reason in STOP_REASONS, f"stop_reason is {short(reason)}")


@MESSAGES.rule("MSG-02", "usage counts input and output", client=CLAUDE, sees="no context meter")
async def usage(target: Target) -> None:
    found = field(await _plain(target), "usage")
    for name in ("input_tokens", "output_tokens"):
        expect(is_count(field(found, name)), f"usage.{name} is {short(found[name])}")
    expect(found["output_tokens"] > 0, "usage.output_tokens is 0")


@MESSAGES.rule(
    "MSG-03",
    "max_tokens gives stop_reason max_tokens",
    client=CLAUDE,
    sees="a cut answer that looks complete",
)
async def limit(target: Target) -> None:
    request = body(target, "Count from 1 to 100.", max_tokens=3)
    message = (await target.post(PATH, request)).ok()
    reason = field(message, "stop_reason")
    expect(reason == "max_tokens", f"stop_reason is {short(reason)}")


@MESSAGES.rule(
    "MSG-04",
    "A stop sequence ends the answer and is named",
    client=SDK,
    sees="text that should have been cut, or no way to tell why it ended",
)
async def stop(target: Target) -> None:
    whole = _said(await _plain(target))
    mark = whole[4:8]
    message = (await target.post(PATH, body(target, stop_sequences=[mark]))).ok()
    expect(mark not in _said(message), f"{short(mark)} is in the answer")
    expect(field(message, "stop_reason") == "stop_sequence", short(message["stop_reason"]))
    expect(field(message, "stop_sequence") == mark, short(message["stop_sequence"]))


@MESSAGES.rule(
    "MSG-05",
    "system counts, as a string and as blocks",
    client=CLAUDE,
    sees="its instructions are silently ignored, or a 400",
)
async def system(target: Target) -> None:
    # The request is not compared with one without a system message, because a template may then
    # insert its own system message.
    terse = (await target.post(PATH, body(target, system="Be terse."))).ok()
    words = "Be " + "very " * 20 + "terse."
    as_text = (await target.post(PATH, body(target, system=words))).ok()
    blocks = [{"type": "text", "text": words}]
    as_blocks = (await target.post(PATH, body(target, system=blocks))).ok()
    one, two, few = num_input(as_text), num_input(as_blocks), num_input(terse)
    expect(one > few + 10, f"{one} input tokens with a long system prompt, {few} with a short one")
    expect(one == two, f"{one} input tokens as a string, {two} as blocks")


@MESSAGES.rule(
    "MSG-06",
    "Content as blocks means the same as a string",
    client=CLAUDE,
    sees="a 400, or an answer to something else",
)
async def blocks(target: Target) -> None:
    content = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
    message = (await target.post(PATH, body(target, content))).ok()
    mine, theirs = num_input(message), num_input(await _plain(target))
    expect(mine == theirs, f"{mine} input tokens as blocks, {theirs} as a string")


@MESSAGES.rule(
    "MSG-11",
    "Stream: events come in Anthropic's order, under their names",
    client=SDK,
    sees="an error in the stream helper",
)
async def stream_order(target: Target) -> None:
    stream = await _streamed(target)
    kinds = [text(chunk, "type") for chunk in stream.chunks if chunk.get("type") != "ping"]
    first = ["message_start", "content_block_start", "content_block_delta"]
    expect(kinds[:3] == first, f"it begins with {kinds[:3]}")
    last = ["content_block_stop", "message_delta", "message_stop"]
    expect(kinds[-3:] == last, f"it ends with {kinds[-3:]}")
    for event, chunk in zip(stream.events, stream.chunks, strict=False):
        expect(event.name == chunk["type"], f"{short(event.name)} names a {chunk['type']}")


@MESSAGES.rule(
    "MSG-12",
    "Stream: text deltas join to the whole answer",
    client=SDK,
    sees="missing or doubled text",
)
async def stream_text(target: Target) -> None:
    chunks = (await _streamed(target)).chunks
    deltas = [chunk["delta"] for chunk in chunks if chunk.get("type") == "content_block_delta"]
    said = "".join(delta.get("text") or "" for delta in deltas)
    whole = _said(await _plain(target))
    expect(said == whole, f"{short(said)} streamed, {short(whole)} whole")


@MESSAGES.rule(
    "MSG-13",
    "Stream: message_start has the message, message_delta its stop_reason and usage",
    client=CLAUDE,
    sees="no context meter, or an answer that never ends",
)
async def stream_usage(target: Target) -> None:
    chunks = (await _streamed(target)).chunks
    found = {text(chunk, "type"): chunk for chunk in chunks}
    start = field(found, "message_start", "message")
    text(start, "id")
    expect(is_count(field(start, "usage", "input_tokens")), "message_start has no input_tokens")
    reason = field(found, "message_delta", "delta", "stop_reason")
    expect(reason in STOP_REASONS, f"stop_reason is {short(reason)}")
    expect(is_count(field(found, "message_delta", "usage", "output_tokens")), "no output_tokens")


@MESSAGES.rule(
    "MSG-14",
    "Stream: no [DONE], which is OpenAI's",
    client=SDK,
    sees="nothing: the SDK skips events without a name; others parse it as JSON",
    severity="advice",
)
async def no_done(target: Target) -> None:
    expect((await _streamed(target)).num_done == 0, "the stream has a [DONE]")


@MESSAGES.rule(
    "MSG-21",
    "count_tokens agrees with usage",
    client=CLAUDE,
    sees="a 404, or a wrong context meter",
)
async def count_tokens(target: Target) -> None:
    request = {"model": target.model, "messages": body(target)["messages"]}
    count = field((await target.post(f"{PATH}/count_tokens", request)).ok(), "input_tokens")
    used = num_input(await _plain(target))
    expect(count == used, f"{count} counted, {used} used")


@MESSAGES.rule(
    "MSG-22",
    "Errors have Anthropic's shape",
    client=SDK,
    sees="an exception without type and message",
)
async def error_shape(target: Target) -> None:
    _error((await target.post(PATH, body(target, messages="not a list"))).refused())


@MESSAGES.rule(
    "MSG-23",
    "A request without max_tokens is refused",
    client=SDK,
    sees="a mistake that only shows on another server",
    severity="advice",
)
async def no_limit(target: Target) -> None:
    request = body(target)
    del request["max_tokens"]
    (await target.post(PATH, request)).refused()


@MESSAGES.rule(
    "MSG-24",
    "An unknown model is 404 in Anthropic's shape",
    client=SDK,
    sees="an answer of another model, or the wrong exception",
)
async def unknown_model(target: Target) -> None:
    reply = await target.post(PATH, body(target, model="no-such/model-anywhere"))
    expect(reply.status == 404, f"an unknown model is answered with {reply.summary}")
    _error(reply)


@MESSAGES.rule(
    "MSG-31",
    "tool_choice any gives a tool_use block with an object",
    client=CLAUDE,
    sees="prose where the agent needs a call",
)
async def tool_use(target: Target) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    }
    tool = {"name": "get_weather", "description": "The weather", "input_schema": schema}
    request = body(target, "The weather in Paris?", tools=[tool], tool_choice={"type": "any"})
    reply = await target.post(PATH, request | {"max_tokens": 160})
    message = reply.ok_unless_refused("tool")
    calls = [each for each in items(message, "content") if each.get("type") == "tool_use"]
    expect(bool(calls), f"content is {short(message['content'])}")
    text(calls[0], "id")
    expect(text(calls[0], "name") == "get_weather", f"called: {short(calls[0]['name'])}")
    expect(isinstance(field(calls[0], "input"), dict), f"input is {short(calls[0]['input'])}")
    expect(message["stop_reason"] == "tool_use", f"stop_reason is {message['stop_reason']}")


@MESSAGES.rule(
    "MSG-32",
    "A tool_result can be sent back",
    client=CLAUDE,
    sees="the second step of every agent fails",
)
async def tool_result(target: Target) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "18 degrees"}
    turns = [
        {"role": "user", "content": "The weather in Paris?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    message = (await target.post(PATH, body(target, messages=turns, max_tokens=8))).ok()
    items(message, "content")
