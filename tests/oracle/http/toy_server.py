"""The real application and HTTP protocol over a stepped engine, with connections in memory."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from uvicorn.server import ServerState

from engine.core.config_presets import PresetTable
from engine.core.config_schema import NamedTables
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.http.protocol import http_server
from tests.oracle.clock import Clock, given_clock
from tests.oracle.histories import Shape
from tests.oracle.http.keys import write_keys
from tests.oracle.http.reading import Reply, parse_reply
from tests.oracle.http.toy_backend import (
    ALONE,
    InlineExecutor,
    ToyTextBackend,
    without_threads_and_files,
)
from tests.support.servers.live_server import make_settings

T = TypeVar("T")
MAX_CALLBACKS = 5000
MAX_TURNS = 4000
FRONTEND_S = 1e-4
RESTART_TICK_S = 0.02
NO_LIMIT_S = 86400.0
# Parameters that neither a request nor the defaults of its API may override unnoticed
PRESET = {"temperature": 0.9, "top_k": 50, "top_p": 0.97, "min_p": 0.01}


class Connection(asyncio.Transport):
    """One connection with one request, from the view of the server: what it writes is collected.
    A client that reads slowly makes it pause after `room` bytes.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._is_closing = False
        self.received = bytearray()
        self.room: int | None = None  # None: the client reads at once
        self._is_paused = False
        protocol.connection_made(self)

    def send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        lines = {"host": "localhost", "content-length": str(len(content)), "connection": "close"}
        if body is not None:
            lines["content-type"] = "application/json"
        head = "".join(f"{name}: {value}\r\n" for name, value in (lines | dict(headers)).items())
        self._protocol.data_received(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += data
        if self.room is not None:
            self.room -= len(data)
            if self.room < 0 and not self._is_paused:
                self._is_paused = True
                self._protocol.pause_writing()

    def read(self, room: int | None) -> None:
        """The client reads again, at least so many bytes; None: all."""
        self.room = room
        if self._is_paused:
            self._is_paused = False
            self._protocol.resume_writing()

    def leave(self) -> None:
        """The client closes the connection."""
        if not self._is_closing:
            self._is_closing = True
            self._protocol.connection_lost(None)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        address = {"peername": ("127.0.0.1", 1234), "sockname": ("127.0.0.1", 80)}
        return address.get(name, default)


class ToyServer:
    """A server without sockets. `fresh` begins a history: a new engine, and nothing is cached."""

    def __init__(self, app: Any, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.clock, self._loop = app, clock, loop
        self._uvicorn = http_server(app, 5)
        self._uvicorn.config.load()
        self._state = ServerState()
        self._backend: ToyTextBackend | None = None
        self._shape: Shape = {}
        self.on_turn: Callable[[], None] = lambda: None  # called after each turn
        self.num_histories = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def fresh(self, shape: Shape) -> None:
        await self.close()
        self._shape, self.on_turn = shape, lambda: None
        self._limit_time(shape.get("limit_s") or NO_LIMIT_S)
        self.num_histories += 1
        await self._begin(ToyTextBackend(shape, self.clock))

    def _limit_time(self, seconds: float) -> None:
        """Requests of this history must end within so many seconds."""
        services = self.app.state.services
        limited = services.settings.server.model_copy(update={"request_timeout_s": seconds})
        settings = services.settings.model_copy(update={"server": limited})
        object.__setattr__(services, "settings", settings)  # they are frozen

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.stop()
            await self.settle()

    async def _begin(self, backend: ToyTextBackend) -> None:
        self._backend = backend
        await backend.start()
        self.app.state.services.holder.current = backend

    @property
    def backend(self) -> ToyTextBackend:
        assert self._backend is not None
        return self._backend

    def connect(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], room: int | None = None
    ) -> Connection:
        config = self._uvicorn.config
        protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self._state, app_state={}, _loop=self._loop
        )
        connection = Connection(protocol)
        connection.room = room
        connection.send(method, path, body, headers)
        return connection

    async def settle(self) -> None:
        """Run the event loop until it has nothing to do."""
        for _ in range(MAX_CALLBACKS):
            await asyncio.sleep(0)
            if not self._loop._ready:  # type: ignore[attr-defined]
                return
        raise AssertionError("the event loop does not come to rest")

    async def turn(self) -> None:
        """One iteration of the engine. Besides its step, the frontend takes time."""
        self.backend.client.turn()
        await self.settle()
        self.clock.advance(FRONTEND_S)
        self.on_turn()

    async def kill(self, num_read: int) -> None:
        """Kill the engine. The next one is there when time has passed."""
        self.backend.client.die(num_read)
        await self.settle()
        while self.backend.ready is None:
            self.clock.advance(RESTART_TICK_S)
            await self.settle()

    async def swap(self) -> None:
        """Another engine takes over all requests."""
        old = self.backend
        backend = ToyTextBackend(self._shape, self.clock)
        backend.seen = old.seen
        await self._begin(backend)
        backend.serve(old.adapters)
        assert old.hand_over(self.backend) is not None
        await old.stop()
        self.backend.engines[:0] = old.engines
        self.backend.clients[:0] = old.clients

    async def finish(self, connections: Sequence[Connection], most: int = MAX_TURNS) -> bool:
        """Take turns until all connections have their answers. Returns whether they have."""
        await self.settle()
        for _ in range(most):
            if all(each.is_closing() for each in connections):
                return True
            for each in connections:
                each.read(None)
            await self.turn()
        return False

    async def ask(self, method: str, path: str, key: str, body: Any = None) -> Reply:
        """The reply to a request beside those of the history."""
        connection = self.connect(method, path, body, {"authorization": f"Bearer {key}"})
        await self.finish([connection])
        reply = parse_reply(bytes(connection.received))
        assert reply is not None
        return reply


@contextmanager
def toy_server(folder: Path) -> Iterator[ToyServer]:
    """A server that is used again for many histories, because building its routes takes long."""
    settings = make_settings(
        server={"keys_file": write_keys(folder / "keys.json"), "request_timeout_s": NO_LIMIT_S},
        storage={"path": folder / "storage"},
        requests={"keep": 4096},
        tables=NamedTables(presets={"toy": PresetTable(parameters=PRESET)}),
    )
    loop = asyncio.new_event_loop()
    loop.set_default_executor(InlineExecutor())
    with given_clock("http") as clock, without_threads_and_files():
        app = create_app(settings, ToyTextBackend(ALONE, clock), Metrics("toy"))
        app.state.services.objects.database._thread = InlineExecutor()
        server = ToyServer(app, clock, loop)
        try:
            yield server
        finally:
            server.run(server.close())
            loop.close()
