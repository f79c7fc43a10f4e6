"""The lines of a batch have the rights of the key that made it, and those that it has now."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine.core.key_file import add_key, read_keys, remove_key
from engine.servers.batches import run, runner
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.servers.live_server import LiveServer, chat, live_server, wait_until

ADMIN = "admin-key-0123456789abcdef"
OTHER = "tests/other-model"
CHAT = "/v1/chat/completions"
HTTP = httpx.Client(timeout=60)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "READY_CHECK_S", 0.01)
    monkeypatch.setattr(run, "CHECK_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Two keys of one tenant. The first may use all models."""
    path = tmp_path / "keys.json"
    return {
        "free": add_key(path, "free", tenant="team")[0],
        "limited": add_key(path, "limited", tenant="team", models=[MODEL])[0],
    }


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend()
    backend.cards = [msgspec.structs.replace(CARD, id=OTHER), CARD]
    return backend


@pytest.fixture
def server(tmp_path: Path, keys: dict[str, str], backend: FakeBackend) -> Iterator[LiveServer]:
    section = {"keys_file": tmp_path / "keys.json", "admin_key": ADMIN}
    with live_server(backend, server=section, storage={"path": tmp_path}) as server:
        yield server


class Client:
    def __init__(self, server: LiveServer, key: str) -> None:
        self._server = server
        self._headers = {"authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        answer = HTTP.request(method, self._server.url + path, headers=self._headers, **given)
        assert answer.status_code == 200, answer.text
        return answer

    def batch(self, *models: str) -> str:
        lines = [
            {"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": chat(model=model)}
            for n, model in enumerate(models)
        ]
        form = {"file": "\n".join(map(json.dumps, lines)).encode()}
        file = self.ask("POST", "/v1/files", files=form, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        return str(self.ask("POST", "/v1/batches", json=asked).json()["id"])

    def ended(self, path: str, is_over: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        wait_until(lambda: is_over(self.ask("GET", path).json()))
        return dict(self.ask("GET", path).json())

    def ended_batch(self, batch_id: str) -> dict[str, Any]:
        ended = ("completed", "failed")
        return self.ended(f"/v1/batches/{batch_id}", lambda batch: batch["status"] in ended)


def reload(server: LiveServer) -> None:
    Client(server, ADMIN).ask("POST", "/v1/admin/reload", json={})


def test_a_limited_key_gets_no_other_model_by_a_batch(
    server: LiveServer, keys: dict[str, str], backend: FakeBackend
) -> None:
    limited, free = Client(server, keys["limited"]), Client(server, keys["free"])
    batch = limited.ended_batch(limited.batch(OTHER))
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "model_not_found"
    assert OTHER not in batch["errors"]["data"][0]["message"]
    assert not backend.requests
    assert limited.ended_batch(limited.batch(MODEL))["request_counts"]["completed"] == 1
    assert free.ended_batch(free.batch(OTHER))["request_counts"]["completed"] == 1


def test_a_limited_key_gets_no_other_model_by_a_batch_of_messages(
    server: LiveServer, keys: dict[str, str], backend: FakeBackend
) -> None:
    limited = Client(server, keys["limited"])
    params = {"messages": chat()["messages"], "max_tokens": 3}
    requests = [
        {"custom_id": f"{n}", "params": params | {"model": model}}
        for n, model in enumerate((MODEL, OTHER))
    ]
    made = limited.ask("POST", "/v1/messages/batches", json={"requests": requests}).json()
    path = f"/v1/messages/batches/{made['id']}"
    batch = limited.ended(path, lambda batch: batch["processing_status"] == "ended")
    assert (batch["request_counts"]["succeeded"], batch["request_counts"]["errored"]) == (1, 1)
    assert OTHER not in limited.ask("GET", f"{path}/results").text
    assert {request.context.model for request in backend.requests} == {MODEL}


def test_lines_fail_once_the_key_of_their_batch_is_removed(
    server: LiveServer, keys: dict[str, str], backend: FakeBackend, tmp_path: Path
) -> None:
    backend.ready = False  # so the lines wait
    limited, free = Client(server, keys["limited"]), Client(server, keys["free"])
    waiting = limited.batch(MODEL)
    remove_key(tmp_path / "keys.json", "limited")
    reload(server)
    backend.ready = True
    batch = free.ended_batch(waiting)
    assert batch["status"] == "failed"
    assert "API key that made this batch was removed" in batch["errors"]["data"][0]["message"]
    assert not backend.requests


def test_batch_lines_have_the_current_limits_of_their_key(
    server: LiveServer, keys: dict[str, str], backend: FakeBackend, tmp_path: Path
) -> None:
    backend.ready = False
    free = Client(server, keys["free"])
    params = {"model": OTHER, "messages": chat()["messages"], "max_tokens": 3}
    asked = {"requests": [{"custom_id": "a", "params": params}]}
    made = free.ask("POST", "/v1/messages/batches", json=asked).json()
    path = tmp_path / "keys.json"
    shrunk = [msgspec.structs.replace(each, models=(MODEL,)) for each in read_keys(path)]
    path.write_bytes(msgspec.json.encode({"keys": shrunk}))
    reload(server)
    backend.ready = True
    where = f"/v1/messages/batches/{made['id']}"
    free.ended(where, lambda batch: batch["processing_status"] == "ended")
    results = free.ask("GET", f"{where}/results").text
    assert "no such model" in results and not backend.requests


def test_a_batch_over_its_rate_limit_leaves_slots_to_other_tenants(tmp_path: Path) -> None:
    """The lines of a key that has used up its limit hold their slots until they are answered."""
    path = tmp_path / "keys.json"
    slow = add_key(path, "slow", limits={"requests_per_minute": 1})[0]
    quick = add_key(path, "quick")[0]
    with live_server(server={"keys_file": path}, storage={"path": tmp_path}) as server:
        waiting, other = Client(server, slow), Client(server, quick)
        batch = f"/v1/batches/{waiting.batch(*[MODEL] * 40)}"
        waiting.ended(batch, lambda each: each["request_counts"]["completed"] == 1)
        assert other.ended_batch(other.batch(MODEL))["request_counts"]["completed"] == 1
        assert waiting.ask("GET", batch).json()["status"] == "in_progress"
        waiting.ask("POST", f"{batch}/cancel")


def test_an_older_batch_database_gets_its_missing_columns(tmp_path: Path) -> None:
    """A batch of an earlier version names no key, so it goes on only on a server without keys."""
    with live_server(FakeBackend(), storage={"path": tmp_path}) as server:
        client = Client(server, "unused")
        client.ended_batch(client.batch(MODEL))
    with sqlite3.connect(tmp_path / "batches.db") as db:
        db.execute("ALTER TABLE batches DROP COLUMN key")
    with live_server(FakeBackend(), storage={"path": tmp_path}) as server:
        client = Client(server, "unused")
        assert client.ended_batch(client.batch(MODEL))["status"] == "completed"
        assert len(client.ask("GET", "/v1/batches").json()["data"]) == 2
