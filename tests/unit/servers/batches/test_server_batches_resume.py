"""A batch outlives its server: whatever ended the last one, the next one goes on, and no line is
answered twice.
"""

import asyncio
import json
import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.core.errors import UnavailableError
from engine.servers.batches import run, runner, store
from engine.servers.batches.store import BatchStore
from engine.servers.storage.fair_slots import FairSlots
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.fakes.stopping_backend import stopping_after
from tests.support.servers.live_server import LiveServer, chat, live_server, wait_until

pytestmark = pytest.mark.seconds  # each test starts several servers

CHAT = "/v1/chat/completions"
NUM_LINES = 30
HTTP = httpx.Client(timeout=60)  # one for all: a client is slow to make, and states are polled
IDS = sorted(f"{n}" for n in range(NUM_LINES))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "READY_CHECK_S", 0.01)
    monkeypatch.setattr(run, "CHECK_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    monkeypatch.setattr(runner, "RETRY_S", 0.05)


def over(path: Path, backend: FakeBackend) -> AbstractContextManager[LiveServer]:
    return live_server(backend, storage={"path": path})


def create(server: LiveServer, num_lines: int = NUM_LINES) -> str:
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": chat()}
        for n in range(num_lines)
    ]
    form = {"file": "\n".join(json.dumps(line) for line in lines).encode()}
    file = HTTP.post(f"{server.url}/v1/files", files=form, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(HTTP.post(f"{server.url}/v1/batches", json=asked).json()["id"])


def retrieve(server: LiveServer, batch_id: str) -> dict[str, Any]:
    return dict(HTTP.get(f"{server.url}/v1/batches/{batch_id}").json())


def wait_for(server: LiveServer, batch_id: str, status: str, num_completed: int) -> None:
    def is_there() -> bool:
        batch = retrieve(server, batch_id)
        return (batch["status"], batch["request_counts"]["completed"]) == (status, num_completed)

    wait_until(is_there, seconds=60)


def output_ids(server: LiveServer, batch_id: str) -> list[str]:
    batch = retrieve(server, batch_id)
    assert batch["error_file_id"] is None
    text = HTTP.get(f"{server.url}/v1/files/{batch['output_file_id']}/content").text
    files = HTTP.get(f"{server.url}/v1/files").json()["data"]
    assert sorted(file["purpose"] for file in files) == ["batch", "batch_output"]
    return sorted(json.loads(line)["custom_id"] for line in text.splitlines())


def test_finished_lines_are_not_repeated_after_a_restart(tmp_path: Path) -> None:
    num_done = 12
    with over(tmp_path, stopping_after(num_done)) as server:
        batch_id = create(server)
        wait_for(server, batch_id, "in_progress", num_done)
        server.stop()  # without waiting for what runs
    second = FakeBackend()
    with over(tmp_path, second) as server:
        wait_for(server, batch_id, "completed", NUM_LINES)
        assert len(second.requests) == NUM_LINES - num_done
        assert output_ids(server, batch_id) == IDS


@pytest.mark.parametrize("step", ["start", "finalize", "end"])
def test_a_batch_resumes_after_a_failure_in_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def fail(*_: Any) -> None:
        raise UnavailableError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(BatchStore, step, fail)
        with over(tmp_path, FakeBackend()) as server:
            batch_id = create(server)
            expected = {
                "start": ("validating", 0),
                "finalize": ("in_progress", NUM_LINES),
                "end": ("finalizing", NUM_LINES),
            }
            wait_for(server, batch_id, *expected[step])
            server.stop()
    second = FakeBackend()
    with over(tmp_path, second) as server:
        wait_for(server, batch_id, "completed", NUM_LINES)
        assert len(second.requests) == (NUM_LINES if step == "start" else 0)
        assert output_ids(server, batch_id) == IDS
    stored = {path.name for path in (tmp_path / "files").iterdir()}
    assert len(stored) == 2, "a file was left behind"


def test_a_batch_continues_when_its_storage_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, num_failures = BatchStore.record, 0

    async def fail_at_first(*args: Any) -> None:
        nonlocal num_failures
        num_failures += 1
        if num_failures < 4:
            raise UnavailableError("the disk is gone")
        await record(*args)

    monkeypatch.setattr(BatchStore, "record", fail_at_first)
    with over(tmp_path, FakeBackend()) as server:
        batch_id = create(server)
        wait_for(server, batch_id, "completed", NUM_LINES)
        assert output_ids(server, batch_id) == IDS


def test_a_bug_ends_the_batch_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(run, "answered_line", break_down)
    with over(tmp_path, FakeBackend()) as server:
        batch_id = create(server)
        wait_for(server, batch_id, "failed", 0)
        batch = retrieve(server, batch_id)
        assert [each["code"] for each in batch["errors"]["data"]] == ["internal_error"]
        deleted = HTTP.delete(f"{server.url}/v1/files/{batch['input_file_id']}")
        assert deleted.status_code == 200
        assert server.services.lifecycle.num_admitted == 0


def test_of_two_servers_one_runs_a_batch_and_the_other_takes_over(tmp_path: Path) -> None:
    first, second = stopping_after(10), FakeBackend()
    with over(tmp_path, first) as running:
        earlier = create(running, 1)
        wait_for(running, earlier, "completed", 1)
        with over(tmp_path, second) as waiting:
            later = create(waiting)  # taken in by one, run by the other
            wait_for(waiting, later, "in_progress", 9)
            cancelled = create(waiting)
            HTTP.post(f"{waiting.url}/v1/batches/{cancelled}/cancel")
            assert second.requests == []
            running.stop()
            wait_for(waiting, later, "completed", NUM_LINES)
            wait_for(waiting, cancelled, "cancelled", 0)
            assert len(second.requests) == NUM_LINES - 9


def test_a_batch_waits_for_a_server_of_its_model_until_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over(tmp_path, stopping_after(0)) as server:
        batch_id = create(server)
        wait_for(server, batch_id, "in_progress", 0)
        server.stop()
    monkeypatch.setattr(runner, "SWEEP_S", 0.05)
    other = FakeBackend()
    other.set_card(id="tests/other-model")
    with over(tmp_path, other) as server:
        failing = create(server)  # names a model that this one has not
        wait_for(server, failing, "failed", 0)
        assert retrieve(server, batch_id)["status"] == "in_progress"
        with sqlite3.connect(tmp_path / "batches.db") as connection:
            connection.execute("UPDATE batches SET expires_at = 1 WHERE id = ?", (batch_id,))
        wait_for(server, batch_id, "expired", 0)
    assert other.requests == []


def test_large_results_are_written_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[int] = []
    outcomes = BatchStore.outcomes

    async def counted(self: BatchStore, batch_id: str, after: int) -> list[Any]:
        page = await outcomes(self, batch_id, after)
        pages.append(len(page))
        return page

    monkeypatch.setattr(BatchStore, "outcomes", counted)
    monkeypatch.setattr(store, "OUTCOMES_BYTES", 1)
    with over(tmp_path, FakeBackend()) as server:
        batch_id = create(server, num_lines=3)
        wait_for(server, batch_id, "completed", 3)
        assert output_ids(server, batch_id) == ["0", "1", "2"]
    assert pages == [1, 1, 1, 0]


@pytest.mark.parametrize("num_free", [0, 1])
async def test_a_stopping_batch_takes_no_slot(num_free: int) -> None:
    """Also when a slot comes free at the moment in which the batch is cancelled."""
    slots = FairSlots(1)
    if not num_free:
        await slots.acquire("other")
    bench: Any = SimpleNamespace(slots=slots)
    watching = asyncio.create_task(asyncio.sleep(0))
    await watching
    assert not await run.BatchRun(bench, "batch")._take_slot("owner", watching)
    if not num_free:
        slots.release("other")
    async with asyncio.timeout(60):
        await slots.acquire("owner")
