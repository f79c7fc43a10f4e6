"""How long stored responses stay, and how many of them."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from engine.core.config_schema import StorageSettings
from engine.core.errors import InvalidRequestError, NotFoundError, ResourceError
from engine.servers.responses import store as store_module
from engine.servers.responses.store import ResponseStore


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_store(path: Path, clock: Clock, **settings: Any) -> ResponseStore:
    return ResponseStore(StorageSettings(path=path, **settings), clock)


async def save(store: ResponseStore, name: str, *before: str, text: str = "") -> None:
    previous = before[-1] if before else None
    body = {"id": name, "previous_response_id": previous, "output": [{"text": text}]}
    await store.save(body, "owner", [{"text": name}], before)


async def kept(store: ResponseStore, *names: str) -> list[str]:
    return sorted(await store.turns(names, "owner"))


async def test_a_response_expires_unless_its_conversation_goes_on(
    tmp_path: Path, clock: Clock
) -> None:
    store = make_store(tmp_path, clock, response_ttl_s=100)
    await save(store, "a")
    await save(store, "lonely")
    clock.now += 60
    await save(store, "b", "a")
    clock.now += 60
    assert await kept(store, "a", "b", "lonely") == ["a", "b"]
    with pytest.raises(NotFoundError):
        await store.body("lonely", "owner")
    clock.now += 60
    assert await kept(store, "a", "b") == []
    await save(store, "new")
    await store.stop()
    with sqlite3.connect(tmp_path / "responses.db") as connection:
        assert connection.execute("SELECT id FROM responses").fetchall() == [("new",)]


async def test_number_and_size_are_bounded(tmp_path: Path, clock: Clock) -> None:
    store = make_store(tmp_path, clock, max_responses=3, max_size_mb=1)
    for name in "abcd":
        clock.now += 1
        await save(store, name)
    assert await kept(store, *"abcd") == ["b", "c", "d"]
    clock.now += 1
    await save(store, "e", "b")  # keeps b, which was the oldest
    assert await kept(store, *"bcde") == ["b", "d", "e"]
    clock.now += 1
    await save(store, "big", text="x" * 700_000)
    clock.now += 1
    await save(store, "bigger", text="x" * 900_000)
    assert await kept(store, "big", "bigger") == ["bigger"]
    with pytest.raises(ResourceError):
        await save(store, "too big", text="x" * 2**20)
    await store.delete("bigger", "owner")
    await save(store, "after")  # its bytes are counted as gone
    await save(store, "last")
    assert await kept(store, "after", "last", "bigger") == ["after", "last"]
    await store.stop()


async def test_a_conversation_is_bounded(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, clock)
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        await save(store, name, *names[:i])
    monkeypatch.setattr(store_module, "MAX_TURNS", 4)
    assert [turn.id for turn in await store.conversation("r3", "owner")] == names
    monkeypatch.setattr(store_module, "MAX_TURNS", 3)
    with pytest.raises(InvalidRequestError, match="longer than 3 turns"):
        await store.conversation("r3", "owner")
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_BYTES", 100)
    with pytest.raises(InvalidRequestError, match="100 bytes"):
        await store.conversation("r2", "owner")
    with pytest.raises(InvalidRequestError, match="100 bytes"):
        await store.turns(names, "owner")
    await store.stop()
