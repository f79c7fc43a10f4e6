"""The entry point of an HTTP worker. It holds connections, parses HTTP, and writes answers.

The process takes its connections and its settings from inherited sockets. It exits when the main
process asks for it or is gone.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

from engine.core.observability.logging import setup_logging
from engine.core.sandbox.processes import die_with_parent, keep_all
from engine.ipc.connection import Connection
from engine.ipc.transport import ConnectionClosedError, SocketChannel
from engine.servers.http.protocol import (
    CLOSE_TIMEOUT_S,
    event_loop,
    http_server,
    raise_file_limit,
    serve_connection,
)
from engine.servers.http_workers.forwarder import Forwarder
from engine.servers.http_workers.messages import Close, Hello, Load, Setup, Taken, ToWorker

# The name is not __name__, because this module runs as __main__.
logger = logging.getLogger("engine.servers.http_workers.main")

SETUP_TIMEOUT_S = 30.0
LOAD_INTERVAL_S = 0.5


class HttpWorkerProcess:
    """Serves the connections that arrive at `door`, and exchanges messages over `sock`."""

    def __init__(self, setup: Setup, sock: socket.socket, door: socket.socket) -> None:
        self._sock = sock
        self._door = door
        self._pipe: Connection[ToWorker] = Connection(ToWorker, self._on_message, self._on_lost)
        self._forwarder = Forwarder(self._pipe)
        self._server = http_server(self._forwarder, CLOSE_TIMEOUT_S, setup.tls)
        self._connecting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await self._pipe.connect(self._sock)
        serving = asyncio.create_task(self._server.serve(sockets=[]))
        while not self._server.started:
            await asyncio.sleep(0.001)
        self._door.setblocking(False)
        loop.add_reader(self._door.fileno(), self._take)
        self._pipe.send(Hello())
        reporting = asyncio.create_task(self._report())
        await serving
        reporting.cancel()

    def _take(self) -> None:
        """Take the connections that the main process has passed."""
        count = 0
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._door, 1, 1)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data, fds = b"", []
            if not data:  # the main process is gone; the pipe's end is told as well
                asyncio.get_running_loop().remove_reader(self._door.fileno())
                return
            count += 1
            for fd in fds:
                task = asyncio.create_task(self._connect(socket.socket(fileno=fd)))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)
        if count:
            self._pipe.send(Taken(count))

    async def _connect(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a client that left, or whose TLS handshake failed
            await serve_connection(self._server, connection)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            self._pipe.send(Load(len(self._server.server_state.connections)))

    def _on_message(self, message: ToWorker) -> None:
        if isinstance(message, Close):
            self._server.should_exit = True
        else:
            self._forwarder.on_message(message)

    def _on_lost(self) -> None:
        if not self._server.should_exit:
            os._exit(1)  # without the main process there is nothing to serve, and nothing to save


def main(socket_fd: int, door_fd: int, parent_pid: int) -> int:
    die_with_parent(parent_pid)
    # The main process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock, door = socket.socket(fileno=socket_fd), socket.socket(fileno=door_fd)
    channel: SocketChannel[Setup] = SocketChannel(sock, Setup)
    try:
        setup = next(iter(channel.poll(SETUP_TIMEOUT_S)), None)
    except ConnectionClosedError:
        return 0
    if setup is None:
        return 1
    setup_logging(setup.log_level, setup.log_format)
    raise_file_limit()
    keep_all()
    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(_serve(setup, sock, door))
    return 0


async def _serve(setup: Setup, sock: socket.socket, door: socket.socket) -> None:
    await HttpWorkerProcess(setup, sock, door).run()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
