"""Connections of an event loop to other processes, and the clients of an engine, which use one.

An engine process has none, so that it need not import asyncio: its end is
`transport.SocketChannel`.

`InlineClient` runs the engine loop in a thread of this process. `ProcessClient` exchanges messages
with a child process over a private socket. Both call `on_message` for each message from the engine,
in order, on the frontend's event loop.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import msgspec

from engine.core.errors import EngineError, UnavailableError
from engine.core.interfaces.request import Deltas, Fatal, FromEngine, Stop, ToEngine
from engine.core.sandbox.liveness import Heartbeat, Silence, Vitals, heartbeat_file
from engine.ipc.child_process import ChildProcess
from engine.ipc.engine_process import STACKS_SIGNAL, EngineProcess
from engine.ipc.transport import FrameDecoder, frames_of

if TYPE_CHECKING:
    from engine.core.shards.link import Seal

log = logging.getLogger(__name__)

Message = TypeVar("Message")
OnMessage = Callable[[FromEngine], None]
OnExit = Callable[[int], None]

FULL_BYTES = 2**20  # unsent bytes from which on a connection is full
STOP_GRACE_S = 5.0
STACKS_GRACE_S = 0.2


class Connection(asyncio.Protocol, Generic[Message]):
    """Sends and receives messages. `on_message` is called for each message, in order, from the
    loop's read callback, without switching to a task. `on_lost` is called once, when the other side
    is gone, and `on_drained` whenever it has read what made this end full.

    `join` may make one message of several that have arrived together. A side that leaves more than
    `max_unsent_bytes` unread is given up. If `is_sealed`, `trust` is called before the first
    message.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        message_type: Any,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
        *,
        on_drained: Callable[[], None] = lambda: None,
        join: Callable[[list[Message]], Iterable[Message]] = iter,
        max_unsent_bytes: int | None = None,
        is_sealed: bool = False,
    ) -> None:
        self._message_type = message_type
        self._frames: FrameDecoder[Message] = FrameDecoder(message_type)
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_drained = on_drained
        self._join = join
        self._max_unsent_bytes = max_unsent_bytes
        self._must_be_trusted = is_sealed
        self._sent: Seal | None = None
        self._is_connected = False
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self.is_full = False  # whether the other side reads too slowly

    async def connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=sock)

    def trust(self, sent: "Seal", received: "Seal") -> None:
        self._sent, self._must_be_trusted = sent, False
        self._frames = FrameDecoder(self._message_type, seal=received)

    @property
    def silent_s(self) -> float:
        return self._loop.time() - self.heard_at

    @property
    def is_open(self) -> bool:
        return self._is_connected and not self.transport.is_closing()

    @property
    def num_unsent(self) -> int:
        """Bytes that wait to be sent."""
        return self.transport.get_write_buffer_size()

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message. Returns False, and drops it, if the other side is gone or does not read.
        Raises `MessageTooLargeError` if it is too large and is no message of an engine.
        """
        if not self.is_open:
            return False
        if self._max_unsent_bytes is not None and self.num_unsent > self._max_unsent_bytes:
            self.abort()
            return False
        for frame in frames_of(message):
            self.transport.write(frame if self._sent is None else frame + self._sent.next(frame))
        return True

    def abort(self) -> None:
        if self._is_connected:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._must_be_trusted:
            raise EngineError("this connection has no seals yet")
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=FULL_BYTES)
        self._is_connected = True

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            for message in self._join(self._frames.feed(data)):
                self._on_message(message)
        except Exception:  # what follows a message that can't be read can't be read either
            peer = self.transport.get_extra_info("peername") or "another process"
            log.exception("the connection to %s broke", peer)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._on_drained()


class EngineClient(Protocol):
    """The connection to one engine. `start` returns before the model is loaded. Later, a `Ready` or
    a `Fatal` message reports whether loading succeeded.
    """

    async def start(self) -> None: ...

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine. Raises `UnavailableError` when the engine is gone."""
        ...

    def vitals(self) -> Vitals | None:
        """A reading of the engine's heartbeat. None before an engine has started."""
        ...

    def wake(self) -> None:
        """Try to revive an unresponsive engine process. Sends SIGCONT, in case a signal stopped the
        process, and makes a process that has loaded log its stacks.
        """
        ...

    @property
    def pid(self) -> int: ...

    async def kill(self) -> bool:
        """Kill an engine process that makes no progress. Returns whether that is possible: an
        engine that runs in a thread of this process can't be killed.
        """
        ...

    async def stop(self) -> None: ...


class QueueChannel:
    """The channel of an engine that runs in a thread. It has a queue of messages to the engine, and
    a callback for messages from the engine.
    """

    def __init__(self, deliver: OnMessage) -> None:
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._deliver = deliver

    def poll(self, timeout_s: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        with contextlib.suppress(queue.Empty):
            if timeout_s > 0:
                messages.append(self.inbox.get(timeout=timeout_s))
            while True:
                messages.append(self.inbox.get_nowait())
        return messages

    def send(self, message: FromEngine) -> None:
        self._deliver(message)


class InlineClient:
    """Runs the engine in a thread of this process, for use as a library and for tests. `module`
    names the module whose `run_engine` function is called.
    """

    def __init__(self, module: str, options: msgspec.Struct, on_message: OnMessage) -> None:
        self._module = module
        self._options = options
        self._on_message = on_message
        with heartbeat_file() as file:  # the mapping stays valid after the file is closed
            self._heartbeat = Heartbeat(file.fileno())
        self._channel: QueueChannel | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def deliver(message: FromEngine) -> None:
            # The call raises if the event loop is closed. Then no request waits for the message.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_message, message)

        self._channel = QueueChannel(deliver)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        if self._channel is None or self._thread is None or not self._thread.is_alive():
            raise UnavailableError("The engine is not running.")
        self._channel.inbox.put(message)

    def vitals(self) -> Vitals | None:
        return self._heartbeat.vitals()

    def wake(self) -> None:
        pass  # a signal stops a whole process, never only the engine's thread

    @property
    def pid(self) -> int:
        return os.getpid()

    async def kill(self) -> bool:
        log.error("a thread can't be ended: the engine's process must be")
        return False

    async def stop(self) -> None:
        if self._thread is not None and self._channel is not None:
            self._channel.inbox.put(Stop())
            await asyncio.to_thread(self._thread.join, STOP_GRACE_S)

    def _run(self) -> None:
        assert self._channel is not None
        try:
            run_engine = importlib.import_module(self._module).run_engine
            run_engine(self._options, self._channel, self._heartbeat)
        except EngineError as error:
            self._channel.send(Fatal(error.error_code, error.message))
        except Exception:
            log.exception("the engine failed")
            self._channel.send(Fatal("internal_error", "The engine failed; its log says why."))


class ProcessClient:
    """Runs the engine in a child process. The child can be killed at any time without harm to this
    process.

    `on_exit` is called once on the event loop if the child ends without being asked to. If
    `process` is given, this running child is used instead of a new one. It may already have
    received its options.
    """

    def __init__(
        self,
        module: str,
        options: msgspec.Struct,
        on_message: OnMessage,
        on_exit: OnExit,
        process: EngineProcess | None = None,
    ) -> None:
        self._module = module
        self._options = options
        self._on_message = on_message
        self._on_exit = on_exit
        self._process = process
        self._child: ChildProcess | None = None
        self._silence: Silence | None = None
        self._connection: Connection[FromEngine] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        process = self._process = self._process or EngineProcess(self._module)
        self._child = ChildProcess(process.process)
        self._silence = Silence(self._child.pid)
        if not process.has_begun:
            process.begin(self._options)
        closed = asyncio.Event()
        self._connection = Connection(FromEngine, self._on_message, closed.set, join=joined)
        await self._connection.connect(process.socket)
        self._ending = asyncio.create_task(self._end(closed, self._child))

    def send(self, message: ToEngine) -> None:
        if self._connection is None or not self._connection.send(message):
            raise UnavailableError("The engine is restarting; try again.", retry_after=1.0)

    def vitals(self) -> Vitals | None:
        if self._process is None or self._silence is None:
            return None
        heartbeat = self._process.heartbeat
        vitals, silence = heartbeat.vitals(), self._silence
        if vitals.silent_s is None:
            return vitals
        counted_s = silence.counted(vitals.silent_s, is_loading=not heartbeat.has_begun)
        return dataclasses.replace(vitals, silent_s=counted_s, cause=silence.cause)

    def wake(self) -> None:
        if self._child is not None and self._process is not None:
            # A process that still imports its modules does not know the signal, and would end.
            if self._process.heartbeat.has_begun:
                self._child.send(STACKS_SIGNAL)
            self._child.send(signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self._child is not None, "the engine process was never started"
        return self._child.pid

    async def stop(self) -> None:
        self._stopping = True
        if self._child is None:
            return
        with contextlib.suppress(UnavailableError):
            self.send(Stop())
        await self._child.stop(STOP_GRACE_S)
        if self._ending is not None and self._connection is not None:
            self._connection.abort()  # a process that waits in the kernel keeps its end
            await asyncio.wait([self._ending], timeout=STOP_GRACE_S)

    async def kill(self) -> bool:
        assert self._child is not None, "the engine process was never started"
        self._child.send(STACKS_SIGNAL)
        await asyncio.sleep(STACKS_GRACE_S)
        self._child.kill()
        if self._connection is not None:
            self._connection.abort()  # a process that waits in the kernel keeps its end
        return True

    async def _end(self, closed: asyncio.Event, child: ChildProcess) -> None:
        """Wait until the child has closed its end of the socket, then report its exit status."""
        await closed.wait()
        status = await child.stop(STOP_GRACE_S)
        if not self._stopping:
            self._on_exit(status)


def joined(messages: list[FromEngine]) -> Iterator[FromEngine]:
    """The messages, with the deltas of consecutive steps in one message. Several steps arrive at
    once only if the frontend is slower than its engine. Joined deltas become fewer events, and so
    the frontend catches up.
    """
    for is_deltas, run in itertools.groupby(messages, lambda each: isinstance(each, Deltas)):
        if is_deltas:
            steps = cast(Iterator[Deltas], run)
            yield Deltas(tuple(delta for step in steps for delta in step.deltas))
        else:
            yield from run
