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
from typing import TYPE_CHECKING

from engine.backends.custom.runtime.heartbeat import Heartbeat, heartbeat_file
from engine.core.utils.processes import start_child

if TYPE_CHECKING:
    import msgspec

WORKER_MODULE = "engine.backends.custom.worker"
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
        from engine.backends.custom.runtime.transport import encode_frame

        self.has_begun = True
        with contextlib.suppress(OSError):  # it has died: whoever reads from it will see that
            self.socket.sendall(encode_frame(options))

    def discard(self) -> None:
        """Nobody will need it."""
        self.socket.close()
        self.process.kill()
        self.process.wait()
