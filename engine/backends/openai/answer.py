"""The events of one request to a server. They can be read with `async for`, or pushed to a
function. Pushed events are delivered in the same call in which their bytes arrive.
"""

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec

from engine.backends.base import EventSink, GeneratedFeed
from engine.backends.openai.failures import error_of
from engine.backends.openai.http_client import MAX_BODY_BYTES, Receiver, TransportError
from engine.backends.openai.reader import AnswerReader, Expected
from engine.core.errors import UnavailableError
from engine.core.interfaces.backend import Event, UsageEvent

MAX_EVENT_BYTES = 16 * 2**20


class EventLines:
    """Parser of server-sent events. `push` returns the data of all events that became complete."""

    def __init__(self) -> None:
        self._rest = b""  # incomplete line
        self._data: list[bytes] = []  # data lines of the incomplete event
        self._num_bytes = 0

    def push(self, piece: bytes) -> list[bytes]:
        text = self._rest + piece
        if b"\r" in text:
            text = self._with_line_feeds(text)
        lines = text.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._num_bytes += len(line)
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._num_bytes = 0
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise UnavailableError("The model's server sent an event that is too large.")
        return events

    def _with_line_feeds(self, text: bytes) -> bytes:
        """Convert line ends to LF. A CR at the end of the text stays, because an LF may follow."""
        ends_open = text.endswith(b"\r")
        body = text[:-1] if ends_open else text
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if ends_open else b"")


_DONE = b"[DONE]"


class AnswerReceiver(Receiver[UsageEvent]):
    """Converts the bytes of an answer to events. The answer may be a stream or one JSON object.
    `done` gets the usage when the answer is complete.
    """

    def __init__(self, expected: Expected, sink: EventSink) -> None:
        super().__init__()
        self._expected = expected
        self._sink = sink
        self._began_at = time.monotonic()
        self._lines = EventLines()
        self._reader: AnswerReader | None = None  # set for a successful answer
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._is_stream = False
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers
        if 200 <= status < 300:
            self._reader = AnswerReader(self._expected, self._sink, self._began_at)
            kind = headers.get(b"content-type", b"").lower()
            self._is_stream = kind.startswith(b"text/event-stream")

    def body(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            if self._is_stream:
                self._read(self._lines.push(data))
            else:
                self._collect(data)
        except Exception as error:  # must not reach the connection; awaiting `done` raises it
            self.fail(error)

    def end(self) -> None:
        if self.done.done():
            return
        whole = b"".join(self._pieces)
        try:
            if self._reader is None:
                raise error_of(self._status, self._headers, whole, self._expected.grammar_param)
            if not self._is_stream:
                self._reader.push(whole)
            self._finish(self._reader)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Handle an error. If the connection broke after all choices had ended, the answer still
        counts as complete.
        """
        reader, is_lost = self._reader, isinstance(error, TransportError)
        if is_lost and reader is not None and reader.is_finished and not self.done.done():
            self._finish(reader)
        super().fail(error)

    def _read(self, events: Sequence[bytes]) -> None:
        reader = self._reader
        assert reader is not None
        for data in events:
            if data == _DONE:
                self._finish(reader)
                return
            reader.push(data)
        if reader.was_cut:
            self.is_cut = True
            self._finish(reader)

    def _finish(self, reader: AnswerReader) -> None:
        self.done.set_result(reader.end())

    def _collect(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BODY_BYTES:
            raise TransportError("its answer is too large")
        self._pieces.append(data)


class PushedEvents(GeneratedFeed):
    """Base class of streams that push their events. Adds reading with `async for`."""

    @abstractmethod
    async def feed(self, sink: EventSink) -> None: ...

    async def _read(self) -> AsyncGenerator[Event, None]:
        arrived: deque[Event] = deque()
        wake = asyncio.Event()

        def push(event: Event) -> None:
            arrived.append(event)
            wake.set()

        feeding = asyncio.create_task(self.feed(push))
        feeding.add_done_callback(lambda _: wake.set())
        try:
            while not feeding.done() or arrived:
                while arrived:
                    yield arrived.popleft()
                if not feeding.done():
                    await wake.wait()
                    wake.clear()
            await feeding
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


class RemoteAnswer(PushedEvents):
    """The answer of another server. `run` sends the request, pushes all events except the usage,
    and returns the usage.
    """

    def __init__(self, run: Callable[[EventSink], Awaitable[UsageEvent]]) -> None:
        super().__init__()
        self._run = run

    async def feed(self, sink: EventSink) -> None:
        sink(await self._run(sink))


async def run_side_by_side(
    runs: Sequence[Callable[[EventSink], Awaitable[UsageEvent]]], sink: EventSink
) -> UsageEvent:
    """Generate several choices as separate requests. The tokens of their common prompt are counted
    once.
    """

    def push(choice: int) -> EventSink:
        return lambda event: sink(
            event
            if isinstance(event, UsageEvent)
            else msgspec.structs.replace(event, choice=choice)
        )

    tasks = [asyncio.ensure_future(run(push(choice))) for choice, run in enumerate(runs)]
    try:
        usages = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return UsageEvent(
        prompt_tokens=usages[0].prompt_tokens,
        completion_tokens=sum(each.completion_tokens for each in usages),
        cached_tokens=usages[0].cached_tokens,
        prefill_s=min(each.prefill_s for each in usages),
        decode_s=max(each.decode_s for each in usages),
        reasoning_tokens=sum(each.reasoning_tokens for each in usages),
    )
