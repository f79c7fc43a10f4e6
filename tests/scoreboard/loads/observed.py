"""`engine serve`, with event loop stalls written to a file twice a second, as lines of JSON:

    python -m tests.scoreboard.loads.observed serve MODEL ...

A stall is how late a task runs that is due every two milliseconds, minus the time that its thread
waited for a CPU. The wait is the machine's fault; the rest (a long callback, a lock, a thread that
holds the GIL) is the server's.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.cli.main import main
from engine.servers.run import HttpServer
from tests.scoreboard.served_engine import Served, served_engine

FILE_VARIABLE = "SCOREBOARD_OBSERVATIONS"
TICK_S = 0.002
LINE_EVERY_S = 0.5


class Look(msgspec.Struct, frozen=True):
    """One line of output. Times are of the monotonic clock."""

    at: float
    stall_s: float  # the longest stall since the previous line
    late_s: float  # the same, including time without a CPU
    num_tasks: int


class Looks:
    def __init__(self, path: Path) -> None:
        self._path = path

    def between(self, began: float, ended: float) -> list[Look]:
        lines = self._path.read_bytes().splitlines()
        looks = [msgspec.json.decode(line, type=Look) for line in lines]
        return [look for look in looks if began <= look.at <= ended]


@contextmanager
def observed_engine(
    *arguments: str, env: dict[str, str] | None = None
) -> Iterator[tuple[Served, Looks]]:
    """Like `served_engine`, with the observations of its event loop."""
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as folder:
        path = Path(folder) / "looks.jsonl"
        given = {FILE_VARIABLE: str(path)} | (env or {})
        with served_engine(*arguments, env=given, module=__name__) as served:
            yield served, Looks(path)


async def _observe(path: str) -> None:
    waited_s = _waiting_time()
    with open(path, "ab", buffering=0) as file:
        written = before = time.monotonic()
        waited_before = waited_s()
        stall_s = late_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now, waited = time.monotonic(), waited_s()
            late = now - before - TICK_S
            late_s = max(late_s, late)
            stall_s = max(stall_s, late - (waited - waited_before))
            before, waited_before = now, waited
            if now - written > LINE_EVERY_S:
                look = Look(now, stall_s, late_s, len(asyncio.all_tasks()))
                file.write(msgspec.json.encode(look) + b"\n")
                written, stall_s, late_s = now, 0.0, 0.0


def _waiting_time() -> Callable[[], float]:
    """How long this thread has waited for a CPU, in seconds."""
    handle = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    return lambda: int(os.pread(handle, 64, 0).split()[1]) / 1e9


def _watch_servers() -> None:
    serve = HttpServer.serve

    async def observed(server: HttpServer) -> None:
        watching = asyncio.create_task(_observe(os.environ[FILE_VARIABLE]))
        try:
            await serve(server)
        finally:
            watching.cancel()

    HttpServer.serve = observed  # type: ignore[method-assign]


if __name__ == "__main__":
    _watch_servers()
    main()
