"""Streams that are written where their tokens arrive, and clients that block them."""

import asyncio
import json
import random
from collections.abc import AsyncIterator

import pytest

from engine.backends.base import EventFeed, EventSink
from engine.core.interfaces.backend import Event, FinishEvent, TextEvent, UsageEvent
from engine.servers.http.protocol import with_direct_body
from engine.servers.http.request_log import RequestRecord
from engine.servers.openai.format import ChatStream, Envelope
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.sse import EventStream

NUM_WORDS = 60


class Pushed(EventFeed):
    """Events that the test pushes, as an engine's deltas are."""

    def __init__(self) -> None:
        self.sink: EventSink | None = None
        self._is_over = asyncio.Event()

    async def feed(self, sink: EventSink) -> None:
        self.sink = sink
        await self._is_over.wait()
        sink(UsageEvent(prompt_tokens=1, completion_tokens=NUM_WORDS, cached_tokens=0))

    def end(self) -> None:
        self._is_over.set()

    async def __anext__(self) -> Event:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        pass


class Connection:
    """What a client has got so far. While it is paused, nothing can be written."""

    def __init__(self) -> None:
        self.body = b""
        self.num_direct = self.num_sent = 0
        self._is_open = asyncio.Event()
        self._is_open.set()

    def pause(self, is_paused: bool) -> None:
        (self._is_open.clear if is_paused else self._is_open.set)()

    async def send(self, message: dict) -> None:
        await self._is_open.wait()
        self.num_sent += 1
        self.body += message.get("body", b"")

    def write(self, body: bytes) -> bool:
        if not self._is_open.is_set():
            return False
        self.num_direct += 1
        self.body += body
        return True


async def receive() -> dict:
    await asyncio.Event().wait()
    raise AssertionError


def start(connection: Connection, source: AsyncIterator[Event]) -> asyncio.Task[None]:
    pump = EventPump(1, choices_per_source=1, timeout_s=None, on_tokens=lambda *_: None)
    pump.read([source])
    stream = EventStream(pump, ChatStream(Envelope("id", 1, "model", "fp"), 1, False))
    record = RequestRecord("request", send=connection.send)
    scope = with_direct_body({"state": {"record": record}}, connection)
    return asyncio.create_task(stream(scope, receive, connection.send))


def text_of(body: bytes) -> str:
    blocks = body.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


@pytest.mark.parametrize("seed", range(20))
async def test_streamed_text_stays_in_order_whenever_the_client_blocks(seed: int) -> None:
    rng = random.Random(seed)
    source, connection = Pushed(), Connection()
    writing = start(connection, source)
    while source.sink is None:
        await asyncio.sleep(0)
    for index in range(NUM_WORDS):
        source.sink(TextEvent(0, f"{index} ", 1))
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.5:
                connection.pause(rng.random() < 0.5)
            else:
                await asyncio.sleep(0)
    source.sink(FinishEvent(0, "length"))
    source.end()
    connection.pause(False)
    await writing
    assert text_of(connection.body) == "".join(f"{index} " for index in range(NUM_WORDS))


async def test_direct_writes_to_a_reading_client_wake_no_task() -> None:
    source, connection = Pushed(), Connection()
    writing = start(connection, source)
    while source.sink is None:
        await asyncio.sleep(0)
    source.sink(TextEvent(0, "first ", 1))
    while b"first" not in connection.body:
        await asyncio.sleep(0)
    for _ in range(NUM_WORDS):
        source.sink(TextEvent(0, "more ", 1))
    assert connection.body.count(b"more") == connection.num_direct == NUM_WORDS
    source.sink(FinishEvent(0, "length"))
    source.end()
    await writing
    assert text_of(connection.body) == "first " + "more " * NUM_WORDS
