"""An engine's process from the outside: started at once, told what to run when that is known.

Its interpreter and its imports take as long as the frontend's own, so whoever is about to need an
engine starts one first and gets ready beside it. Nothing heavy is imported here for that reason.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from engine.backends.custom.ipc.heartbeat import Heartbeat, heartbeat_file
from engine.core.sandbox.processes import start_child

if TYPE_CHECKING:
    from pathlib import Path

    import msgspec

WORKER_MODULE = "engine.backends.custom.worker.main"
STACKS_SIGNAL = signal.SIGUSR1  # the engine's process answers with its stacks on stderr


class EngineProcess:
    """A child that waits for its options on `socket`; without them it ends when that closes."""

    def __init__(self, module: str = WORKER_MODULE) -> None:
        self.has_begun = False
        self.socket, theirs = socket.socketpair()
        with theirs, heartbeat_file() as file:  # the mapping outlives the file
            self.heartbeat = Heartbeat(file.fileno())
            fds = (theirs.fileno(), file.fileno())
            argv = [sys.executable, "-m", module, *map(str, fds), str(os.getpid())]
            try:
                self.process: subprocess.Popen[bytes] = start_child(argv, fds)
            except OSError:
                self.socket.close()
                raise

    def begin(self, options: "msgspec.Struct") -> None:
        """Let it load; its answer comes over the socket."""
        self.has_begun = True
        self._send(options)

    def examine(self, examiner: str, path: "Path", max_cpu_s: int) -> "ForkedReading":
        """Have it examine a model in a fork of itself, which has imported the parsers already."""
        from engine.core.interfaces.request import Examine

        self._send(Examine(examiner, str(path), max_cpu_s))
        return ForkedReading(self)

    def discard(self) -> None:
        """Nobody will need it."""
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def _send(self, message: "msgspec.Struct") -> None:
        from engine.backends.custom.ipc.transport import encode_frame

        with contextlib.suppress(OSError):  # it has died: whoever reads from it will see that
            self.socket.sendall(encode_frame(message))


class ForkedReading:
    """An examination in a fork of an engine's process, which lasts no longer than that."""

    def __init__(self, process: EngineProcess) -> None:
        self._socket = process.socket

    def wait(self, max_seconds: float) -> tuple[int, bytes]:
        """Raises `ConnectionClosedError` where the engine's process has ended."""
        from engine.backends.custom.ipc.transport import SocketChannel
        from engine.core.interfaces.request import Examined

        channel: SocketChannel[Examined] = SocketChannel(self._socket, Examined)
        deadline = time.monotonic() + max_seconds
        while (left := deadline - time.monotonic()) > 0:
            for found in channel.poll(left):  # none, while there is but a part of it
                return found.status, found.output
        raise TimeoutError

    def end(self) -> None:
        """It has answered, or will be ended with the engine's process."""
