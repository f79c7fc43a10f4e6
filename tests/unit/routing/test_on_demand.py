"""Models that are let go and come back: by hand, when memory is short, when nobody asks."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.backends.base import BackendHolder, InferenceBackend
from engine.core.errors import (
    ConflictError,
    InferenceError,
    NotFoundError,
    ResourceError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    CompletionRequest,
    FinishEvent,
    GenerationContext,
    ModelCard,
    TextEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.core.interfaces.stats import EngineStats
from engine.routing.manage import ModelManager
from engine.routing.on_demand import OnDemand
from engine.routing.residency import Residency
from engine.routing.router import Router
from engine.servers.openai.models import model_body
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

MIB = 2**20


class Factory:
    """Makes fake backends of a given size, and remembers them."""

    def __init__(self, size_mib: int = 100, start_s: float = 0.0) -> None:
        self.made: list[FakeBackend] = []
        self.size_mib = size_mib
        self.start_s = start_s
        self.error: Exception | None = None

    def __call__(self) -> FakeBackend:
        backend = FakeBackend()
        backend.stats_now = EngineStats()
        backend.memory_bytes = lambda: self.size_mib * MIB  # type: ignore[method-assign]
        backend.start = self._start  # type: ignore[method-assign]
        self.made.append(backend)
        return backend

    async def _start(self) -> str:
        await asyncio.sleep(self.start_s)
        if self.error is not None:
            raise self.error
        return "fake://"

    @property
    def num_running(self) -> int:
        return sum(not backend.is_stopped for backend in self.made)


def cards_of(holder: BackendHolder) -> list[ModelCard]:
    return holder.current.models()


def request(number: int = 0) -> CompletionRequest:
    context = GenerationContext(request_id=f"r{number}", params=SamplingParams(max_tokens=3))
    return CompletionRequest(context=context, prompt="a b")


async def answer(backend: InferenceBackend, number: int = 0) -> str:
    events = [event async for event in backend.complete(request(number))]
    assert any(isinstance(event, FinishEvent) for event in events)
    return "".join(event.text for event in events if isinstance(event, TextEvent))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_the_next_request_loads_an_unloaded_model_once() -> None:
    factory = Factory(start_s=0.02)
    model = OnDemand("m", factory, Residency())
    assert not model.health().ready
    await model.start()
    assert await answer(model) == "Hello from a"
    assert await model.unload(0)
    assert factory.num_running == 0 and model.resident_bytes() == 0
    assert model.health().ready and model.models() and model.state == "unloaded"
    assert not model.health().loaded
    assert not await model.unload(0)
    texts = await asyncio.gather(*(answer(model, number) for number in range(5)))
    assert texts == ["Hello from a"] * 5
    assert len(factory.made) == 2 and model.num_open == 0


async def test_a_log_level_is_kept_for_later_loads() -> None:
    factory = Factory()
    model = OnDemand("m", factory, Residency())
    await model.set_log_level("debug")
    await model.start()
    await model.set_log_level("error")
    await model.unload(0)
    await model.load()
    assert [each.log_levels for each in factory.made] == [["debug", "error"], ["error"]]


async def test_a_failed_load_fails_all_waiting_requests_and_is_retried_later() -> None:
    factory = Factory(start_s=0.01)
    model = OnDemand("m", factory, Residency())
    await model.start()
    await model.unload(0)
    factory.error = UnavailableError("no disk")
    results = await asyncio.gather(*(answer(model, n) for n in range(3)), return_exceptions=True)
    assert all(isinstance(each, UnavailableError) for each in results)
    assert factory.num_running == 0 and model.num_open == 0
    factory.error = None
    assert await answer(model)


async def test_unloading_waits_for_running_requests_and_refuses_new_ones() -> None:
    factory = Factory()
    model = OnDemand("m", factory, Residency())
    await model.start()
    factory.made[0].token_s = 0.02
    running = asyncio.create_task(answer(model))
    await until(lambda: factory.made[0].num_open == 1)
    unloading = asyncio.create_task(model.unload(10))
    await asyncio.sleep(0)
    assert not model.health().ready
    with pytest.raises(UnavailableError, match="unloaded"):
        await answer(model, 1)
    assert await running == "Hello from a"
    assert await unloading and factory.num_running == 0


async def test_cancelling_one_waiting_request_keeps_the_model_loading_for_others() -> None:
    factory = Factory(start_s=0.05)
    model = OnDemand("m", factory, Residency())
    first = asyncio.create_task(answer(model))
    second = asyncio.create_task(answer(model, 1))
    await until(lambda: model.num_open == 2)
    first.cancel()
    assert await second
    assert model.num_open == 0 and len(factory.made) == 1


async def test_the_least_recently_used_model_is_unloaded_to_make_room() -> None:
    residency = Residency(budget_bytes=250 * MIB)
    factories = {name: Factory() for name in "abc"}
    models = {
        name: OnDemand(name, factory, residency, expected_bytes=100 * MIB)
        for name, factory in factories.items()
    }
    for name in ("a", "b"):
        await models[name].start()
    await answer(models["a"])
    await models["c"].start()
    assert [each.is_loaded for each in models.values()] == [True, False, True]
    await answer(models["b"])
    assert [each.is_loaded for each in models.values()] == [False, True, True]
    assert residency.resident_bytes <= 250 * MIB


async def test_the_measured_memory_of_a_model_is_expected_at_its_next_load() -> None:
    residency = Residency(budget_bytes=250 * MIB)
    model = OnDemand("a", Factory(size_mib=200), residency, expected_bytes=100 * MIB)
    other = OnDemand("b", Factory(), residency, expected_bytes=100 * MIB)
    await model.start()
    await model.unload(1.0)
    assert model.expected_bytes == 200 * MIB
    await other.start()
    await model.load()
    assert not other.is_loaded


async def test_a_model_in_use_is_not_unloaded_for_another() -> None:
    residency = Residency(budget_bytes=150 * MIB)
    busy, other = Factory(), Factory()
    first = OnDemand("first", busy, residency, expected_bytes=100 * MIB)
    second = OnDemand("second", other, residency, expected_bytes=100 * MIB)
    await first.start()
    busy.made[0].prefill_s = 30
    running = asyncio.create_task(answer(first))
    await until(lambda: busy.made[0].num_open == 1)
    with pytest.raises(UnavailableError, match="in use") as refused:
        await answer(second)
    assert refused.value.retry_after
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await answer(second)
    assert not first.is_loaded


async def test_a_model_larger_than_the_memory_budget_is_refused() -> None:
    model = OnDemand("m", Factory(), Residency(budget_bytes=MIB), expected_bytes=2 * MIB)
    with pytest.raises(ResourceError, match="memory_budget_mb"):
        await model.load()


async def test_idle_models_are_unloaded_and_busy_ones_are_not() -> None:
    residency = Residency(idle_s=0.0)
    idle, busy = Factory(), Factory()
    quiet = OnDemand("quiet", idle, residency)
    used = OnDemand("used", busy, residency)
    await quiet.start()
    await used.start()
    busy.made[0].prefill_s = 30
    running = asyncio.create_task(answer(used))
    await until(lambda: busy.made[0].num_open == 1)
    residency.tick()
    await until(lambda: not quiet.is_loaded)
    assert used.is_loaded
    await quiet.load()
    residency.idle_s = 3600.0
    residency.tick()
    assert quiet.state == "loaded"
    await asyncio.sleep(0)
    assert quiet.state == "loaded"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("field", ["num_running", "num_waiting"])
async def test_requests_older_than_the_wrapper_keep_a_model_busy(field: str) -> None:
    factory = Factory()
    model = OnDemand("used", factory, Residency(idle_s=0.01))
    await model.start()
    assert not model.is_busy
    factory.made[0].stats_now = EngineStats(**{field: 1})
    assert model.num_open == 0 and model.is_busy


async def test_stopping_cancels_a_load_in_progress() -> None:
    factory = Factory(start_s=30)
    model = OnDemand("m", factory, Residency())
    loading = asyncio.create_task(model.start())
    await until(lambda: len(factory.made) == 1)
    await model.stop()
    await asyncio.gather(loading, return_exceptions=True)
    assert factory.num_running == 0
    with pytest.raises(UnavailableError):
        await model.load()


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A manager over one fake model, which loads others like it."""
    factory = Factory()
    monkeypatch.setattr("engine.routing.build.make_backend", lambda *_: factory())
    monkeypatch.setattr("engine.routing.manage.has_engine", lambda kind: False)
    first = factory()
    holder = BackendHolder(first)
    manager = ModelManager(holder, make_settings(), CollectorRegistry(), factory)
    return manager, holder, factory


async def test_a_server_with_one_model_becomes_a_router_when_it_gets_another(managed: Any) -> None:
    manager, holder, factory = managed
    (only,) = manager.describe(3)
    assert (only["id"], only["in_flight"]) == (MODEL, 3)
    assert only["memory_mb"] >= 0, "`engine ps` shows both of a server with one model, too"
    running = asyncio.create_task(answer(holder.current))
    await manager.load("second", "anything", "fake", {})
    assert isinstance(holder.current, Router)
    assert await running  # what was under way is not disturbed
    listed = {each["id"]: each["state"] for each in manager.describe()}
    assert listed == {MODEL: "loaded", "second": "loaded"}
    assert {card.id for card in holder.current.models()} == {MODEL, "second"}
    assert await answer(holder.current)
    with pytest.raises(ConflictError, match="second"):
        await manager.load("second", "something else", None, {})
    assert await manager.unload("second", 0)
    assert {each["id"]: each["state"] for each in manager.describe()}["second"] == "unloaded"
    listed = [model_body(card, holder.current.model_health(card.id)) for card in cards_of(holder)]
    assert {each["id"]: (each["state"], each["loaded"]) for each in listed} == {
        MODEL: ("loaded", True),
        "second": ("unloaded", False),
    }
    await manager.load("second", "second", None, {})
    await manager.remove("second", 0)
    with pytest.raises(NotFoundError):
        await manager.unload("second", 0)
    with pytest.raises(ConflictError, match="only model"):
        await manager.remove(MODEL, 0)
    await holder.current.stop()
    assert factory.num_running == 0


async def test_a_model_that_can_not_be_loaded_leaves_nothing_behind(managed: Any) -> None:
    manager, holder, factory = managed
    factory.error = InferenceError("bad weights")
    with pytest.raises(InferenceError):
        await manager.load("second", "anything", "fake", {})
    assert [each["id"] for each in manager.describe()] == [MODEL]
    assert factory.num_running == 1 and len(holder.current.residency.members) == 1
    await holder.current.stop()
