"""Server-sent events: writes a stream of events to the socket.

If the backend refuses a request, the client should get an HTTP error. But headers should not wait
for a long prefill. So the server sends them when the engine begins with the request, or with the
first event. A backend that does not report when it begins has `ACCEPT_WAIT_S` seconds to refuse the
request, after it has checked the prompt. If nothing is sent for a while after the headers, SSE
comments keep the connection alive. Each token is sent in its own SSE event.
Only if a write blocks because the client is slow, the events that arrive meanwhile are merged. A
stream ends either with the closing bytes of its format or with an error event.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    UsageEvent,
)
from engine.servers.http.errors import ClientDisconnectedError, error_body, opaque_error
from engine.servers.http.protocol import DirectBody, direct_body
from engine.servers.http.request_log import record_of
from engine.servers.serving.event_pump import EventPump, OutputEvent

logger = logging.getLogger(__name__)

ACCEPT_WAIT_S = 1.0
# Max seconds until the backend has checked a prompt. Tokenizing a prompt of megabytes takes
# seconds.
CHECK_WAIT_S = 30.0
KEEP_ALIVE_S = 15.0
# A client that reads nothing for this many seconds is disconnected.
STALL_S = 60.0

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class StreamFormat(Protocol):
    """Encodes the events of a generation as server-sent events, or as lines, of one API. Each
    method returns whole SSE events or lines.
    """

    def opening(self) -> bytes: ...

    def chunk(self, event: OutputEvent) -> bytes: ...

    def closing(self, usage: UsageEvent) -> bytes:
        """The last bytes of a successful stream, including the API's end marker if it has one."""
        ...

    def failure(self, error: EngineError) -> bytes:
        """The last bytes of a failed stream: an error event."""
        ...


class StalledClientError(ClientDisconnectedError):
    """The client stopped reading. This error is only logged, because the client can't receive
    it.
    """

    code = "CLIENT_STALLED"


class _SilenceTimer:
    """Calls `callback` whenever `writer` has written nothing for `seconds`."""

    def __init__(self, writer: "_Writer", seconds: float, callback: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._seconds = seconds
        self._callback = callback
        self._fired_at = self._loop.time()
        self._handle = self._loop.call_later(seconds, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        now = self._loop.time()
        left = max(self._writer.written_at, self._fired_at) + self._seconds - now
        if left <= 0:
            self._callback()
            self._fired_at = now
            left = self._seconds
        self._handle = self._loop.call_later(left, self._fire)


class EventStream(Response):
    """A response that streams the events of an `EventPump`, and closes this pump at the end."""

    media_type = "text/event-stream"
    HEADERS: ClassVar = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    keep_alive = KEEP_ALIVE

    def __init__(self, pump: EventPump, format: StreamFormat, *, merges: bool = True) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(self.HEADERS)
        self._pump = pump
        self._format = format
        self._merges = merges  # whether events are merged for a slow client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Resuming a task passes through its whole chain of awaits. A separate task has a shorter
        # chain, without the application's layers, which saves time for each token.
        await asyncio.create_task(self._run(scope, send))

    async def _run(self, scope: Scope, send: Send) -> None:
        record = record_of(scope)
        record.is_stream = True
        writer = _Writer(send, record.send or send, self._pump, direct_body(scope))
        try:
            await self._respond(writer)
        except EngineError as error:
            self._pump.fail(error)  # this has no effect if the pump itself failed
            record.error_code, record.error_message = error.error_code, error.message
        finally:
            writer.close()
            await self._pump.close()

    async def _respond(self, writer: "_Writer") -> None:
        """Write the whole stream. If the stream fails, send an error event and raise the error. If
        the client has disconnected, only raise.
        """
        await writer.start(self.raw_headers)
        try:
            await self._stream(writer)
        except ClientDisconnectedError:
            raise  # without a final chunk, the HTTP server closes the connection
        except EngineError as error:
            await writer.write(self._format.failure(error), more=False)
            raise
        except Exception as bug:
            logger.exception("A stream could not be written.")
            opaque = opaque_error()
            await writer.write(self._format.failure(opaque), more=False)
            raise opaque from bug

    async def _stream(self, writer: "_Writer") -> None:
        pump, format = self._pump, self._format
        chunk = format.chunk
        head = format.opening()
        if not pump.has_pending:
            await writer.write(head)
            head = b""
        is_slow = False
        while (events := await pump.take()) != []:
            if events is None:
                await writer.write(self.keep_alive)
                continue
            if is_slow:
                events = coalesce(events)
            await writer.write(head + b"".join([chunk(event) for event in events]))
            head = b""
            # A write that does not block never yields to the event loop. So if events have arrived
            # since `take`, the write blocked.
            is_slow = self._merges and pump.has_pending
            if not is_slow and writer.can_write_at_once and not pump.joins_ends:
                pump.write_at_once = lambda event: writer.write_at_once(chunk(event))
        await writer.write(format.closing(pump.usage), more=False)


class LineStream(EventStream):
    """A stream of lines, each of which is a JSON object."""

    media_type = "application/x-ndjson"
    keep_alive = b" "  # JSON allows spaces before an object; clients parse an empty line as JSON


class _Writer:
    """Writes chunks to the client. After `KEEP_ALIVE_S` without a write, it makes the stream write
    a comment, by waking the pump. It also detects a client that stopped reading.

    `send_chunk` sends everything after the response headers. It bypasses the application's ASGI
    layers, which only need the headers. `direct` writes without a coroutine, if the connection can.
    """

    def __init__(
        self, send: Send, send_chunk: Send, pump: EventPump, direct: DirectBody | None
    ) -> None:
        self._send = send
        self._send_chunk = send_chunk
        self._direct = direct
        self._is_sending = False
        self._task = asyncio.current_task()
        self._is_stuck = False
        self.written_at = 0.0  # start of the last write, in event-loop time
        self._time = asyncio.get_running_loop().time
        self._silence = _SilenceTimer(self, KEEP_ALIVE_S, pump.nudge)
        # A comment is written at least every KEEP_ALIVE_S. So if no write has started for STALL_S,
        # the last write is blocked.
        self._stall = _SilenceTimer(self, STALL_S, self._give_up)

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._guarded(self._send, start)

    async def write(self, body: bytes, more: bool = True) -> None:
        if body:
            chunk = {"type": "http.response.body", "body": body, "more_body": more}
            await self._guarded(self._send_chunk, chunk)

    @property
    def can_write_at_once(self) -> bool:
        return self._direct is not None

    def write_at_once(self, body: bytes) -> bool:
        """Write a chunk without waiting. Returns False if another write is not done, or if the
        client reads too slowly.
        """
        if self._is_sending or self._direct is None:
            return False
        if body and not self._direct.write(body):
            return False
        self.written_at = self._time()
        return True

    def close(self) -> None:
        self._silence.cancel()
        self._stall.cancel()

    async def _guarded(self, send: Send, message: Message) -> None:
        self.written_at = self._time()
        self._is_sending = True
        try:
            await send(message)
            self._is_sending = False
        except asyncio.CancelledError:
            if not self._is_stuck or self._task is None or self._task.uncancel() > 0:
                raise
            raise StalledClientError("The client has stopped reading.") from None

    def _give_up(self) -> None:
        if self._task is not None and not self._is_stuck:
            self._is_stuck = True
            self._task.cancel()


def error_event(error: EngineError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


async def answer_streaming(
    pump: EventPump, format: StreamFormat, kind: type[EventStream] = EventStream
) -> Response:
    """Start a streaming response. If the backend refuses the request before it begins, this raises
    before any header is sent, so the client gets an HTTP error.
    """
    await pump.begun(CHECK_WAIT_S, ACCEPT_WAIT_S)
    return kind(pump, format)


async def answer_counted(
    pump: EventPump,
    backend: InferenceBackend,
    make_format: Callable[[list[int]], StreamFormat],
) -> Response:
    """Like `answer_streaming`, for a format that needs the number of tokens of each prompt."""
    await pump.begun(CHECK_WAIT_S, ACCEPT_WAIT_S)
    return EventStream(pump, make_format(await pump.prompt_lengths(backend)))


def coalesce(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Merge consecutive events of the same text, for a client that reads slower than tokens arrive.
    Events that have only a token count are dropped: their tokens are counted already, and they
    would prevent the events around them from being merged.
    """
    joined: list[OutputEvent] = []
    shown = [each for each in events if not _is_silent(each)]
    for same, run in itertools.groupby(shown, key=_joint):
        pieces = list(run)
        if same is None or len(pieces) == 1:
            joined.extend(pieces)
        else:
            joined.append(_join(pieces))
    return joined


def _is_silent(event: OutputEvent) -> bool:
    return isinstance(event, TextEvent) and not (event.text or event.logprobs or event.progress)


def _joint(event: OutputEvent) -> tuple[type[OutputEvent], int, int] | None:
    """A key that is equal for events that can be merged. None for events that can't be merged."""
    if isinstance(event, FinishEvent) or (isinstance(event, TextEvent) and event.progress):
        return None
    call = event.index if isinstance(event, ToolCallEvent) else 0
    return type(event), event.choice, call


def _join(run: Sequence[OutputEvent]) -> OutputEvent:
    """Merge a run of events that have the same kind, choice and tool call."""
    first = run[0]
    if isinstance(first, ReasoningEvent):
        text = "".join(each.text for each in run if isinstance(each, ReasoningEvent))
        return msgspec.structs.replace(first, text=text)
    if isinstance(first, ToolCallEvent):
        pieces = [each.arguments for each in run if isinstance(each, ToolCallEvent)]
        return msgspec.structs.replace(first, arguments="".join(pieces))
    texts = [each for each in run if isinstance(each, TextEvent)]
    logprobs = [token for each in texts for token in each.logprobs or ()]
    return TextEvent(
        choice=first.choice,
        text="".join(each.text for each in texts),
        num_tokens=sum(each.num_tokens for each in texts),
        logprobs=tuple(logprobs) if texts[0].logprobs is not None else None,
        token_ids=tuple(token_id for each in texts for token_id in each.token_ids),
    )
