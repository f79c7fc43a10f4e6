"""Rules for /v1/chat/completions without streaming: answers, and message forms that clients use."""

from typing import Any

from engine_tools.conformance.expect import RuleFailed, expect, field, is_count, items, short, text
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import CHAT, QUESTION, Target

CHAT_GROUP = Group("chat")
SDK = "openai-python"
FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
WEATHER_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees, sunny"},
]


def check_usage(usage: Any) -> None:
    """Check that the token counts are present and add up."""
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        expect(is_count(field(usage, name)), f"usage.{name} is {short(usage[name])}")
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    expect(usage["prompt_tokens"] > 0, "usage.prompt_tokens is 0")
    expect(usage["total_tokens"] == total, f"{usage['total_tokens']} tokens in all, not {total}")


async def _accepts(target: Target, messages: list[dict[str, Any]]) -> Any:
    body = (await target.post(CHAT, target.chat(messages=messages, max_tokens=4))).ok()
    field(body, "choices", 0, "message")
    return body


async def _never_5xx(target: Target, messages: list[dict[str, Any]]) -> None:
    reply = await target.post(CHAT, target.chat(messages=messages, max_tokens=4))
    expect(reply.status < 500, reply.summary)


@CHAT_GROUP.rule(
    "CHAT-01",
    "An answer has id, object, created and model",
    client=SDK,
    sees="None in fields that are declared as present",
)
async def envelope(target: Target) -> None:
    body = await target.plain_chat()
    text(body, "id")
    text(body, "model")
    expect(field(body, "object") == "chat.completion", f"object is {short(body['object'])}")
    expect(is_count(field(body, "created")), f"created is {short(body['created'])}")


@CHAT_GROUP.rule(
    "CHAT-02",
    "A choice has index, an assistant's message and a finish_reason",
    client="LangChain",
    sees="a KeyError, or an answer that looks unfinished",
)
async def choice(target: Target) -> None:
    first = items(await target.plain_chat(), "choices")[0]
    expect(field(first, "index") == 0, f"index is {short(first['index'])}")
    role = field(first, "message", "role")
    expect(role == "assistant", f"message.role is {short(role)}")
    expect(bool(text(first, "message", "content")), "message.content is empty")
    reason = field(first, "finish_reason")
    expect(reason in FINISH_REASONS, f"finish_reason is {short(reason)}")


@CHAT_GROUP.rule(
    "CHAT-03",
    "usage is there and adds up",
    client="LiteLLM",
    sees="wrong cost and token counts",
)
async def usage(target: Target) -> None:
    check_usage(field(await target.plain_chat(), "usage"))


@CHAT_GROUP.rule(
    "CHAT-04",
    "Answers have ids of their own",
    client="tracers",
    sees="different answers are recorded as one",
)
async def own_ids(target: Target) -> None:
    other = (await target.post(CHAT, target.chat(max_tokens=1))).ok()
    expect(other.get("id") != (await target.plain_chat()).get("id"), "two answers have one id")


@CHAT_GROUP.rule(
    "CHAT-05",
    "Content as a list of text parts means the same as a string",
    client="agents and editors",
    sees="a 400, or an answer to something else",
)
async def parts(target: Target) -> None:
    content = [{"type": "text", "text": QUESTION}]
    body = (await target.post(CHAT, target.chat(content))).ok()
    plain = await target.plain_chat()
    mine, theirs = body["usage"]["prompt_tokens"], plain["usage"]["prompt_tokens"]
    expect(mine == theirs, f"{mine} prompt tokens as parts, {theirs} as a string")


@CHAT_GROUP.rule(
    "CHAT-06",
    "Two text parts are both read",
    client="agents and editors",
    sees="part of the message is silently lost",
)
async def two_parts(target: Target) -> None:
    two = [{"type": "text", "text": QUESTION}] * 2
    body = (await target.post(CHAT, target.chat(two, max_tokens=1))).ok()
    plain = await target.plain_chat()
    mine, theirs = body["usage"]["prompt_tokens"], plain["usage"]["prompt_tokens"]
    expect(mine > theirs + 3, f"{mine} prompt tokens for two parts, {theirs} for one")


@CHAT_GROUP.rule(
    "CHAT-07",
    "A system message counts",
    client="every client",
    sees="instructions are silently ignored",
)
async def system_role(target: Target) -> None:
    turns = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": QUESTION}]
    body = await _accepts(target, turns)
    longer = turns[:1] + [{"role": "system", "content": "Be " + "very " * 20 + "terse."}]
    longer_body = await _accepts(target, [longer[1], turns[1]])
    mine, theirs = body["usage"]["prompt_tokens"], longer_body["usage"]["prompt_tokens"]
    expect(theirs > mine + 10, "a longer system message makes no longer prompt")


@CHAT_GROUP.rule(
    "CHAT-08",
    "The role developer is accepted",
    client="LangChain",
    sees="a 400 for models whose names it takes for reasoning models",
)
async def developer_role(target: Target) -> None:
    turns = [{"role": "developer", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
    await _accepts(target, turns)


@CHAT_GROUP.rule(
    "CHAT-09",
    "An assistant's turn with content null and tool_calls is accepted",
    client="LangChain",
    sees="every second step of an agent fails",
)
async def null_content(target: Target) -> None:
    await _accepts(target, WEATHER_TURNS)


@CHAT_GROUP.rule(
    "CHAT-10",
    "Empty content is accepted",
    client="Continue",
    sees="a 400; it works around servers that do this by sending a space",
)
async def empty_content(target: Target) -> None:
    await _accepts(target, [{"role": "user", "content": ""}])


@CHAT_GROUP.rule(
    "CHAT-11",
    "A message with a name is accepted",
    client="LangChain",
    sees="a 400 in conversations of several agents",
)
async def named_message(target: Target) -> None:
    await _accepts(target, [{"role": "user", "name": "ann", "content": "Hi"}])


@CHAT_GROUP.rule(
    "CHAT-12",
    "An unknown role is refused",
    client=SDK,
    sees="a misspelt role is silently dropped or templated as it is",
)
async def unknown_role(target: Target) -> None:
    body = target.chat(messages=[{"role": "wizard", "content": "Hi"}], max_tokens=4)
    reply = await target.post(CHAT, body)
    if reply.status == 200:
        raise RuleFailed("an unknown role is accepted", is_advice=True)
    reply.refused()


@CHAT_GROUP.rule(
    "CHAT-13",
    "An empty list of messages is refused",
    client=SDK,
    sees="an answer to nothing, or three failures if the status is 5xx",
)
async def empty_messages(target: Target) -> None:
    (await target.post(CHAT, target.chat(messages=[]))).refused()


@CHAT_GROUP.rule(
    "CHAT-14",
    "Half a surrogate pair in the text is no server failure",
    client="editors that cut text between UTF-16 units",
    sees="the request fails three times",
)
async def lone_surrogate(target: Target) -> None:
    raw = b'{"model": %s, "max_tokens": 4, "messages": [{"role": "user", "content": "a\\ud83d"}]}'
    reply = await target.post_raw(CHAT, raw % _quoted(target.model))
    expect(reply.status < 500, reply.summary)


@CHAT_GROUP.rule(
    "CHAT-15",
    "A tool's message before any call is no server failure",
    client="agents that cut old turns",
    sees="the request fails three times",
)
async def early_tool_message(target: Target) -> None:
    turns = [{"role": "tool", "tool_call_id": "x", "content": "1"}]
    await _never_5xx(target, [*turns, {"role": "user", "content": "Hi"}])


@CHAT_GROUP.rule(
    "CHAT-16",
    "The old role function is no server failure",
    client="older LangChain agents",
    sees="the request fails three times",
)
async def function_role(target: Target) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "function", "name": "f", "content": "1"}]
    await _never_5xx(target, turns)


@CHAT_GROUP.rule(
    "CHAT-17",
    "A content part of an unknown type is refused",
    client=SDK,
    sees="the part is silently dropped, or three failures",
)
async def unknown_part(target: Target) -> None:
    (await target.post(CHAT, target.chat([{"type": "smell", "smell": "rose"}]))).refused()


@CHAT_GROUP.rule(
    "CHAT-18",
    "A NUL character in the text is no server failure",
    client="scripts that send file contents",
    sees="the request fails three times",
)
async def nul_character(target: Target) -> None:
    reply = await target.post(CHAT, target.chat("a\x00b", max_tokens=4))
    expect(reply.status < 500, reply.summary)


@CHAT_GROUP.rule(
    "CHAT-19",
    "A repeated prompt reports cached tokens",
    client="LiteLLM",
    sees="no figure for cached tokens in cost reports",
    severity="advice",
)
async def cached_tokens(target: Target) -> None:
    body = target.chat("Tell me about this list: " + "apple pear plum " * 40, max_tokens=1)
    (await target.post(CHAT, body)).ok()
    usage = field((await target.post(CHAT, body)).ok(), "usage")
    cached: Any = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    expect(is_count(cached), "no usage.prompt_tokens_details.cached_tokens")
    expect(0 < cached < usage["prompt_tokens"], f"cached_tokens is {cached} on a repeat")


def _quoted(value: str) -> bytes:
    return b'"' + value.encode() + b'"'
