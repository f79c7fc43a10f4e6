"""A queue of jobs that servers with the same directory share."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.core.errors import UnavailableError
from engine.servers.storage.database import Database
from engine.servers.storage.job_queue import JobQueue

LONG_S = 3600.0


class Looking(JobQueue):
    """Counts its looks, of which the first ones fail."""

    def __init__(self, path: Path, *failures: Exception, rest_s: float = LONG_S) -> None:
        super().__init__("jobs", Database(path, ""), rest_s, 0.0)
        self._failures = list(failures)
        self.has_looked = asyncio.Event()

    async def look(self) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.has_looked.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.db"
    path.touch()
    return path


@pytest.fixture
async def queue(path: Path) -> AsyncIterator[Looking]:
    made = Looking(path, UnavailableError("the disk"), ValueError("a bug"))
    await made.start()
    yield made
    await made.stop()


async def test_failures_of_any_kind_do_not_end_the_queue(queue: Looking) -> None:
    async with asyncio.timeout(60):
        await queue.has_looked.wait()


async def test_news_end_its_rest(queue: Looking) -> None:
    async with asyncio.timeout(60):
        await queue.has_looked.wait()
        queue.has_looked.clear()
        queue.wake()
        await queue.has_looked.wait()


async def test_a_queue_without_a_database_looks_when_there_is_news(path: Path) -> None:
    path.unlink()
    queue = Looking(path)
    await queue.start()
    async with asyncio.timeout(30):
        await asyncio.sleep(0)
        path.touch()
        queue.wake()
        await queue.has_looked.wait()
    await queue.stop()


async def test_a_lock_is_held_by_one_server_until_it_stops(path: Path) -> None:
    ours, theirs = Looking(path), Looking(path)
    assert ours.holds("pool") and ours.holds("pool")
    assert not theirs.holds("pool")
    assert theirs.holds("other")
    await ours.stop()
    assert theirs.holds("pool")
    await theirs.stop()


async def test_a_queue_without_a_database_file_writes_nothing(tmp_path: Path) -> None:
    queue = Looking(tmp_path / "none" / "jobs.db", rest_s=0.0)
    await queue.start()
    for _ in range(10):
        await asyncio.sleep(0)
    await queue.stop()
    assert not queue.has_looked.is_set() and list(tmp_path.iterdir()) == []
