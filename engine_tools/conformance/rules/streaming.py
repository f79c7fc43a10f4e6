"""Rules for streamed chat answers: what each chunk must contain, and how a stream ends.

Many clients parse streams with their own few lines of code and read `choices[0]` unconditionally.
An unusual order of chunks breaks them, while an unusual field would not.
"""

from collections import Counter
from typing import Any

from engine_tools.conformance.expect import RuleSkipped, expect, field, short
from engine_tools.conformance.rule import Group
from engine_tools.conformance.rules.chat import FINISH_REASONS, check_usage
from engine_tools.conformance.sse import DONE, SseStream
from engine_tools.conformance.target import CHAT, COMPLETIONS, Target

STREAMING = Group("streaming")
SDK = "openai-python"


def choices(stream: SseStream, index: int = 0) -> list[dict[str, Any]]:
    """The entries of `choices` in all chunks that belong to choice `index`, in order."""
    found = [each for chunk in stream.chunks for each in field(chunk, "choices")]
    return [each for each in found if field(each, "index") == index]


def joined(stream: SseStream, index: int = 0) -> str:
    return "".join(each["delta"].get("content") or "" for each in choices(stream, index))


def reasons(stream: SseStream, index: int = 0) -> list[str]:
    found = [each.get("finish_reason") for each in choices(stream, index)]
    return [reason for reason in found if reason is not None]


async def _cut_stream(target: Target) -> SseStream:
    """A stream that ends because it reached its token limit."""
    body = target.chat("Count from 1 to 100.", max_tokens=3)
    return await target.once("cut stream", lambda: target.stream(CHAT, body))


@STREAMING.rule(
    "SSE-01",
    "A stream has the content type text/event-stream",
    client="Open WebUI",
    sees="the whole answer at once, or raw text in the chat window",
)
async def content_type(target: Target) -> None:
    kind = (await target.plain_stream()).headers.get("content-type", "")
    expect(kind.startswith("text/event-stream"), f"content-type is {short(kind)}")


@STREAMING.rule(
    "SSE-02",
    "A stream forbids caching",
    client="browsers and CDNs between client and server",
    sees="an old answer, or one that arrives at once",
    severity="advice",
)
async def cache_control(target: Target) -> None:
    found = (await target.plain_stream()).headers.get("cache-control", "")
    expect("no-cache" in found or "no-store" in found, f"cache-control is {short(found)}")


@STREAMING.rule(
    "SSE-03",
    "A stream tells nginx not to buffer it",
    client="every client behind nginx",
    sees="nothing for seconds, then many tokens at once",
    severity="advice",
)
async def accel_buffering(target: Target) -> None:
    found = (await target.plain_stream()).headers.get("x-accel-buffering")
    expect(found == "no", f"x-accel-buffering is {short(found)}")


@STREAMING.rule(
    "SSE-04",
    "Every event is one `data:` line and an empty line, in UTF-8",
    client="clients with a line-based reader",
    sees="a JSON error in mid-answer",
)
async def event_format(target: Target) -> None:
    stream = await target.plain_stream()
    expect(not stream.problems, "; ".join(stream.problems[:3]))
    expect(bool(stream.chunks), "no chunks at all")


@STREAMING.rule(
    "SSE-05",
    "The first chunk has the role assistant",
    client="LangChain",
    sees="chunks of an unknown role that don't join to an AIMessage",
)
async def first_role(target: Target) -> None:
    first = field((await target.plain_stream()).chunks, 0, "choices", 0, "delta")
    expect(first.get("role") == "assistant", f"the first delta is {short(first)}")


@STREAMING.rule(
    "SSE-06",
    "The role is sent once",
    client="clients that join deltas key by key",
    sees="a message of the role assistantassistantassistant",
)
async def role_once(target: Target) -> None:
    deltas = [each["delta"] for each in choices(await target.plain_stream())]
    count = sum(delta.get("role") is not None for delta in deltas)
    expect(count <= 1, f"the role is in {count} chunks")


@STREAMING.rule(
    "SSE-07",
    "All chunks have one id, created, model and object",
    client="clients that group chunks by id",
    sees="one answer falls apart into several messages",
)
async def same_envelope(target: Target) -> None:
    chunks = (await target.plain_stream()).chunks
    for name in ("id", "created", "model", "object"):
        values = {field(chunk, name) for chunk in chunks}
        expect(len(values) == 1, f"{name} has {len(values)} values in one stream")
    kind = chunks[0]["object"]
    expect(kind == "chat.completion.chunk", f"object is {short(kind)}")


@STREAMING.rule(
    "SSE-08",
    "Every choice of a chunk has a finish_reason, null until the end",
    client="LangChain",
    sees="a KeyError, or an answer that ends too early",
)
async def finish_is_null(target: Target) -> None:
    found = [field(each, "finish_reason") for each in choices(await target.plain_stream())]
    expect(all(reason is None for reason in found[:-1]), "finish_reason before the last chunk")


@STREAMING.rule(
    "SSE-09",
    "A stream ends with exactly one finish_reason",
    client="OpenClaw and other agents",
    sees="an answer that never seems complete, or tool calls that are lost",
)
async def one_finish(target: Target) -> None:
    found = reasons(await target.plain_stream())
    expect(len(found) == 1, f"{len(found)} finish reasons in one stream")
    expect(found[0] in FINISH_REASONS, f"finish_reason is {short(found[0])}")


@STREAMING.rule(
    "SSE-10",
    "The first chunk is not the last",
    client="Open WebUI",
    sees="an empty answer: reading stops at the first finish_reason",
)
async def finish_not_first(target: Target) -> None:
    found = choices(await target.plain_stream())
    expect(field(found, 0, "finish_reason") is None, "the first chunk has a finish_reason")


@STREAMING.rule(
    "SSE-11",
    "`[DONE]` comes once, and last",
    client=SDK,
    sees="reading goes on until a time-out, or stops too early",
)
async def done_last(target: Target) -> None:
    stream = await target.plain_stream()
    expect(stream.num_done == 1, f"{stream.num_done} [DONE] events")
    expect(stream.events[-1].data == DONE, "something follows [DONE]")


@STREAMING.rule(
    "SSE-12",
    "Without include_usage no chunk has empty choices",
    client="Cline",
    sees="a crash: it indexes choices[0] of every chunk",
)
async def no_empty_choices(target: Target) -> None:
    chunks = (await target.plain_stream()).chunks
    expect(all(field(chunk, "choices") for chunk in chunks), "a chunk has empty choices")


@STREAMING.rule(
    "SSE-13",
    "With include_usage the last chunk has usage and no choices",
    client="LangChain, Letta",
    sees="no usage at all, or a crash on the unexpected shape",
)
async def usage_chunk(target: Target) -> None:
    chunks = (await target.usage_stream()).chunks
    last = field(chunks, -1)
    expect(field(last, "choices") == [], f"its choices are {short(last['choices'])}")
    check_usage(field(last, "usage"))


@STREAMING.rule(
    "SSE-14",
    "With include_usage no earlier chunk has usage",
    client="Letta, LiteLLM",
    sees="tokens are counted twice, or the answer ends too early",
)
async def usage_only_last(target: Target) -> None:
    chunks = (await target.usage_stream()).chunks
    early = [chunk for chunk in chunks[:-1] if chunk.get("usage") is not None]
    expect(not early, f"{len(early)} chunks before the last have usage")


@STREAMING.rule(
    "SSE-15",
    "With include_usage the finish_reason has a chunk of its own before it",
    client="Letta",
    sees="finish_reason and usage merged into one chunk, which it rejects",
)
async def finish_before_usage(target: Target) -> None:
    stream = await target.usage_stream()
    expect(len(reasons(stream)) == 1, f"{len(reasons(stream))} finish reasons")
    before = stream.chunks[-2] if len(stream.chunks) > 1 else {}
    finish = field(before, "choices", 0, "finish_reason")
    expect(finish is not None, "the chunk before the usage has no finish_reason")


@STREAMING.rule(
    "SSE-16",
    "include_usage: false is the same as not asking",
    client="Cline",
    sees="a crash: it indexes choices[0] of every chunk",
)
async def usage_false(target: Target) -> None:
    body = target.chat(stream_options={"include_usage": False}, max_tokens=4)
    stream = await target.stream(CHAT, body)
    expect(all(field(chunk, "choices") for chunk in stream.chunks), "a chunk has empty choices")


@STREAMING.rule(
    "SSE-17",
    "The deltas join to what a whole answer has",
    client="every client",
    sees="missing or doubled text",
)
async def joins(target: Target) -> None:
    whole = field(await target.plain_chat(), "choices", 0, "message", "content")
    streamed = joined(await target.plain_stream())
    if streamed != whole:
        again = (await target.post(CHAT, target.chat())).ok()
        if field(again, "choices", 0, "message", "content") != whole:
            raise RuleSkipped("the same request gives different answers at temperature 0")
    expect(streamed == whole, f"{short(streamed)} streamed, {short(whole)} whole")


@STREAMING.rule(
    "SSE-18",
    "No character is torn between two deltas",
    client="every client, for emoji and many languages",
    sees="replacement characters in the answer",
)
async def whole_characters(target: Target) -> None:
    emoji = "\N{GRINNING FACE}\N{WHITE SMILING FACE}\N{HEAVY BLACK HEART}"
    prompt = f"Repeat this line exactly: {emoji * 4}"
    pieces = [
        each["delta"].get("content") or ""
        for each in choices(await target.stream(CHAT, target.chat(prompt, max_tokens=24)))
    ]
    if "".join(pieces).isascii():
        reply = await target.post(COMPLETIONS, target.completion(emoji * 8, stream=False))
        if reply.status == 200:
            body = target.completion(emoji * 8, max_tokens=24)
            stream = await target.stream(COMPLETIONS, body)
            found = [each for chunk in stream.chunks for each in chunk["choices"]]
            pieces = [each.get("text") or "" for each in found]
    text = "".join(pieces)
    if text.isascii():
        raise RuleSkipped("the model wrote nothing but ASCII")
    expect("\N{REPLACEMENT CHARACTER}" not in text, "a delta has a replacement character")
    torn = [each for each in text if 0xD800 <= ord(each) <= 0xDFFF]
    expect(not torn, "a delta has half a surrogate pair")


@STREAMING.rule(
    "SSE-19",
    "A stop string and its beginning never show in a stream",
    client="Continue",
    sees="the stop string in the user's file",
)
async def stop_hidden(target: Target) -> None:
    whole = field(await target.plain_chat(), "choices", 0, "message", "content")
    if len(whole) < 8:
        raise RuleSkipped("the model's answer is too short to stop in")
    stop = whole[4:8]  # a stop string that probably begins and ends inside tokens
    stream = await target.stream(CHAT, target.chat(stop=[stop]))
    text = joined(stream)
    expect(stop not in text, f"{short(stop)} is in the streamed text")
    expect(text == whole[: whole.index(stop)], f"{short(text)} before {short(stop)}")
    expect(reasons(stream) == ["stop"], f"finish reasons are {reasons(stream)}")


@STREAMING.rule(
    "SSE-20",
    "max_tokens ends a stream with finish_reason length",
    client="agents that continue a cut answer",
    sees="a cut answer that looks complete",
)
async def length(target: Target) -> None:
    stream = await _cut_stream(target)
    expect(reasons(stream) == ["length"], f"finish reasons are {reasons(stream)}")


@STREAMING.rule(
    "SSE-21",
    "n choices in one stream: each with its index, one role and one end",
    client=SDK,
    sees="choices that are mixed up or missing",
)
async def several(target: Target) -> None:
    body = target.chat(n=2, temperature=1, max_tokens=8)
    (await target.post(CHAT, body)).ok_unless_refused("n")
    stream = await target.stream(CHAT, body)
    found = Counter(each["index"] for chunk in stream.chunks for each in chunk["choices"])
    expect(set(found) == {0, 1}, f"indexes in the stream: {sorted(found)}")
    for index in (0, 1):
        roles = [each["delta"].get("role") for each in choices(stream, index)]
        expect(roles[0] == "assistant", f"choice {index} does not begin with its role")
        expect(not any(roles[1:]), f"choice {index} has its role in several chunks")
        count = len(reasons(stream, index))
        expect(count == 1, f"choice {index} has {count} finish reasons")


@STREAMING.rule(
    "SSE-22",
    "The chunk with the finish_reason has no text",
    client="clients that stop reading a chunk at its finish_reason",
    sees="the last word is missing",
    severity="advice",
)
async def finish_is_bare(target: Target) -> None:
    for stream in (await target.plain_stream(), await _cut_stream(target)):
        last = [each for each in choices(stream) if each.get("finish_reason")]
        delta = field(last, 0, "delta")
        expect(not delta.get("content"), f"its delta is {short(delta)}")


@STREAMING.rule(
    "SSE-25",
    "system_fingerprint is the same in all chunks",
    client="clients that compare it to notice another configuration",
    sees="a change of configuration in mid-answer",
    severity="advice",
)
async def same_fingerprint(target: Target) -> None:
    values = {chunk.get("system_fingerprint") for chunk in (await target.plain_stream()).chunks}
    expect(len(values) == 1, f"it has the values {short(values)}")


@STREAMING.rule(
    "SSE-23",
    "stream: null and stream: false give a whole answer",
    client="generated clients that send every field",
    sees="a JSON error on an event stream",
)
async def stream_off(target: Target) -> None:
    for value in (None, False):
        body = (await target.post(CHAT, target.chat(stream=value, max_tokens=1))).ok()
        field(body, "choices", 0, "message")


@STREAMING.rule(
    "SSE-24",
    "Streamed logprobs belong to the streamed text",
    client=SDK,
    sees="missing or misplaced log-probabilities",
)
async def streamed_logprobs(target: Target) -> None:
    body = target.chat(logprobs=True, top_logprobs=1, max_tokens=4)
    (await target.post(CHAT, body)).ok_unless_refused("logprobs")
    stream = await target.stream(CHAT, body)
    entries = [
        entry
        for each in choices(stream)
        for entry in ((each.get("logprobs") or {}).get("content") or [])
    ]
    expect(len(entries) == 4, f"{len(entries)} logprobs for 4 tokens")
    tokens = "".join(field(entry, "token") for entry in entries)
    expect(tokens == joined(stream), f"tokens {short(tokens)}, text {short(joined(stream))}")
