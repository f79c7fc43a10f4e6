"""Starts the HTTP workers and passes connections to them.

The main process accepts connections itself until the first worker is ready, and whenever none is.
So a server is reachable while its workers start, and even if they can't start. A worker that died
is started again. The clients of its connections have lost them; no other request notices. A worker
that is frozen gets no connections. If it stays frozen, it is killed and replaced.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine

from starlette.types import ASGIApp

from engine.core.config_schema import Settings
from engine.core.observability.logging import current_setup
from engine.core.sandbox.liveness import LivenessVerdict
from engine.ipc.child_process import RestartPolicy
from engine.servers.http_workers.messages import Setup
from engine.servers.http_workers.worker import HttpWorker

logger = logging.getLogger(__name__)

MAX_ACCEPTED = 64  # connections per iteration of the event loop
COOL_DOWN_S = 60.0  # after too many deaths of workers
RETRY_S = 5.0  # after a worker could not be started
CHECK_S = 0.5


class HttpWorkers:
    """The HTTP workers of a server. `sock` is the server's socket. `accept_here` serves a
    connection in this process. `stop_accepting` is called once, when connections are accepted here
    no longer.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        settings: Settings,
        accept_here: Callable[[socket.socket], None],
        stop_accepting: Callable[[], None],
    ) -> None:
        self._app = app
        self._sock = sock
        tls = settings.server.tls_files
        self._setup = Setup(*current_setup(), None if tls is None else (str(tls[0]), str(tls[1])))
        self._accept_here = accept_here
        self._stop_accepting = stop_accepting
        self._is_accepting = self._is_stopping = False
        self._workers: list[HttpWorker] = []
        self._restarts = RestartPolicy()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._workers]

    @property
    def num_ready(self) -> int:
        return sum(each.is_ready for each in self._workers)

    async def start(self, count: int) -> None:
        for _ in range(count):
            if not await self._add():
                self._keep(self._add_later(RETRY_S))
        self._keep(self._watch())

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, let the open requests finish within `grace_s`, and end the workers."""
        self._is_stopping = True
        if self._is_accepting:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(each.close(grace_s) for each in self._workers))

    async def _add(self) -> bool:
        """Start an HTTP worker. Returns False if that is not possible now."""
        try:
            worker = HttpWorker(self._app, self._setup, self._on_ready, self._on_lost)
        except OSError:  # such as too many open files or processes
            logger.exception("a frontend process could not be started; it is tried again")
            return False
        self._workers.append(worker)
        await worker.begin()
        return True

    async def _add_later(self, delay: float) -> None:
        await asyncio.sleep(delay)
        while not await self._add():
            await asyncio.sleep(RETRY_S)

    def _on_ready(self) -> None:
        if not self._is_accepting and not self._is_stopping:
            self._is_accepting = True
            self._stop_accepting()
            with contextlib.suppress(OSError):  # Linux passes this option on to connections
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._listen()

    def _listen(self) -> None:
        if not self._is_stopping:
            self._sock.setblocking(False)
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _on_lost(self, worker: HttpWorker) -> None:
        self._workers.remove(worker)
        if self._is_stopping:
            return
        delay = self._restarts.delay_after_death()
        logger.error("a frontend process ended, with the connections of its clients")
        worker.kill()
        for connection in worker.not_taken():
            self._pass_on(connection)
        self._keep(self._replace(worker, COOL_DOWN_S if delay is None else delay))

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine until the HTTP workers stop."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Wake workers that are silent, and kill those that do not go on."""
        while True:
            await asyncio.sleep(CHECK_S)
            for worker in list(self._workers):
                verdict = worker.check()
                if verdict is LivenessVerdict.WAKE:
                    logger.error("a frontend process is silent; waking it (%s)", worker.silence)
                    worker.wake()
                elif verdict is LivenessVerdict.GIVE_UP:
                    logger.error(
                        "a frontend process is still silent; killing it (%s)", worker.silence
                    )
                    worker.kill()  # its pipe ends, which calls `_on_lost`

    async def _replace(self, worker: HttpWorker, delay: float) -> None:
        await worker.ended()
        await self._add_later(delay)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:  # such as too many open files
                logger.warning("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(1.0, self._listen)
                return
            self._pass_on(connection)

    def _pass_on(self, connection: socket.socket) -> None:
        """Pass a connection to the worker that has the fewest."""
        ready = [each for each in self._workers if each.is_ready and not each.is_frozen]
        for worker in sorted(ready, key=lambda each: each.num_connections):
            if worker.take(connection):
                return
        self._accept_here(connection)
