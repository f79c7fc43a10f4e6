"""A program in a pseudo-terminal, driven as a user would: by what it shows and by keys."""

import errno
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Sequence
from fcntl import ioctl
from types import TracebackType
from typing import Self

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][AB0]|[\x00\x07]")
# Only a program that hangs takes this long.
PATIENCE_S = 20.0


def engine_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "engine.cli.main", *arguments]


class Terminal:
    """Runs a command with a terminal of `columns` columns. `text` is what it has shown so far,
    without escape sequences; `raw` has them.
    """

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, columns: int = 80
    ) -> None:
        self.raw = ""
        self._seen = 0  # `wait_for` searches what comes after this place
        self.pid, self._fd = pty.fork()
        if self.pid == 0:  # the child
            # Shells let what runs in the background ignore it, and a program passes that on.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # The environment is passed as a whole, because readline sets variables in C.
            hidden = {"COLUMNS", "LINES", "NO_COLOR"}
            kept = {name: value for name, value in os.environ.items() if name not in hidden}
            changes = {"TERM": "xterm-256color", "NO_PROXY": "*"} | (env or {})
            os.execvpe(command[0], list(command), kept | changes)
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def say(self, line: str) -> None:
        self.type(line + "\r")

    def wait_for(self, shown: str) -> str:
        """Wait until `shown` appears after what was waited for. Returns the text up to it."""
        deadline = time.monotonic() + PATIENCE_S
        while (place := self.text.find(shown, self._seen)) < 0:
            if not self._read(deadline):
                raise AssertionError(f"{shown!r} did not appear in:\n{self.text}")
        before = self.text[self._seen : place]
        self._seen = place + len(shown)
        return before

    def interrupt(self, shown: str) -> None:
        """Press Ctrl-C until `shown` appears. Python's `input` notices an interrupt that comes
        before it waits only with the next key, so Ctrl-C may have to be pressed again.
        """
        deadline = time.monotonic() + PATIENCE_S
        while self.text.find(shown, self._seen) < 0 and time.monotonic() < deadline:
            self.type("\x03")
            pause = time.monotonic() + 1.0
            while self.text.find(shown, self._seen) < 0 and self._read(pause):
                pass
        self.wait_for(shown)

    def wait_for_end(self) -> int:
        """Wait until the program ends. Returns its exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        if time.monotonic() >= deadline:
            raise AssertionError(f"it did not end, and has shown:\n{self.text}")
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            found = os.read(self._fd, 65536)
        except OSError as error:  # Linux reports the end of a terminal as an error
            if error.errno != errno.EIO:
                raise
            return False
        self.raw += found.decode("utf-8", "replace")
        return bool(found)
