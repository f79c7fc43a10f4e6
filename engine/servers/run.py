"""Runs the application on a bound socket, loads the model, and shuts down.

The socket is bound before weights are read. So a port conflict is found at once, and probes are
answered while the model loads. The first SIGTERM or SIGINT drains the server: `/readyz` returns
503, new requests are refused, and running requests may finish until a deadline. Requests that are
still running at the deadline are aborted. A second signal stops the server at once.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from engine.core.config_schema import ServerSettings
from engine.servers.app import LateRoutes
from engine.servers.http.protocol import (
    CLOSE_TIMEOUT_S,
    event_loop,
    http_server,
    raise_file_limit,
    serve_connection,
)
from engine.servers.ops.probes import ProbeServer
from engine.servers.serving.services import Services

if TYPE_CHECKING:
    from engine.routing.nodes.manager import NodeManager
    from engine.servers.http_workers.pool import HttpWorkers

logger = logging.getLogger(__name__)

# While a model loads, its progress is checked at this interval in seconds and logged if it has
# changed. Our own backend is usually ready before the first check.
PROGRESS_INTERVAL_S = 5.0
DEVICES = Path("/dev")
# Seconds between the model being ready and the import of the late routes (see `app.py`). An earlier
# import would slow down requests that waited for the model.
LATE_ROUTES_AFTER_S = 0.5
# If the model still loads after this many seconds, what the first requests and the late routes need
# is imported meanwhile. So no import is in the way of the first requests.
SLOW_START_S = 2.0
# With `server.frontends` "auto", a server whose engine runs on an accelerator has this many
# frontend processes, if the machine has enough cores.
AUTO_FRONTENDS = 3
AUTO_MIN_CORES = 8


class ServiceManager:
    """Tells systemd through its notify socket that the server is ready, alive or stopping. Does
    nothing if `socket_path` is None.
    """

    def __init__(self, socket_path: str | None, watchdog_s: float | None = None) -> None:
        self._path = socket_path
        self._watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls) -> "ServiceManager":
        """Read systemd's environment variables and remove them, so that child processes don't
        notify systemd.
        """
        path, limit = os.environ.pop("NOTIFY_SOCKET", None), os.environ.pop("WATCHDOG_USEC", "")
        watched = os.environ.pop("WATCHDOG_PID", None) in (None, str(os.getpid()))
        return cls(path, int(limit) / 1e6 if limit.isdecimal() and watched else None)

    def tell(self, state: str) -> None:
        """Send `state` to systemd. Errors are ignored."""
        if not self._path:
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            try:
                sock.sendto(state.encode(), address)
            except OSError:
                return

    async def watch(self, is_well: Callable[[], bool]) -> None:
        """Notify systemd's watchdog twice per watchdog interval, but only while `is_well()` is
        true. Runs until it is cancelled.
        """
        while self._path and self._watchdog_s:
            if is_well():
                self.tell("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)


def num_frontends(server: ServerSettings, *, is_accelerated: bool) -> int:
    """The number of frontend processes, including this one."""
    if server.frontends != "auto":
        return server.frontends
    # Nodes join over connections of this process.
    needs_more = is_accelerated and server.node_token is None
    return AUTO_FRONTENDS if needs_more and (os.cpu_count() or 1) >= AUTO_MIN_CORES else 1


def has_gpu() -> bool:
    """Whether the machine has the device file of a GPU. This takes no driver, and no import."""
    return (DEVICES / "kfd").exists() or any(DEVICES.glob("nvidia[0-9]*"))


class HttpServer:
    """Serves an application from `create_app`: starts its backend and background components,
    handles signals, and stops everything at the end.
    """

    def __init__(
        self,
        app: FastAPI,
        sock: socket.socket,
        on_ready: Callable[[float], None] | None = None,
        on_progress: Callable[[str], None] | None = None,
        probe_sock: socket.socket | None = None,
    ) -> None:
        services = app.state.services
        assert isinstance(services, Services)
        self._app = app
        self._services = services
        self._late_routes: LateRoutes = app.state.late_routes
        self._sock = sock
        self._on_ready = on_ready
        self._on_progress = on_progress
        self._manager = ServiceManager.from_environment()
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        if probe_sock is not None:
            services.components.insert(0, ProbeServer(services, probe_sock))
        self.http_workers: HttpWorkers | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._nodes: NodeManager | None = app.state.nodes
        upgrades = {} if self._nodes is None else self._nodes.upgrades
        tls = services.settings.server.tls_files
        self._uvicorn = http_server(app, CLOSE_TIMEOUT_S, tls, upgrades)

    async def serve(self) -> None:
        """Serve until a signal stops the server. If the backend can't be started, raises the
        backend's error.
        """
        for component in self._services.components:
            await component.start()
        loading = asyncio.create_task(self._load())
        tasks = [
            loading,
            asyncio.create_task(self._services.watcher.run()),
            asyncio.create_task(self._manager.watch(self._is_well)),
        ]
        try:
            # uvicorn wakes up many times a second. A task of its own does not resume this one, too.
            await asyncio.create_task(self._uvicorn.serve(sockets=[self._sock]))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.http_workers is not None:
                await self.http_workers.stop(CLOSE_TIMEOUT_S)
            for component in reversed(self._services.components):
                await component.stop()
            await self._services.backend.stop()
        if not loading.cancelled():
            loading.result()

    def handle_signal(self) -> None:
        """Stop the server. The first call lets running requests finish until the drain timeout. A
        second call aborts them and stops at once.
        """
        self._num_signals += 1
        if self._num_signals == 1:
            self._manager.tell("STOPPING=1")
            logger.info("draining: running requests may finish, new ones are refused")
            self._draining = asyncio.create_task(self._drain())
        else:
            logger.warning("stopping now")
            self._services.lifecycle.fail_all()
            self._exit()

    def reload(self) -> None:
        """Start reloading API keys, limits and the log level. If a setting is invalid, nothing
        changes.
        """
        self._reloading = asyncio.create_task(self._reload())

    async def _reload(self) -> None:
        from engine.servers.ops.reload import reload_settings

        await reload_settings(self._services, "SIGHUP")

    async def _load(self) -> None:
        try:
            begun = time.monotonic()
            telling = asyncio.create_task(self._tell_progress())
            starting = asyncio.ensure_future(self._services.backend.start())
            try:
                if not (await asyncio.wait({starting}, timeout=SLOW_START_S))[0]:
                    await asyncio.to_thread(prepare_first_request)
                    await self._late_routes.add()
                    await self._start_writers(is_accelerated=has_gpu())
                await starting
            finally:
                telling.cancel()
                starting.cancel()
            seconds = time.monotonic() - begun
            self._services.metrics.engine_ready(seconds)
            self._manager.tell("READY=1")
            if self._on_ready is not None:
                self._on_ready(seconds)
            await self._start_writers(is_accelerated=self._services.backend.is_accelerated)
            await asyncio.sleep(LATE_ROUTES_AFTER_S)
            await self._late_routes.add()
        except BaseException:
            self._uvicorn.should_exit = True
            raise

    async def _start_writers(self, *, is_accelerated: bool) -> None:
        """Start the other frontend processes, if there are any. If the model takes long to load,
        they start meanwhile, so that the first requests do not meet processes that are starting.
        Else they start when the model is ready, because they would delay that.
        """
        services = self._services
        count = num_frontends(services.settings.server, is_accelerated=is_accelerated) - 1
        if count == 0 or self.http_workers is not None:
            return
        # Imported late, because few servers have any.
        from engine.servers.http_workers.pool import HttpWorkers

        while not self._uvicorn.started:
            await asyncio.sleep(0.01)
        # uvicorn closes its descriptor of the socket when it accepts no more connections.
        shared = (self._app, self._sock.dup(), services.settings)
        self.http_workers = HttpWorkers(*shared, self._accept, self._uvicorn.servers[0].close)
        await self.http_workers.start(count)

    def _accept(self, connection: socket.socket) -> None:
        """Serve a connection in this process."""
        task = asyncio.create_task(serve_connection(self._uvicorn, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _is_well(self) -> bool:
        return self._services.backend.health().ready

    async def _tell_progress(self) -> None:
        """Report the progress of a slow backend start to `on_progress`, whenever it has changed."""
        told = ""
        while self._on_progress is not None:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            detail = self._services.backend.health().detail
            if detail != told:
                self._on_progress(detail)
                told = detail

    async def _drain(self) -> None:
        await self._services.lifecycle.drain(self._services.settings.server.drain_timeout_s)
        self._exit()

    def _exit(self) -> None:
        if self._nodes is not None:
            self._nodes.close()  # uvicorn waits until all connections are closed
        self._uvicorn.should_exit = True


def prepare_first_request() -> None:
    """Imports what a library imports at its first use, and builds the checks of bodies."""
    import anyio._backends._asyncio  # noqa: F401

    from engine.servers.openai.schema import ChatBody, CompletionBody

    for kind in (ChatBody, CompletionBody):
        kind.model_rebuild()


def run_server(
    app: FastAPI,
    sock: socket.socket,
    on_ready: Callable[[float], None] | None = None,
    on_progress: Callable[[str], None] | None = None,
    probe_sock: socket.socket | None = None,
) -> None:
    """Serve on the main thread until a signal stops the server. Returns after an orderly
    shutdown.
    """
    raise_file_limit()
    server = HttpServer(app, sock, on_ready, on_progress, probe_sock)

    async def serve_with_signals() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_signal)
        loop.add_signal_handler(signal.SIGHUP, server.reload)
        await server.serve()

    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(serve_with_signals())
