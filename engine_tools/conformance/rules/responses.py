"""Rules for /v1/responses: responses are created, streamed as typed events, stored, continued and
deleted.
"""

from typing import Any

from engine_tools.conformance.expect import RuleSkipped, expect, field, is_count, items, short, text
from engine_tools.conformance.rule import Group
from engine_tools.conformance.rules.structured import COLOUR, PROMPT, is_colour
from engine_tools.conformance.rules.structured import parsed as parsed_json
from engine_tools.conformance.sse import SseStream
from engine_tools.conformance.target import QUESTION, Target

PATH = "/v1/responses"
SDK = "openai-python"
AGENTS = "openai-agents, Codex"


def body(target: Target, value: Any = QUESTION, **fields: Any) -> dict[str, Any]:
    plain = {"model": target.model, "input": value, "max_output_tokens": 24, "temperature": 0}
    return plain | fields


async def _missing(target: Target) -> str | None:
    return await target.lacks(PATH, body(target, max_output_tokens=16))


RESPONSES = Group("responses", _missing)


async def _plain(target: Target) -> Any:
    async def ask() -> Any:
        return (await target.post(PATH, body(target))).ok()

    return await target.once("response", ask)


async def _streamed(target: Target) -> SseStream:
    return await target.once("response stream", lambda: target.stream(PATH, body(target)))


def output_text(response: Any) -> str:
    """What OpenAI's SDK returns as `output_text`: the joined texts of all output messages."""
    messages = [each for each in items(response, "output") if each.get("type") == "message"]
    parts = [part for message in messages for part in field(message, "content")]
    return "".join(part["text"] for part in parts if part.get("type") == "output_text")


async def _stored(target: Target, **fields: Any) -> Any:
    """Create a response, and check that the server reports it as stored."""
    response = (await target.post(PATH, body(target, **{"store": True} | fields))).ok()
    if response.get("store") is False:
        raise RuleSkipped("the server says that it does not store")
    return response


@RESPONSES.rule(
    "RSP-01",
    "An answer has id, object, status, model and output",
    client=SDK,
    sees="None in fields that are declared as present",
)
async def shape(target: Target) -> None:
    response = await _plain(target)
    text(response, "id")
    text(response, "model")
    expect(field(response, "object") == "response", f"object is {short(response['object'])}")
    expect(field(response, "status") in ("completed", "incomplete"), short(response["status"]))
    expect(field(response, "created_at") is not None, "created_at is null")


@RESPONSES.rule(
    "RSP-02",
    "Its text is output_text in a message of the assistant",
    client=SDK,
    sees="an empty `output_text`",
)
async def has_text(target: Target) -> None:
    response = await _plain(target)
    expect(bool(output_text(response)), f"output is {short(response['output'])}")
    message = next(each for each in response["output"] if each["type"] == "message")
    expect(field(message, "role") == "assistant", f"role is {short(message['role'])}")
    text(message, "id")


@RESPONSES.rule(
    "RSP-03", "usage counts input and output and adds up", client="LiteLLM", sees="wrong cost"
)
async def usage(target: Target) -> None:
    found = field(await _plain(target), "usage")
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        expect(is_count(field(found, name)), f"usage.{name} is {short(found[name])}")
    total = found["input_tokens"] + found["output_tokens"]
    expect(found["total_tokens"] == total, f"{found['total_tokens']} in all, not {total}")


@RESPONSES.rule(
    "RSP-04",
    "A limit that is reached gives status incomplete with its reason",
    client=SDK,
    sees="a cut answer that looks complete",
)
async def incomplete(target: Target) -> None:
    request = body(target, "Count from 1 to 100.", max_output_tokens=16)
    response = (await target.post(PATH, request)).ok()
    expect(field(response, "status") == "incomplete", f"status is {short(response['status'])}")
    reason = field(response, "incomplete_details", "reason")
    expect(reason == "max_output_tokens", f"the reason is {short(reason)}")


@RESPONSES.rule(
    "RSP-05",
    "Input as a list of messages is accepted",
    client=AGENTS,
    sees="a 400 on the first request",
)
async def listed_input(target: Target) -> None:
    part = {"type": "input_text", "text": QUESTION}
    message = {"type": "message", "role": "user", "content": [part]}
    response = (await target.post(PATH, body(target, [message]))).ok()
    mine, theirs = field(response, "usage", "input_tokens"), (await _plain(target))["usage"]
    expect(mine == theirs["input_tokens"], f"{mine} tokens as a list, {theirs['input_tokens']} not")


@RESPONSES.rule(
    "RSP-06",
    "instructions count",
    client=AGENTS,
    sees="the agent's instructions are silently ignored",
)
async def instructions(target: Target) -> None:
    short_one = (await target.post(PATH, body(target, instructions="Be terse."))).ok()
    long_one = (await target.post(PATH, body(target, instructions="Be " + "very " * 20))).ok()
    mine, theirs = short_one["usage"]["input_tokens"], long_one["usage"]["input_tokens"]
    expect(theirs > mine + 10, "longer instructions make no longer prompt")


@RESPONSES.rule(
    "RSP-11",
    "Stream: it begins with response.created and ends with how it ended",
    client=SDK,
    sees="a stream without a final response",
)
async def stream_order(target: Target) -> None:
    stream = await _streamed(target)
    kinds = [text(chunk, "type") for chunk in stream.chunks]
    expect(kinds[0] == "response.created", f"it begins with {short(kinds[0])}")
    endings = ("response.completed", "response.incomplete")
    expect(kinds[-1] in endings, f"it ends with {short(kinds[-1])}")
    field(stream.chunks[-1], "response", "usage", "total_tokens")


@RESPONSES.rule(
    "RSP-12",
    "Stream: event names are the types, sequence numbers count up",
    client=SDK,
    sees="events that are dropped",
)
async def stream_names(target: Target) -> None:
    stream = await _streamed(target)
    for event, chunk in zip(stream.events, stream.chunks, strict=False):
        named = event.name in (None, chunk.get("type"))
        expect(named, f"event {short(event.name)} has the type {short(chunk.get('type'))}")
    numbers = [field(chunk, "sequence_number") for chunk in stream.chunks]
    expect(numbers == sorted(set(numbers)), f"sequence numbers: {short(numbers)}")


@RESPONSES.rule(
    "RSP-13",
    "Stream: deltas join to the text of the final response",
    client=SDK,
    sees="missing or doubled text",
)
async def stream_text(target: Target) -> None:
    chunks = (await _streamed(target)).chunks
    deltas = [c["delta"] for c in chunks if c.get("type") == "response.output_text.delta"]
    final = output_text(field(chunks, -1, "response"))
    expect("".join(deltas) == final, f"{short(''.join(deltas))} streamed, {short(final)} at last")
    expect(bool(final), "there is no text")


@RESPONSES.rule(
    "RSP-14",
    "Stream: items and parts are added before their deltas and done after them",
    client=SDK,
    sees="an IndexError in the stream helper",
)
async def stream_items(target: Target) -> None:
    kinds = [chunk.get("type") for chunk in (await _streamed(target)).chunks]
    wanted = [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    places = [kinds.index(kind) if kind in kinds else -1 for kind in wanted]
    missing = [kind for kind, place in zip(wanted, places, strict=True) if place < 0]
    expect(not missing, f"missing: {', '.join(missing)}")
    expect(places == sorted(places), f"the order is {short(kinds)}")


@RESPONSES.rule(
    "RSP-21",
    "A stored response can be fetched",
    client=SDK,
    sees="NotFoundError for an id it was just given",
)
async def retrieve(target: Target) -> None:
    response = await _stored(target)
    again = (await target.get(f"{PATH}/{response['id']}")).ok()
    expect(field(again, "id") == response["id"], f"id is {short(again['id'])}")
    expect(output_text(again) == output_text(response), "the text is another")


@RESPONSES.rule(
    "RSP-22",
    "A deleted response is gone",
    client=SDK,
    sees="data that stays although it was deleted",
)
async def delete(target: Target) -> None:
    response = await _stored(target)
    (await target.delete(f"{PATH}/{response['id']}")).ok()
    reply = await target.get(f"{PATH}/{response['id']}")
    expect(reply.status == 404, f"after deletion: {reply.summary}")


@RESPONSES.rule(
    "RSP-23",
    "previous_response_id continues the conversation",
    client=AGENTS,
    sees="an agent that forgets everything between turns",
)
async def previous(target: Target) -> None:
    first = await _stored(target)
    more = body(target, "And of Italy?", previous_response_id=first["id"])
    second = (await target.post(PATH, more)).ok()
    alone = (await target.post(PATH, body(target, "And of Italy?"))).ok()
    count, bare = field(second, "usage", "input_tokens"), field(alone, "usage", "input_tokens")
    expect(count > bare + 5, f"{count} input tokens with history, {bare} without")


@RESPONSES.rule(
    "RSP-24",
    "An unknown previous_response_id is refused",
    client=SDK,
    sees="an answer without the history, or three failures",
)
async def unknown_previous(target: Target) -> None:
    reply = await target.post(PATH, body(target, previous_response_id="resp_no_such_response"))
    if reply.status != 404:
        reply.refused()
    text(reply.error, "message")


@RESPONSES.rule(
    "RSP-25",
    "store: false keeps nothing",
    client="clients with private data",
    sees="data that is kept although it must not be",
)
async def not_stored(target: Target) -> None:
    response = (await target.post(PATH, body(target, store=False))).ok()
    reply = await target.get(f"{PATH}/{field(response, 'id')}")
    expect(reply.status == 404, f"it can be fetched: {reply.summary}")


@RESPONSES.rule(
    "RSP-26",
    "An unknown id is 404 with an error object",
    client=SDK,
    sees="a wrong exception, or one without a message",
)
async def unknown_id(target: Target) -> None:
    reply = await target.get(f"{PATH}/resp_no_such_response")
    expect(reply.status == 404, f"answered with {reply.summary}")
    text(reply.error, "message")


@RESPONSES.rule(
    "RSP-31",
    "A required tool gives a function_call item",
    client=AGENTS,
    sees="prose where the agent needs a call",
)
async def tool(target: Target) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}]
    request = body(target, "The weather in Paris?", tools=tools, tool_choice="required")
    reply = await target.post(PATH, request | {"max_output_tokens": 160})
    response = reply.ok_unless_refused("tool")
    calls = [each for each in items(response, "output") if each.get("type") == "function_call"]
    expect(bool(calls), f"output is {short(response['output'])}")
    expect(text(calls[0], "name") == "get_weather", f"called: {short(calls[0]['name'])}")
    text(calls[0], "call_id")
    value = parsed_json(field(calls[0], "arguments"))
    expect(value in ({"city": "Paris"}, {"city": "Rome"}), f"arguments: {short(value)}")


@RESPONSES.rule(
    "RSP-32",
    "text.format json_schema is followed",
    client="openai-python's responses.parse()",
    sees="a validation error instead of an object",
)
async def structured(target: Target) -> None:
    shape = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    request = body(target, PROMPT, text={"format": shape}, max_output_tokens=200)
    response = (await target.post(PATH, request)).ok_unless_refused("text")
    if response["status"] == "incomplete":
        raise RuleSkipped("the model did not come to an end within 200 tokens")
    value = parsed_json(output_text(response))
    expect(is_colour(value), f"{short(value)} does not follow the schema")


@RESPONSES.rule(
    "RSP-33",
    "reasoning is accepted or refused, never a server failure",
    client="Codex",
    sees="every request fails: it always sends reasoning",
)
async def reasoning(target: Target) -> None:
    reply = await target.post(PATH, body(target, reasoning={"effort": "low"}))
    expect(reply.status < 500, reply.summary)


@RESPONSES.rule(
    "RSP-34",
    "A request without input is refused",
    client=SDK,
    sees="an answer to nothing, or three failures",
)
async def no_input(target: Target) -> None:
    (await target.post(PATH, {"model": target.model})).refused()


@RESPONSES.rule(
    "RSP-35",
    "An unknown model is 404",
    client=SDK,
    sees="an answer of another model",
)
async def unknown_model(target: Target) -> None:
    reply = await target.post(PATH, body(target, model="no-such/model-anywhere"))
    expect(reply.status == 404, f"an unknown model is answered with {reply.summary}")
