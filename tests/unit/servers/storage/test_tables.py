"""What every table of tenants' objects guarantees."""

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.core.errors import NotFoundError, RateLimitError
from engine.servers.storage.database import Database
from engine.servers.storage.tables import Db, Store, Table, having, transaction

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    metadata TEXT
);
"""


@dataclass(frozen=True)
class Job:
    id: str
    owner: str = "a"
    status: str = "running"
    metadata: str | None = None


JOBS = Table("jobs", Job, noun="job", param="job_id", is_open="status != 'ended'")


class JobStore(Store):
    @transaction
    def add(self, db: Db, *jobs: Job) -> None:
        for job in jobs:
            JOBS.insert(db, job)

    @transaction
    def add_within(self, db: Db, job: Job, most: int) -> None:
        JOBS.insert(db, job)
        JOBS.check_open(db, job.owner, most, "jobs run", 1.0)

    @transaction
    def ids(self, db: Db, owner: str, *, before: str | None = None) -> list[str]:
        return [job.id for job in JOBS.page(db, owner, 2, before=before)]

    @transaction
    def find(self, db: Db, job_id: str, owner: str) -> Job:
        return JOBS.find(db, job_id, owner)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[JobStore]:
    made = JobStore(Database(tmp_path / "jobs.db", SCHEMA))
    yield made
    await made.database.stop()


async def test_a_row_is_found_by_its_owner_alone(store: JobStore) -> None:
    await store.add(Job("one"))
    assert await store.find("one", "a") == Job("one")
    with pytest.raises(NotFoundError, match="no such job") as caught:
        await store.find("one", "b")
    assert caught.value.param == "job_id"


async def test_a_transaction_that_is_refused_leaves_nothing(store: JobStore) -> None:
    await store.add(Job("theirs", owner="b"))
    with pytest.raises(RateLimitError, match="1 of your jobs run") as caught:
        await store.add_within(Job("ours"), 1)
    assert caught.value.retry_after == 1.0
    assert await store.ids("a") == []


async def test_pages_have_the_owners_rows_in_their_order(store: JobStore) -> None:
    await store.add(*(Job(str(i), owner="ab"[i % 2]) for i in range(8)))
    assert await store.ids("a") == ["6", "4"]
    assert await store.ids("a", before="2") == ["6", "4"]
    assert await store.ids("a", before="0") == ["4", "2"]


async def test_old_rows_make_room_only_if_they_have_ended_and_are_the_owners(
    store: JobStore,
) -> None:
    ended = [Job(f"{owner}{i}", owner, "ended") for owner in "ab" for i in range(3)]
    await store.add(Job("open"), *ended)
    assert await store.database.run(lambda db: JOBS.drop_oldest(db, "a", 1)) == ["a0", "a1"]
    left = await store.database.run(lambda db: [job.id for job in JOBS.rows(db, "TRUE")])
    assert left == ["open", "a2", "b0", "b1", "b2"]


async def test_a_row_ends_once(store: JobStore) -> None:
    await store.add(Job("one"))

    def end(db: Db) -> bool:
        return JOBS.update(db, "one", JOBS.is_open, status="ended")

    ends = [await store.database.run(end) for _ in range(2)]
    assert ends == [True, False]


async def test_metadata_match_if_all_pairs_do(store: JobStore) -> None:
    await store.add(Job("one", metadata='{"x": "1", "y": "2"}'), Job("two", metadata='{"x": "1"}'))
    await store.add(Job("three"))

    def found(pairs: dict[str, str]) -> set[str]:
        return {job.id for job in JOBS.rows(opened, *having(pairs))}

    opened = sqlite3.connect(store.database.path)
    opened.row_factory = sqlite3.Row
    assert found({}) == {"one", "two", "three"}
    assert found({"x": "1"}) == {"one", "two"}
    assert found({"x": "1", "y": "2"}) == {"one"}
    opened.close()
