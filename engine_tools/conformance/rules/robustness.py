"""Rules for what a server must survive: clients that disconnect, many clients at once, malicious
bodies.

These rules run last, because they could leave a weak server in a bad state.
"""

import asyncio

from engine_tools.conformance.expect import RuleFailed, RuleSkipped, expect, field
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import CHAT, Target

ROBUSTNESS = Group("robustness")
NUM_TOGETHER = 6


@ROBUSTNESS.rule(
    "ROB-01",
    "There is a health endpoint",
    client="container platforms, load balancers",
    sees="a server that never counts as ready",
)
async def health(target: Target) -> None:
    reply = await target.get("/health")
    expect(reply.status == 200, f"/health is {reply.summary}")


@ROBUSTNESS.rule(
    "ROB-02",
    "A client that leaves in mid-stream does no harm",
    client="Open WebUI's stop button",
    sees="later answers are slow or fail",
)
async def disconnect(target: Target) -> None:
    body = target.chat("Count from 1 to 1000.", max_tokens=200, stream=True)
    for _ in range(3):
        async with target.client.stream("POST", CHAT, json=body) as answer:
            if answer.status_code != 200:
                raise RuleFailed(f"the stream is HTTP {answer.status_code}")
            async for _line in answer.aiter_lines():
                break
    after = (await target.post(CHAT, target.chat(max_tokens=4))).ok()
    field(after, "choices", 0, "message")


@ROBUSTNESS.rule(
    "ROB-03",
    "Several streams at once are each complete",
    client="every client with more than one user",
    sees="answers that are mixed up or cut",
)
async def together(target: Target) -> None:
    streams = await asyncio.gather(
        *(target.stream(CHAT, target.chat(f"Count to {n}.")) for n in range(NUM_TOGETHER))
    )
    ids = {field(stream.chunks, 0, "id") for stream in streams}
    expect(len(ids) == NUM_TOGETHER, f"{len(ids)} ids in {NUM_TOGETHER} streams")
    for stream in streams:
        expect(stream.num_done == 1, "a stream has no end")
        expect({chunk["id"] for chunk in stream.chunks} <= ids, "chunks of another answer")
        expect(len({chunk["id"] for chunk in stream.chunks}) == 1, "chunks of another answer")


@ROBUSTNESS.rule(
    "ROB-04",
    "Deeply nested JSON is no server failure",
    client="every client of the same server",
    sees="a request anyone can send ends in a crash",
)
async def nested(target: Target) -> None:
    deep = b"[" * 20_000 + b"]" * 20_000
    raw = b'{"model": "x", "messages": ' + deep + b"}"
    reply = await target.post_raw(CHAT, raw)
    expect(reply.status < 500, f"nested JSON is answered with {reply.summary}")
    expect(reply.status >= 400, "nested JSON is accepted")


@ROBUSTNESS.rule(
    "ROB-05",
    "NaN and Infinity, which JSON has not, are no server failure",
    client="clients in Python, whose json writes them",
    sees="the request fails three times",
)
async def not_a_number(target: Target) -> None:
    for value in (b"NaN", b"Infinity", b"1e999"):
        message = b'[{"role": "user", "content": "Hi"}]'
        start = b'{"model": "' + target.model.encode() + b'", "max_tokens": 1, "temperature": '
        reply = await target.post_raw(CHAT, start + value + b', "messages": ' + message + b"}")
        expect(reply.status < 500, f"temperature {value.decode()}: {reply.summary}")


@ROBUSTNESS.rule(
    "ROB-06",
    "An integer of 5,000 digits is no server failure",
    client="every client of the same server",
    sees="a request anyone can send ends in a crash",
)
async def huge_integer(target: Target) -> None:
    raw = b'{"model": "x", "messages": [], "seed": ' + b"9" * 5_000 + b"}"
    reply = await target.post_raw(CHAT, raw)
    expect(reply.status < 500, reply.summary)


@ROBUSTNESS.rule(
    "ROB-07",
    "JSON sent as text/plain is answered or refused",
    client="curl -d without a header",
    sees="a server failure instead of an answer or a 415",
)
async def content_type(target: Target) -> None:
    headers = {"content-type": "text/plain"}
    reply = await target.post(CHAT, target.chat(max_tokens=1), headers=headers)
    expect(reply.status < 500, reply.summary)


@ROBUSTNESS.rule(
    "ROB-08",
    "A server that is full says when to come back",
    client="openai-python",
    sees="blind retries after half a second, which keep it full",
)
async def retry_after(target: Target) -> None:
    full = [reply for reply in target.seen if reply.status in (429, 503)]
    if not full:
        raise RuleSkipped("no 429 or 503 was seen in this run")
    missing = [r for r in full if not {"retry-after", "retry-after-ms"} & set(r.headers)]
    expect(not missing, f"{len(missing)} of {len(full)} had no retry-after")


@ROBUSTNESS.rule(
    "ROB-09",
    "The server still answers after everything above",
    client="every client",
    sees="a server that has to be restarted",
)
async def still_there(target: Target) -> None:
    body = (await target.post(CHAT, target.chat(max_tokens=2))).ok()
    field(body, "choices", 0, "message", "content")
