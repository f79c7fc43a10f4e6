"""Responses that are made in the background: they continue when their client disconnects.

A response is stored when it is accepted, and again when it has ended. Meanwhile its state and its
events are in the memory of the server that makes it. Clients poll it, or follow its events, from
the beginning or from where they were disconnected. If it was asked for with `stream`, its events
are stored at its end. If its server dies, the response counts as failed: the server holds a file
lock while it runs, so other servers notice.
"""

import asyncio
import logging
import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import ConflictError, EngineError, InvalidRequestError
from engine.core.interfaces.backend import Event, UsageEvent
from engine.servers.http.errors import AbortedError, opaque_error
from engine.servers.responses.create import NewResponse
from engine.servers.responses.format import ResponseStream, failed
from engine.servers.responses.items import Item, with_ids
from engine.servers.responses.output import Output
from engine.servers.responses.store import UNFINISHED, ResponseStore
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump, OutputEvent
from engine.servers.serving.followers import Followers
from engine.servers.serving.sse import CHECK_WAIT_S, EventStream
from engine.servers.storage.job_queue import FileLock, JobTasks

logger = logging.getLogger(__name__)

NOTHING_USED = UsageEvent(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
LOST = EngineError("The server that made this response stopped before it was finished.")


class ResponseCancelledError(AbortedError):
    """The client has cancelled its background response."""

    code = "RESPONSE_CANCELLED"


class _State(msgspec.Struct):
    """The part of a stored response that says how it was made and how far it is."""

    status: str
    background: bool


def _state(body: bytes) -> _State:
    return msgspec.json.decode(body, type=_State)


class Job:
    """A response that is being made."""

    def __init__(self, made: NewResponse, owner: str, is_streamed: bool) -> None:
        self.made = made
        self.owner = owner
        self.is_streamed = is_streamed
        self.response = made.begun
        self.events: list[OutputEvent] = []
        self.failure: EngineError | None = None
        self.ended = asyncio.Event()
        self._usage = NOTHING_USED
        self._changed = asyncio.Event()

    def add(self, events: Sequence[OutputEvent]) -> None:
        if self.response["status"] == "queued":
            self.response = self.response | {"status": "in_progress"}
        self.events += events
        self._tell()

    def end(self, response: Item, usage: UsageEvent, failure: EngineError | None) -> None:
        self.response, self._usage, self.failure = response, usage, failure
        self.ended.set()
        self._tell()

    async def follow(self) -> AsyncIterator[Event]:
        """All events of the response, those that have happened and those that will."""
        position = 0
        while True:
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self.ended.is_set():
                break
            await self._changed.wait()
        if self.failure is not None:
            raise self.failure
        yield self._usage

    async def cancel(self) -> None:
        self.made.pump.fail(ResponseCancelledError("The client has cancelled this response."))
        await self.ended.wait()

    def _tell(self) -> None:
        """Wake up all followers."""
        self._changed.set()
        self._changed = asyncio.Event()


class Background(JobTasks):
    """A component that makes responses in the background. It does not touch the disk until there is
    one.
    """

    def __init__(self, store: ResponseStore) -> None:
        super().__init__()
        self._store = store
        self._server = secrets.token_hex(8)  # tells this process from other servers
        self._lock = FileLock(self._lock_path(self._server))
        self._jobs: dict[str, Job] = {}
        self._followers = Followers()

    async def stop(self) -> None:
        await super().stop()
        self._lock.remove()

    async def accept(self, made: NewResponse, owner: str, is_streamed: bool, ticket: Ticket) -> Job:
        """Store the response as queued and make it in a task, which takes over the ticket. Raises
        if the backend refuses the prompt.
        """
        await made.pump.accepted(CHECK_WAIT_S, 0)
        items = with_ids(made.prompt.input, made.begun["id"])
        self._lock.acquire()  # before another server can read that this one makes the response
        await self._store.save(made.begun, owner, items, made.prompt.ancestors, server=self._server)
        job = self._jobs[made.begun["id"]] = Job(made, owner, is_streamed)
        self.begin(self._run(job, ticket.detach()))
        return job

    async def current(self, response_id: str, owner: str) -> bytes:
        """The response as it is now."""
        job = self._job(response_id, owner)
        if job is not None:
            return msgspec.json.encode(job.response)
        body = await self._store.body(response_id, owner)
        if _state(body).status not in UNFINISHED or not await self._is_lost(response_id):
            return body
        lost = failed(msgspec.json.decode(body), Output(response_id), LOST)
        await self._store.finish(lost)
        return msgspec.json.encode(lost)

    async def cancel(self, response_id: str, owner: str) -> bytes:
        job = self._job(response_id, owner)
        if job is not None:
            await job.cancel()
            return msgspec.json.encode(job.response)
        body = await self.current(response_id, owner)
        state = _state(body)
        if not state.background:
            raise InvalidRequestError(
                "Cannot cancel a synchronous response. Only one that was asked for with background"
                " can be cancelled; close the connection of any other.",
                param="response_id",
            )
        if state.status in UNFINISHED:
            raise ConflictError(
                "Another server makes this response; cancel it there.", param="response_id"
            )
        return body

    async def delete(self, response_id: str, owner: str) -> None:
        job = self._job(response_id, owner)
        if job is not None:
            await job.cancel()
        await self._store.delete(response_id, owner)

    async def stream(self, request: Request, response_id: str, owner: str, after: int) -> Response:
        """The events of a response that follow event number `after`."""
        job = self._job(response_id, owner)
        if job is not None and job.is_streamed:
            return follow_job(request, job, self._followers.follow(owner, job.follow()), after)
        events = await self._store.events(response_id, owner)
        if events is None:
            raise InvalidRequestError(
                "Only a response that was asked for with background and stream can be streamed"
                " again.",
                param="stream",
            )
        stored = await asyncio.to_thread(zlib.decompress, events)
        kept = stored.split(b"\n\n")[after + 1 :]
        return Response(
            b"\n\n".join(kept), media_type=EventStream.media_type, headers=EventStream.HEADERS
        )

    def _job(self, response_id: str, owner: str) -> Job | None:
        job = self._jobs.get(response_id)
        return job if job is not None and job.owner == owner else None

    async def _run(self, job: Job, ticket: Ticket) -> None:
        made = job.made
        usage, failure = NOTHING_USED, None
        try:
            try:
                await made.pump.wait_whole(job.add)
                response, usage = made.recorder.response, made.pump.usage
            except ResponseCancelledError:
                response = made.begun | {
                    "status": "cancelled",
                    "output": made.recorder.output.items,
                }
            except EngineError as error:
                failure = error
                response = failed(made.begun, made.recorder.output, error)
            await self._finish(job, response, usage, failure)
        except Exception:
            logger.exception("response %s failed unexpectedly", made.begun["id"])
            failure = opaque_error()
            response = failed(made.begun, made.recorder.output, failure)
        finally:
            self._jobs.pop(made.begun["id"], None)
            await ticket.close()
        job.end(response, usage, failure)

    async def _finish(
        self, job: Job, response: Item, usage: UsageEvent, failure: EngineError | None
    ) -> None:
        """Store the response at its end, before any client is told."""
        events = None
        if job.is_streamed:
            stream = ResponseStream(job.made.begun, lambda: response)
            events = await asyncio.to_thread(_all_events, stream, job.events, usage, failure)
        try:
            await self._store.finish(response, events)
        except EngineError as error:
            logger.warning("response %s could not be stored: %s", response["id"], error)

    async def _is_lost(self, response_id: str) -> bool:
        """Whether nobody makes this response any more, though it has not ended."""
        server = await self._store.server_of(response_id)
        if server == self._server or server is None:
            return True
        lock = FileLock(self._lock_path(server))
        if not lock.acquire():
            return False
        lock.remove()
        return True

    def _lock_path(self, server: str) -> Path:
        return self._store.database.path.with_name(f"responses-{server}.lock")


def follow_job(
    request: Request, job: Job, events: AsyncIterator[Event], after: int = -1
) -> Response:
    """Stream a job's events to a client. The job continues if the client disconnects."""
    reader = EventPump(1, choices_per_source=1, timeout_s=None, on_tokens=lambda *_: None)
    reader.watch(request.receive)
    reader.read([events])
    stream = ResponseStream(job.made.begun, lambda: job.response, after)
    # Events are not merged, because all clients must count them alike.
    return EventStream(reader, stream, merges=False)


def _all_events(
    stream: ResponseStream,
    events: Sequence[OutputEvent],
    usage: UsageEvent,
    failure: EngineError | None,
) -> bytes:
    parts = [stream.opening(), *(stream.chunk(event) for event in events)]
    parts.append(stream.closing(usage) if failure is None else stream.failure(failure))
    return zlib.compress(b"".join(parts))
