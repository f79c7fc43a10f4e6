"""Jobs that the server runs in the background, and the locks by which servers share them.

Jobs are rows of a database. Servers with the same storage directory share them, and the server that
holds a file lock runs those that belong to the lock. Another one takes over when the lock is free,
because the kernel releases it when a process ends for any reason.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from pathlib import Path

from engine.core.errors import EngineError
from engine.servers.storage.database import Database

logger = logging.getLogger(__name__)

# Between two looks for a database that does not exist. This server is woken when it makes one
# itself, so only another server may make one meanwhile, and that server runs its jobs.
ABSENT_S = 60.0


class FileLock:
    """A lock that one process holds at a time. The kernel releases it when the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        return self._fd is not None

    def acquire(self) -> bool:
        """Try to take the lock. Returns whether this process holds the lock now."""
        if self._fd is not None:
            return True
        fd = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Release the lock and delete its file, if this process holds the lock."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            self.release()


class JobTasks:
    """A component whose tasks run until the server stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Does nothing: requests begin the tasks."""

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class JobQueue(JobTasks, ABC):
    """A component that looks for jobs again and again: at once when there is news, and else after
    `rest_s`, or after `fault_s` when a look has failed. `kind` names the jobs in the log. The queue
    does not touch the disk until the database file exists.
    """

    def __init__(self, kind: str, database: Database, rest_s: float, fault_s: float) -> None:
        super().__init__()
        self._kind = kind
        self._database = database
        self._directory = database.path.parent
        self._rest_s = rest_s
        self._fault_s = fault_s
        self._locks: dict[str, FileLock] = {}
        self._awake = asyncio.Event()

    async def start(self) -> None:
        self.begin(self._run())

    async def stop(self) -> None:
        await super().stop()
        for lock in self._locks.values():
            lock.release()

    def wake(self) -> None:
        """There is news: a job was created, or has another status."""
        self._awake.set()

    @abstractmethod
    async def look(self) -> None:
        """Run or begin the jobs that wait. An `EngineError` lets all of them wait."""

    def holds(self, name: str) -> bool:
        """Whether this server holds the lock of this name, which it takes if it is free."""
        return self.lock(name).acquire()

    def lock(self, name: str) -> FileLock:
        return self._locks.setdefault(name, FileLock(self._directory / f"{name}.lock"))

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until there is news."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._awake.wait()
        self._awake.clear()

    async def _run(self) -> None:
        while True:
            rest_s = self._fault_s
            try:
                if self._database.path.exists():
                    await self.look()
                    rest_s = self._rest_s
                else:
                    rest_s = ABSENT_S
            except EngineError as error:
                logger.warning("%s: jobs wait: %s", self._kind, error)
            except Exception:  # of the storage directory, or a bug; other jobs may still run
                logger.exception("%s: jobs wait after a failure", self._kind)
            await self.pause(rest_s)
