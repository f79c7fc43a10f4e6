"""An HTTP worker process, as the main process sees it."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp

from engine.core.sandbox.liveness import (
    UNKNOWN_STEP_TIMEOUT_S,
    LivenessMonitor,
    LivenessVerdict,
    Silence,
    Vitals,
    trouble_of,
)
from engine.core.sandbox.processes import socket_pair, start_child
from engine.ipc.child_process import ChildProcess
from engine.ipc.connection import Connection
from engine.servers.http_workers.exchange import Exchange
from engine.servers.http_workers.messages import (
    Blocked,
    Chunks,
    Close,
    Drained,
    FromWorker,
    Gone,
    Hello,
    Load,
    Opened,
    Part,
    Setup,
    Taken,
)

logger = logging.getLogger(__name__)

MODULE = "engine.servers.http_workers.main"
CLOSE_GRACE_S = 7.0
# Parts of answers are sent together, once per iteration of the event loop, or when they have this
# many bytes.
BATCH_BYTES = 2**20
MAX_CHUNK_BYTES = 2**25
MAX_BEGUN = 4  # requests that begin in one iteration of the event loop


class HttpWorker:
    """Starts an HTTP worker and runs the application for its requests. `on_ready` is called when it
    takes connections, `on_lost` when it is gone.
    """

    def __init__(
        self,
        app: ASGIApp,
        setup: Setup,
        on_ready: Callable[[], None],
        on_lost: Callable[["HttpWorker"], None],
    ) -> None:
        self._app = app
        self._setup = setup
        self._on_ready = on_ready
        self._on_lost = on_lost
        self.is_ready = False
        self.num_connections = 0
        self._liveness = LivenessMonitor()
        # Connections that were passed to it, and that it has not taken yet.
        self._passed: deque[socket.socket] = deque()
        self._exchanges: dict[int, Exchange] = {}
        self._opened: deque[tuple[int, Exchange]] = deque()  # those that have not begun
        self._tasks: set[asyncio.Task[None]] = set()
        self._batch: list[tuple[int, bytes]] = []
        self._batch_bytes = 0
        self._pipe: Connection[FromWorker] = Connection(
            FromWorker, self._on_message, self._end, on_drained=self._wake_all
        )
        self._loop = asyncio.get_running_loop()
        self._door, self._child, self._sock = self._start()
        self._silence = Silence(self._child.pid)

    def _start(self) -> tuple[socket.socket, ChildProcess, socket.socket]:
        ours, theirs = socket_pair()
        door, their_door = socket.socketpair()
        with theirs, their_door:
            fds = (theirs.fileno(), their_door.fileno())
            argv = [sys.executable, "-m", MODULE, *map(str, fds), str(os.getpid())]
            child = ChildProcess(start_child(argv, fds))
        door.setblocking(False)
        return door, child, ours

    async def begin(self) -> None:
        await self._pipe.connect(self._sock)
        self._pipe.send(self._setup)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def _vitals(self) -> Vitals:
        """Once it is ready, it sends a message twice a second."""
        counted_s = self._silence.counted(self._pipe.silent_s, is_loading=not self.is_ready)
        cause = self._silence.cause
        return Vitals(None, UNKNOWN_STEP_TIMEOUT_S, silent_s=counted_s, cause=cause)

    @property
    def silence(self) -> str:
        """Why the process is silent, in words."""
        return self._silence.cause

    @property
    def is_frozen(self) -> bool:
        return trouble_of(self._vitals) is not None

    def check(self) -> LivenessVerdict:
        """What to do with the process, as with an engine process."""
        return self._liveness.check(self._vitals, self._loop.time())

    def wake(self) -> None:
        """Let the process continue, if a signal has stopped it."""
        self._child.send(signal.SIGCONT)

    def not_taken(self) -> list[socket.socket]:
        """The connections that a worker that is gone had not taken."""
        passed, self._passed = list(self._passed), deque()
        return passed

    def take(self, connection: socket.socket) -> bool:
        """Pass a connection to the worker. Returns False if that is not possible now."""
        try:
            socket.send_fds(self._door, [b"c"], [connection.fileno()])
        except OSError:  # it is gone, or has not taken earlier connections yet
            return False
        self.num_connections += 1
        self._passed.append(connection)
        return True

    async def close(self, grace_s: float) -> None:
        """Let open requests finish within `grace_s`, then end the process."""
        while self._opened:
            await asyncio.sleep(0)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CLOSE_GRACE_S)
        self._flush()
        self._pipe.send(Close())
        await self._child.stop(CLOSE_GRACE_S)
        for connection in self.not_taken():
            connection.close()
        self._pipe.abort()
        self._door.close()

    def kill(self) -> None:
        self._child.kill()

    async def ended(self) -> None:
        """Wait until the process, which was killed, has ended."""
        await self._child.stop(0.0)

    @property
    def is_full(self) -> bool:
        return self._pipe.is_full

    def send(self, message: msgspec.Struct) -> None:
        self._flush()  # messages arrive in the order in which they were sent
        self._pipe.send(message)

    def write(self, number: int, body: bytes) -> None:
        """Send a part of an answer, together with those of other answers. A large part is cut,
        because a message has a limited size.
        """
        for start in range(0, len(body), MAX_CHUNK_BYTES):
            chunk = body[start : start + MAX_CHUNK_BYTES]
            if not self._batch:
                self._loop.call_soon(self._flush)
            self._batch.append((number, chunk))
            self._batch_bytes += len(chunk)
            if self._batch_bytes > BATCH_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            self._pipe.send(Chunks(batch))

    def _on_message(self, message: FromWorker) -> None:
        if isinstance(message, Opened):
            if not self._opened:
                self._loop.call_soon(self._begin_some)
            exchange = self._exchanges[message.number] = Exchange(message, self)
            self._opened.append((message.number, exchange))
        elif isinstance(message, Load):
            self.num_connections = message.num_connections
        elif isinstance(message, Taken):
            for _ in range(message.count):
                self._passed.popleft().close()
        elif isinstance(message, Hello):
            self.is_ready = True
            self._on_ready()
        elif (known := self._exchanges.get(message.number)) is not None:
            _tell(known, message)

    def _begin_some(self) -> None:
        """Begin requests that have arrived. If they are many, tokens of other requests are sent
        in between.
        """
        for _ in range(min(MAX_BEGUN, len(self._opened))):
            task = self._loop.create_task(self._run(*self._opened.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._opened:
            self._loop.call_soon(self._begin_some)

    async def _run(self, number: int, exchange: Exchange) -> None:
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            logger.exception("A request of an HTTP worker failed.")
        finally:
            exchange.end()
            del self._exchanges[number]

    def _wake_all(self) -> None:
        for exchange in self._exchanges.values():
            exchange.wake()

    def _end(self) -> None:
        """The HTTP worker is gone, and the connections of all its clients with it."""
        self.is_ready = False
        for exchange in self._exchanges.values():
            exchange.leave()
        with contextlib.suppress(OSError):
            self._door.close()
        self._on_lost(self)


def _tell(exchange: Exchange, message: Part | Gone | Blocked | Drained) -> None:
    if isinstance(message, Part):
        exchange.add(message)
    elif isinstance(message, Gone):
        exchange.leave()
    else:
        exchange.block(isinstance(message, Blocked))
