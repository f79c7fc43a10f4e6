"""Starts and ends one run of an external program, through a launcher process. Meanwhile it forwards
the program's output and records its processes.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from engine.backends.external.child_logs import ChildLog, ChildOutput
from engine.backends.external.reaping import (
    ChildRecord,
    RecordFile,
    family_of,
    kill_marked,
    mark_of,
    memory_of,
)
from engine.core.sandbox.processes import start_child
from engine.ipc.child_process import ChildProcess

LAUNCHER = "engine.backends.external.launcher"
# Extra time for the launcher to end, after the grace period of its program.
LAUNCHER_GRACE_S = 2.0
LAST_WORDS_S = 0.5


class ExternalChild:
    """A running program. Call `start` to create an instance. `ended` gets the exit status when the
    program has ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        ours: socket.socket,
        logs: tuple[asyncio.BaseTransport, ChildOutput],
        record: RecordFile,
        grace_s: float,
    ) -> None:
        self._launcher = ChildProcess(process)
        self._ours = ours
        self._logs = logs
        self._record = record
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._reporting: asyncio.Task[None] | None = None
        self._loop.add_reader(ours, self._on_closed)

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: ChildLog,
        *,
        grace_s: float,
        folder: str = "",
    ) -> Self:
        """Start the program. `folder` is deleted when the program has ended. Raises `OSError` if no
        process can be started.
        """
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        with theirs, os.fdopen(writing, "wb") as output:
            logs = await asyncio.get_running_loop().connect_read_pipe(
                log.begin, os.fdopen(reading, "rb")
            )
            try:
                launcher = [sys.executable, "-m", LAUNCHER, str(theirs.fileno())]
                process = start_child(launcher, (theirs.fileno(),), output=output.fileno())
            except OSError:
                logs[0].close()
                ours.close()
                raise
        mark = mark_of(process.pid)
        assert mark is not None, "a child that was not reaped still has its pid"
        record = RecordFile(ChildRecord(name, (mark,), folder))
        child = cls(process, ours, logs, record, grace_s)
        order = {
            "argv": list(argv),
            "env": dict(env),
            "grace_s": grace_s,
            "record": str(record.path),
            "folder": folder,
        }
        with suppress(OSError):  # the launcher has died; its exit status says so
            ours.sendall(json.dumps(order).encode() + b"\n")
        return child

    @property
    def pid(self) -> int:
        """Process id of the launcher, of which all other processes are descendants."""
        return self._launcher.pid

    def note_processes(self) -> None:
        """Record the program's current processes, so that they can be killed if our process
        crashes.
        """
        self._record.update(family_of(self._record.processes[0]))

    def memory_bytes(self) -> int:
        return memory_of(family_of(self._record.processes[0]))

    async def stop(self) -> None:
        """Terminate the program and kill it if it does not end. None of its processes remains."""
        self.note_processes()
        if self._launcher.is_alive:
            self._launcher.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s + LAUNCHER_GRACE_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self._launcher.kill()
        finally:
            # This also runs if the wait was cancelled. It blocks only if a process can't be killed.
            self._launcher.kill()
            kill_marked(self._record.processes)
            self._close()

    def _on_closed(self) -> None:
        self._loop.remove_reader(self._ours)
        self._reporting = self._loop.create_task(self._report())

    async def _report(self) -> None:
        status = await self._launcher.wait()
        # Wait for the last output, which may explain why the program ended.
        await asyncio.wait([self._logs[1].closed], timeout=LAST_WORDS_S)
        if not self.ended.done():
            self.ended.set_result(status)

    def _close(self) -> None:
        self._loop.remove_reader(self._ours)
        self._ours.close()
        self._logs[0].close()
        self._record.remove()


def ending(status: int) -> str:
    """A text for an exit status."""
    number = -status if status < 0 else status - 128
    if 0 < number < signal.NSIG:
        with suppress(ValueError):
            return f"signal {signal.Signals(number).name}"
    return f"exit status {status}"
