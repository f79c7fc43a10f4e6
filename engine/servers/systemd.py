"""What systemd is told where it started the server: that it is ready, that it moves, that it ends.

With `Type=notify` the unit is up when the model is. With `WatchdogSec=` a sign of life is due in
time, and it is given only while the backend is well: its health follows the engine's step counter,
so that an engine which neither moves nor comes back is replaced, whole, with the server.
"""

import asyncio
import os
import socket
from collections.abc import Callable


class ServiceManager:
    """`socket_path` and `watchdog_s` as systemd gives them; without a path nobody is told."""

    def __init__(self, socket_path: str | None, watchdog_s: float | None = None) -> None:
        self._path = socket_path
        self._watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls) -> "ServiceManager":
        """Not for children: what they would say is not this server's."""
        path, limit = os.environ.pop("NOTIFY_SOCKET", None), os.environ.pop("WATCHDOG_USEC", "")
        watched = os.environ.pop("WATCHDOG_PID", None) in (None, str(os.getpid()))
        return cls(path, int(limit) / 1e6 if limit.isdecimal() and watched else None)

    def tell(self, state: str) -> None:
        """A manager that does not listen is no reason to stop."""
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
        """Until cancelled: two signs of life in the time for one."""
        while self._path and self._watchdog_s:
            if is_well():
                self.tell("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)
