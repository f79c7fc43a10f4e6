"""The node's side: runs an engine, and keeps it connected to one or several servers.

Each server sends requests and gets their tokens, as if the engine were its own. If the engine dies,
the connections are closed, so that the servers move its requests; when the engine is back, the node
joins again. A node that leaves finishes its open requests first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.core.errors import (
    EngineError,
    ForbiddenError,
    PayloadTooLargeError,
    UnavailableError,
)
from engine.core.interfaces.handover import BlockSource, Role
from engine.core.interfaces.request import (
    Abort,
    CachedPrefixes,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    Ready,
    TokenDelta,
)
from engine.frontend.engine_link import EngineLink
from engine.frontend.request_recovery import Engine
from engine.ipc.connection import Connection
from engine.ipc.transport import failed_delta
from engine.routing.nodes.dial import Endpoint, dial
from engine.routing.nodes.wire import (
    BEAT_S,
    HELLO_TIMEOUT_S,
    LOST_AFTER_S,
    MAX_UNSENT_BYTES,
    MAX_UNSENT_RESULT_BYTES,
    Beat,
    Drain,
    Hello,
    Leaving,
    Refused,
    ToNode,
    Welcome,
)

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 1.0
READY_POLL_S = 0.05
STATS_S = 0.5
# Clocks of two machines that differ by less are taken as one clock.
MIN_SHIFT_S = 0.05
# What a server may ask of a node's engine. The others concern this machine's files and peers.
SERVER_CONTROLS = frozenset({"flush_cache", "report_cache", "snapshot"})
MAX_CONTROLS = 64  # of one server at once


class JoinRefusedError(EngineError):
    """The server refused this node for good. The message is mostly the server's and says why."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node tells about itself."""

    node_id: str
    name: str
    model: str  # digest of the model's files
    model_name: str
    fingerprint: Callable[[Ready], str]
    role: Role = "both"
    block_host: str = ""
    block_token: str = ""  # of a prefill node; other engines get it from the servers
    certificate: str = ""

    def hello(self, ready: Ready, block_port: int | None) -> Hello:
        return Hello(
            node_id=self.node_id,
            name=self.name,
            model=self.model,
            model_name=self.model_name,
            fingerprint=self.fingerprint(ready),
            ready=ready,
            role=self.role,
            blocks=None
            if block_port is None
            else BlockSource(self.block_host, block_port, self.block_token, self.certificate),
        )


@dataclass(eq=False)
class _Forwarded:
    """A request of a server. Its deltas go back to that server."""

    session: "Session"
    request_id: str  # as the server knows it
    engine: Engine

    def deliver(self, *items: TokenDelta | EngineError) -> None:
        for item in items:
            if isinstance(item, EngineError):  # the engine died, so the server moves the request
                self.session.connection.transport.abort()
            else:
                self.session.forward(self.request_id, item)


@dataclass(eq=False)
class Session:
    """One connection to a server, and the requests that came over it."""

    link: EngineLink
    number: int
    welcomed: "asyncio.Future[Welcome]"
    on_drain: Callable[[], None]
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    clock_shift_s: float = 0.0

    def __post_init__(self) -> None:
        self.connection: Connection[ToNode] = Connection(
            ToNode, self._heard, self._lost, max_unsent_bytes=MAX_UNSENT_BYTES, is_sealed=True
        )
        self._requests: dict[str, int] = {}  # request id -> number of choices that have not ended
        self._deltas: list[TokenDelta] = []
        self._controls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def forward(self, request_id: str, delta: TokenDelta) -> None:
        """Send a delta with those of the same step, in one message."""
        if delta.captured is not None and self.connection.num_unsent > MAX_UNSENT_RESULT_BYTES:
            self.link.forget(self._own_id(request_id), None)
            slow = PayloadTooLargeError("The node's connection is too slow for results this large.")
            delta = failed_delta(request_id, delta.choice, slow)
        timeline = delta.timeline
        if timeline is not None and self.clock_shift_s:
            timeline = timeline.shifted(self.clock_shift_s)
        if not self._deltas:
            self._loop.call_soon(self._flush)
        self._deltas.append(
            msgspec.structs.replace(delta, request_id=request_id, timeline=timeline)
        )
        if delta.finish_reason is not None:
            self._choice_ended(request_id)

    def _flush(self) -> None:
        deltas, self._deltas = self._deltas, []
        self.connection.send(Deltas(tuple(deltas)))

    def _choice_ended(self, request_id: str) -> None:
        left = self._requests.get(request_id, 1) - 1
        if left > 0:
            self._requests[request_id] = left
        elif self._requests.pop(request_id, None) is not None:
            self.link.done(self._own_id(request_id))

    def _heard(self, message: ToNode) -> None:
        if isinstance(message, GenerateRequest):
            self._submit(message)
        elif isinstance(message, Abort):
            self.link.forget(self._own_id(message.request_id), message.choice)
            if message.choice is None:
                self._requests.pop(message.request_id, None)
        elif isinstance(message, Control):
            if len(self._controls) >= MAX_CONTROLS:
                raise ForbiddenError("The server asks for too much at once.")
            task = self._loop.create_task(self._control(message))
            self._controls.add(task)
            task.add_done_callback(self._controls.discard)
        elif isinstance(message, Drain):
            self.on_drain()
        elif isinstance(message, Welcome):
            shift = message.now - time.monotonic()
            self.clock_shift_s = shift if abs(shift) > MIN_SHIFT_S else 0.0
            self.welcomed.set_result(message)
        elif isinstance(message, Refused):
            kind = JoinRefusedError if message.is_final else UnavailableError
            self.welcomed.set_exception(kind(message.message))

    def _submit(self, request: GenerateRequest) -> None:
        choices = list(range(request.params.n))
        if request.resumed is not None:
            choices = [each.choice for each in request.resumed]
        own = msgspec.structs.replace(request, request_id=self._own_id(request.request_id))
        try:
            self.link.submit(own, _Forwarded(self, request.request_id, self.link))
        except UnavailableError:
            self.connection.transport.abort()
            return
        except EngineError as error:  # it concerns this request alone
            refused = [failed_delta(request.request_id, choice, error) for choice in choices]
            self.connection.send(Deltas(tuple(refused)))
            return
        self._requests[request.request_id] = len(choices)

    async def _control(self, control: Control) -> None:
        try:
            if control.action not in SERVER_CONTROLS:
                raise ForbiddenError(f"A node does no {control.action} for a server.")
            reply = await self.link.control(control.action, control.value)
        except EngineError as error:
            reply = ControlReply(control.control_id, False, error.message)
        self.connection.send(msgspec.structs.replace(reply, control_id=control.control_id))

    def _lost(self) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(UnavailableError("The server closed the connection."))
        for request_id in list(self._requests):
            self.link.forget(self._own_id(request_id), None)
        self._requests.clear()
        self.closed.set()

    def drop(self) -> None:
        """Close the connection because it could not be used."""
        self.connection.transport.abort()
        self.welcomed.cancel()

    def _own_id(self, request_id: str) -> str:
        """Two servers may use the same id."""
        return f"{self.number}:{request_id}"


class NodeAgent:
    """Runs the engine behind `link`, which is not started yet, for the servers at `endpoints`."""

    def __init__(
        self,
        link: EngineLink,
        identity: Identity,
        endpoints: Sequence[Endpoint],
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._link = link
        self._identity = identity
        self._endpoints = endpoints
        self._say = say
        self._sessions: set[Session] = set()
        self._num_sessions = 0
        self._leaving = asyncio.Event()  # it belongs to no loop until it is waited for

    async def run(self, drain_timeout_s: float) -> None:
        """Join, and serve until the node leaves. Raises if the engine can't be loaded, or if a
        server refuses the node.
        """
        self._link.on_cached = self._on_cached
        await self._link.start()
        self._say("The engine is ready.")
        staying = [asyncio.create_task(self._stay(each)) for each in self._endpoints]
        beating = asyncio.create_task(self._beat())
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            done, _ = await asyncio.wait([leaving, *staying], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()
            await self._drain(drain_timeout_s)
        finally:
            for task in (*staying, beating, leaving):
                task.cancel()
            await asyncio.gather(*staying, beating, leaving, return_exceptions=True)
            for session in list(self._sessions):
                session.connection.transport.close()
            await self._link.stop()

    @property
    def is_leaving(self) -> bool:
        return self._leaving.is_set()

    def leave(self) -> None:
        """Take no new requests, finish the open ones, and end."""
        self._leaving.set()

    async def _drain(self, timeout_s: float) -> None:
        self._say("Leaving: open requests may finish, new ones go elsewhere.")
        for session in self._sessions:
            session.connection.send(Leaving())
        deadline = time.monotonic() + timeout_s
        while any(each.num_open for each in self._sessions) and time.monotonic() < deadline:
            await asyncio.sleep(READY_POLL_S)
        await asyncio.sleep(READY_POLL_S)  # a request that was on its way when we told the servers
        if any(each.num_open for each in self._sessions):
            log.warning("%g s are over; the open requests move to other nodes", timeout_s)

    async def _stay(self, endpoint: Endpoint) -> None:
        """Keep a connection to a server until the node leaves. Raises if the server refuses it."""
        delay = FIRST_RETRY_S
        told = ""
        while not self.is_leaving:
            while self._link.ready is None:
                await asyncio.sleep(READY_POLL_S)
            try:
                session = await self._join(endpoint)
                self._say(f"Joined {endpoint.url} as {session.welcomed.result().name}.")
                delay, told = FIRST_RETRY_S, ""
                await session.closed.wait()
                self._sessions.discard(session)
                self._say(f"The connection to {endpoint.url} is gone; joining again.")
            except (OSError, UnavailableError) as error:
                reason = str(error) or type(error).__name__
                if reason != told:
                    self._say(f"{endpoint.url} does not take this node yet: {reason}")
                    told = reason
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_S)

    async def _join(self, endpoint: Endpoint) -> Session:
        loop = asyncio.get_running_loop()
        self._num_sessions += 1
        session = Session(self._link, self._num_sessions, loop.create_future(), self.leave)
        await dial(endpoint, session.connection)
        ready = self._link.ready
        if ready is None:
            session.drop()
            raise UnavailableError("The engine of this node is being restarted.")
        try:
            session.connection.send(self._identity.hello(ready, await self._block_port(session)))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await session.welcomed
        except BaseException:
            session.drop()
            raise
        self._sessions.add(session)
        return session

    async def _block_port(self, session: Session) -> int | None:
        """Let the engine serve its blocks, if this is a prefill node. Returns the port."""
        if self._identity.role != "prefill":
            return None
        own = session.connection.transport.get_extra_info("sockname")[0]
        value = f"{self._identity.block_token} {self._identity.block_host or own}"
        reply = await self._link.control("serve_blocks", value)
        if not reply.ok:
            raise JoinRefusedError(reply.message)
        return int(reply.message)

    def _on_cached(self, news: CachedPrefixes) -> None:
        for session in self._sessions:
            session.connection.send(news)

    async def _beat(self) -> None:
        """Tell the servers that this node is well, and notice servers that are gone."""
        stats_at, last = 0.0, None
        while True:
            await asyncio.sleep(BEAT_S)
            now, stats = time.monotonic(), None
            if now - stats_at >= STATS_S and self._link.stats is not last:
                stats_at, last = now, self._link.stats
                stats = last
            is_well = self._link.is_up
            for session in list(self._sessions):
                if session.connection.silent_s > LOST_AFTER_S:
                    session.connection.transport.abort()
                elif is_well:
                    session.connection.send(Beat(stats))
