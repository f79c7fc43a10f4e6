"""Each stage of a request's life fails once while eight requests are served together: at most one
of them notices, and it is told so in a well-formed way.

The whole server, with the default model: frontend and engine are in this process, so that the plan
of faults reaches both.
"""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from engine.backends.custom.frameworks import NativeBackend
from engine.core import faults
from engine.core.faults import Fault
from tests.support.fakes.staged_requests import MODEL, staged_body
from tests.support.servers.live_server import LiveServer, live_server, wait_until

NUM_CLIENTS = 8
# A fault there costs nobody anything: it is repeated, or only costs a cache entry.
HARMLESS = ("schedule", "forward", "sample", "wait", "publish")
COSTS_ONE = (
    *("validate", "template", "tokenize", "check_grammar", "submit", "intake"),
    *("allocate", "update", "nonfinite", "detokenize", "parse", "format"),
)
QUICK = ("forward", "tokenize", "update")
POINTS = [
    point if point in QUICK else pytest.param(point, marks=pytest.mark.slow)
    for point in HARMLESS + COSTS_ONE
]
ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server(default_model) -> Iterator[LiveServer]:
    with live_server(NativeBackend(MODEL, in_process=True)) as server:
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 200, 60)
        yield server
        wait_until(lambda: server.services.lifecycle.num_admitted == 0)


async def ask(client: httpx.AsyncClient, number: int, stream: bool) -> str | None:
    """What was answered; None where the answer is a well-formed failure."""
    reply = await client.post("/v1/chat/completions", json=staged_body(number, stream=stream))
    if reply.status_code != 200:
        assert reply.status_code == 500 and set(reply.json()["error"]) == ERROR_KEYS
        return None
    if not stream:
        return json.dumps(without_ids(reply.json()["choices"][0]["message"]))
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    if events[-1] != "[DONE]":
        assert set(json.loads(events[-1])["error"]) == ERROR_KEYS and "[DONE]" not in events
        return None
    deltas = [json.loads(event)["choices"] for event in events[:-1]]
    return json.dumps([without_ids(choices[0]["delta"]) for choices in deltas if choices])


def without_ids(message: dict) -> dict:
    for call in message.get("tool_calls") or ():
        call.pop("id", None)
    return message


async def ask_all(server: LiveServer, stream: bool) -> list[str | None]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        return await asyncio.gather(*(ask(client, n, stream) for n in range(NUM_CLIENTS)))


@pytest.fixture(scope="module")
def expected(server: LiveServer) -> dict[bool, list[str | None]]:
    answers = {stream: asyncio.run(ask_all(server, stream)) for stream in (False, True)}
    assert None not in answers[False] + answers[True]
    return answers


@pytest.mark.parametrize("point", POINTS)
def test_a_failing_engine_stage_fails_at_most_one_request(server: LiveServer, expected, point: str):
    action = "mark" if point == "nonfinite" else "raise"
    stream = point not in ("validate", "template", "forward", "update")
    with faults.planned(Fault(point, action, at=2)) as plan:
        answers = asyncio.run(ask_all(server, stream))
    assert plan.num_strikes == 1, "the stage was not passed"
    failed = [n for n in range(NUM_CLIENTS) if answers[n] is None]
    assert len(failed) == (point in COSTS_ONE)
    for number in set(range(NUM_CLIENTS)) - set(failed):
        assert answers[number] == expected[stream][number]
    wait_until(lambda: server.services.lifecycle.num_admitted == 0)
    wait_until(lambda: server.backend.stats().num_referenced_blocks == 0)
    assert httpx.get(server.url + "/health").status_code == 200
