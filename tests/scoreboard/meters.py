"""Measurements of processes, and statistics over samples, for figures about load."""

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.scoreboard.streams import HasAddress, Reply

MEBIBYTE = 2**20
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIVEZ_INTERVAL_S = 0.02


def token_gaps(replies: Iterable[Reply], since: float, until: float) -> list[float]:
    """Seconds between the tokens of streams that arrived between two times.

    The first piece is left out: it may be the stream's opening, which does not wait for a token.
    """
    return [
        later - earlier
        for reply in replies
        for earlier, later in itertools.pairwise(reply.times[1:])
        if since <= earlier and later <= until
    ]


def slope_per_minute(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line through (seconds, value); 0 for a very short time
    span.
    """
    if len(points) < 3:
        return 0.0
    seconds, values = zip(*points, strict=True)
    return statistics.linear_regression(seconds, values).slope * 60


def mann_whitney_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value by the normal approximation, which is good from about twenty values on."""
    count, others = len(first), len(second)
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    rank_sum, ties, start = 0.0, 0, 0
    while start < len(ranked):
        end = start
        while end < len(ranked) and ranked[end][0] == ranked[start][0]:
            end += 1
        mean_rank = (start + 1 + end) / 2
        rank_sum += mean_rank * sum(which == 0 for _, which in ranked[start:end])
        ties += (end - start) ** 3 - (end - start)
        start = end
    total = count + others
    spread = math.sqrt(count * others / 12 * (total + 1 - ties / (total * (total - 1))))
    if spread == 0:
        return 1.0
    distance = abs(rank_sum - count * (total + 1) / 2)
    return math.erfc(max(0.0, distance - 0.5) / spread / math.sqrt(2))


def rss_of(processes: Iterable[psutil.Process]) -> int:
    """RSS in bytes; 0 for a process that has ended."""
    total = 0
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


def queued_ns(pid: int | str = "self") -> dict[str, int]:
    """How long each thread of a process was runnable but not running, in nanoseconds."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            found[task.name] = int((task / "schedstat").read_text().split()[1])
    return found


@dataclass
class Probing:
    """The latencies of /livez."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def probing(server: HasAddress, *, fresh: bool = False) -> AsyncIterator[Probing]:
    """Query /livez continuously until the block ends; `fresh`: with a new connection each time."""
    probes = Probing()
    task = asyncio.create_task(_probe(server, probes, fresh))
    try:
        yield probes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _probe(server: HasAddress, probes: Probing, fresh: bool) -> None:
    writer: asyncio.StreamWriter | None = None
    while True:
        began = time.monotonic()
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(*server.address)
            writer.write(LIVEZ)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            if b" 200 " not in head.split(b"\r\n")[0]:
                probes.failures.append(head.decode("latin-1")[:80])
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            probes.failures.append(f"{type(error).__name__}: {error}")
            writer = None
        probes.seconds.append(time.monotonic() - began)
        if fresh and writer is not None:
            writer.close()
            writer = None
        await asyncio.sleep(LIVEZ_INTERVAL_S)
