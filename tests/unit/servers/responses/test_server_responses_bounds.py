"""How long stored responses stay, and how many of them."""

import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core.config_schema import StorageSettings
from engine.core.errors import InvalidRequestError, NotFoundError, ResourceError
from engine.servers.responses import store as store_module
from engine.servers.responses.store import ResponseStore
from engine.servers.storage.objects import ObjectStore

MakeStore = Callable[..., ResponseStore]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def make_store(tmp_path: Path, clock: Clock) -> AsyncIterator[MakeStore]:
    opened: list[ObjectStore] = []

    def make(**settings: Any) -> ResponseStore:
        opened.append(ObjectStore(StorageSettings(path=tmp_path, **settings), clock))
        return ResponseStore(opened[-1])

    yield make
    for each in opened:
        await each.database.stop()


async def save(store: ResponseStore, name: str, *before: str, text: str = "") -> None:
    before = tuple(f"resp_{each}" for each in before)
    previous = before[-1] if before else None
    body = {"id": f"resp_{name}", "previous_response_id": previous, "output": [{"text": text}]}
    await store.save(body, "owner", [{"text": name}], before)


async def kept(store: ResponseStore, *names: str) -> list[str]:
    found = await store.turns([f"resp_{each}" for each in names], "owner")
    return sorted(each.removeprefix("resp_") for each in found)


async def test_a_response_expires_unless_its_conversation_goes_on(
    make_store: MakeStore, clock: Clock, tmp_path: Path
) -> None:
    store = make_store(response_ttl_s=100)
    await save(store, "a")
    await save(store, "lonely")
    clock.now += 60
    await save(store, "b", "a")
    clock.now += 60
    assert await kept(store, "a", "b", "lonely") == ["a", "b"]
    with pytest.raises(NotFoundError):
        await store.body("resp_lonely", "owner")
    clock.now += 60
    assert await kept(store, "a", "b") == []
    await save(store, "new")
    with sqlite3.connect(tmp_path / "responses.db") as connection:
        assert connection.execute("SELECT id FROM responses").fetchall() == [("resp_new",)]


async def test_number_and_size_of_stored_responses_are_bounded(
    make_store: MakeStore, clock: Clock
) -> None:
    store = make_store(max_responses=4, max_size_mb=1)
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
    await store.delete("resp_bigger", "owner")
    await save(store, "after")  # its bytes are counted as gone
    await save(store, "last")
    assert await kept(store, "after", "last", "bigger") == ["after", "last"]


async def test_the_length_of_a_stored_conversation_is_bounded(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        await save(store, name, *names[:i])
    monkeypatch.setattr(store_module, "MAX_TURNS", 4)
    turns = await store.conversation("resp_r3", "owner")
    assert [turn.id for turn in turns] == [f"resp_{name}" for name in names]
    monkeypatch.setattr(store_module, "MAX_TURNS", 3)
    with pytest.raises(InvalidRequestError, match="longer than 3 turns"):
        await store.conversation("resp_r3", "owner")
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_BYTES", 100)
    with pytest.raises(InvalidRequestError, match="100 bytes"):
        await store.conversation("resp_r2", "owner")
    with pytest.raises(InvalidRequestError, match="100 bytes"):
        await store.turns([f"resp_{name}" for name in names], "owner")
