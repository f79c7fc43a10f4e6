"""Starts the engine process early and sends it the options later.

The engine process takes about as long as the frontend to start and to import its modules. So the
frontend starts the engine process first and imports its own modules meanwhile. It sends the options
once they are known. This module imports nothing heavy, so that it does not delay the start.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from engine.core.sandbox.liveness import Heartbeat, heartbeat_file
from engine.core.sandbox.processes import kill_child, socket_pair, start_child

if TYPE_CHECKING:
    from pathlib import Path

    import msgspec

WORKER_MODULE = "engine.worker.main"
SEND_TIMEOUT_S = 5.0
STACKS_SIGNAL = signal.SIGUSR1  # on this signal, the engine process dumps its stacks to stderr


class EngineProcess:
    """The engine as a child process, which waits for its options on `socket`. If the socket is
    closed before the options arrive, the child exits.
    """

    def __init__(self, module: str = WORKER_MODULE) -> None:
        self.has_begun = False
        self.socket, theirs = socket_pair()
        with theirs, heartbeat_file() as file:  # the mapping stays valid after the file is closed
            self.heartbeat = Heartbeat(file.fileno())
            self.heartbeat.tick()  # the child is alive until it is silent
            fds = (theirs.fileno(), file.fileno())
            argv = [sys.executable, "-m", module, *map(str, fds), str(os.getpid())]
            try:
                self.process: subprocess.Popen[bytes] = start_child(argv, fds)
            except OSError:
                self.socket.close()
                raise

    def begin(self, options: "msgspec.Struct") -> None:
        """Send the options to the child, which then loads the model. The child answers with `Ready`
        or `Fatal` over the socket.
        """
        self.has_begun = True
        self.heartbeat.tick()  # until now, the child had nothing to do
        self._send(options)

    def validate(self, validator: str, path: "Path", max_cpu_s: int) -> "ForkedReading":
        """Validate a model's files in a fork of the child. This is fast, because the child has
        already imported the parsers.
        """
        from engine.core.interfaces.request import Validate

        self._send(Validate(validator, str(path), max_cpu_s))
        return ForkedReading(self)

    def discard(self) -> None:
        """Kill the child process, which is no longer needed."""
        self.socket.close()
        kill_child(self.process)

    def _send(self, message: "msgspec.Struct") -> None:
        from engine.ipc.transport import encode_frame

        # If sending fails, the child is dead, or frozen with a full socket. The reader of the
        # socket, or who watches the heartbeat, will notice and report it.
        with contextlib.suppress(OSError):
            self.socket.settimeout(SEND_TIMEOUT_S)
            self.socket.sendall(encode_frame(message))


class ForkedReading:
    """A validation of a model that runs in a fork of the engine process. The fork ends when the
    engine process ends.
    """

    def __init__(self, process: EngineProcess) -> None:
        self._socket = process.socket

    def wait(self, max_seconds: float) -> tuple[int, bytes]:
        """Wait for the validation. Returns its exit status and output. Raises
        `ConnectionClosedError` if the engine process has ended.
        """
        import msgspec

        from engine.core.interfaces.request import Validated
        from engine.ipc.transport import LENGTH, length_in

        deadline = time.monotonic() + max_seconds
        length = length_in(self._read(LENGTH.size, deadline))
        found = msgspec.msgpack.decode(self._read(length, deadline), type=Validated)
        return found.status, found.output

    def _read(self, count: int, deadline: float) -> bytes:
        """Read so many bytes and no more, because other messages may follow the answer."""
        from engine.ipc.transport import ConnectionClosedError

        data = bytearray()
        while len(data) < count:
            if not select.select([self._socket], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError
            try:
                read = self._socket.recv(count - len(data))
            except ConnectionError:
                read = b""
            if not read:
                raise ConnectionClosedError("the engine process has ended")
            data += read
        return bytes(data)

    def end(self) -> None:
        """Does nothing, because the fork has answered or will end with the engine process."""
