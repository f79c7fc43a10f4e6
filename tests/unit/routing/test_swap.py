"""A model's engine is replaced while it answers: no request is lost, refused or changed."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from engine.backends.base import BackendHolder
from engine.backends.custom.base_custom import CustomBackend
from engine.core.errors import ConfigError, ConflictError, NotFoundError, ResourceError
from engine.core.interfaces.backend import (
    CompletionRequest,
    Event,
    GenerationContext,
    TextEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.routing import manage
from engine.routing.manage import ModelManager
from engine.routing.on_demand import OnDemand
from engine.routing.replica import Replica
from engine.routing.residency import Residency
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.fakes.routed_replicas import router as routed
from tests.support.servers.live_server import make_settings
from tests.support.toy_engine.alone import generate_alone
from tests.support.toy_engine.backend import ToyBackend

MODEL = "toy"
NUM_STREAMS = 6
NUM_TOKENS = 60


def request(name: str, number: int) -> CompletionRequest:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=number, ignore_eos=True)
    context = GenerationContext(request_id=name, params=params)
    return CompletionRequest(context=context, prompt=(1, 2, 3 + number))


@dataclass
class Clients:
    """Clients that ask without a pause. An error of one ends the test."""

    holder: BackendHolder
    num_answers: int = 0
    is_over: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self) -> None:
        self.tasks = [asyncio.create_task(self._ask(number)) for number in range(NUM_STREAMS)]

    async def end(self) -> None:
        self.is_over = True
        await asyncio.wait_for(asyncio.gather(*self.tasks), 60)

    async def _ask(self, number: int) -> None:
        asked = request("", number)
        params = asked.context.params
        right, _ = generate_alone(asked.prompt, params, 0, frozenset(), 256)
        count = 0
        while not self.is_over:
            count += 1
            events: list[Event] = []
            stream = self.holder.current.complete(request(f"{number}-{count}", number))
            await stream.feed(events.append)
            said = [each.token_ids for each in events if isinstance(each, TextEvent)]
            assert [token for ids in said for token in ids] == right, "another text"
            self.num_answers += 1

    async def answer(self, more: int) -> None:
        wanted = self.num_answers + more
        async with asyncio.timeout(60):
            while self.num_answers < wanted:
                failed = [each for each in self.tasks if each.done()]
                assert not failed, failed
                await asyncio.sleep(0.01)


@pytest.fixture
async def busy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ModelManager, Clients]]:
    """A server with a toy model in a process of its own, and clients of it."""
    monkeypatch.setattr(manage, "resolve_model", lambda name: name)
    backend = ToyBackend(in_process=False)
    await backend.start()
    holder = BackendHolder(backend)
    manager = ModelManager(holder, make_settings(), CollectorRegistry(), ToyBackend)
    clients = Clients(holder)
    clients.begin()
    try:
        await clients.answer(1)
        yield manager, clients
        await clients.answer(NUM_STREAMS)
        await clients.end()
    finally:
        for task in clients.tasks:
            task.cancel()
        await holder.current.stop()


def engine_of(clients: Clients) -> CustomBackend:
    """The backend that new requests go to."""
    (replica,) = clients.holder.current.replicas
    return replica.backend._inner


@pytest.mark.seconds
async def test_open_requests_move_to_the_new_engine(busy: tuple[ModelManager, Clients]) -> None:
    manager, clients = busy
    old = clients.holder.current
    with pytest.raises(ConfigError, match="threds"):
        await manager.swap(MODEL, None, {"threds": 1})
    with pytest.raises(NotFoundError):
        await manager.swap("absent", None, {})
    with pytest.raises(ResourceError, match="does not fit"):
        await manager.swap(MODEL, "unloadable", {})
    assert engine_of(clients) is old and old.health().ready, "a failed swap changes nothing"
    for number in range(2):  # the server has a router of its own from the first time on
        done = await manager.swap(MODEL, None, {"threads": number + 1})
        assert done["engines"] == 1 and done["moved"] > 0 and done["finishing"] == 0
        new = engine_of(clients)
        assert new is not old and not old.num_open
        async with asyncio.timeout(60):
            while old._link.detail != "The engine has been stopped.":
                await asyncio.sleep(0.01)
        await clients.answer(1)
        old = new
    assert new._options.threads == 2


@pytest.mark.seconds
async def test_swapping_to_another_model_lets_the_old_engine_finish_its_requests(
    busy: tuple[ModelManager, Clients],
) -> None:
    manager, clients = busy
    old = clients.holder.current
    done = await manager.swap(MODEL, "other", {})
    assert done["moved"] == 0 and done["finishing"] > 0
    assert old.num_open > 0 and old.health().ready, "it still works for them"
    new = engine_of(clients)
    async with asyncio.timeout(60):
        while old.health().ready:
            await asyncio.sleep(0.01)
    assert not old.num_open and new.num_open


class Picky(ToyBackend):
    """Does not start with two threads."""

    def remade(self, model, changes) -> CustomBackend:
        return Picky(threads=super().remade(model, changes)._options.threads)

    async def start(self) -> str:
        if self._options.threads == 2:
            raise ResourceError("It does not fit.")
        return await super().start()


def made(name: str, backend: CustomBackend) -> Replica:
    return Replica(name, "toy", OnDemand(name, lambda: backend, Residency()))


async def swap_both(*backends: CustomBackend) -> tuple[str, list[CustomBackend]]:
    """Swap two replicas, of which the second one can't start. Returns what the administrator reads,
    and the engines after it.
    """
    both = [made(f"m-{number}", backend) for number, backend in enumerate(backends)]
    router = routed(*both)
    manager = ModelManager(
        BackendHolder(router), make_settings(), CollectorRegistry(), lambda: router
    )
    for each in both:
        await each.backend.start()
    with pytest.raises(ResourceError, match="does not fit") as refused:
        await manager.swap("m", None, {"threads": 2})
    engines = [each.backend._inner for each in both]
    assert all(each.health().ready for each in engines)
    for each in both:
        await each.backend.stop()
    return refused.value.message, engines


async def test_a_swap_that_fails_midway_is_rolled_back() -> None:
    first, second = ToyBackend(threads=1), Picky(threads=1)
    told, engines = await swap_both(first, second)
    assert engines[0] is not first and engines[1] is second
    assert [each._options.threads for each in engines] == [1, 1]
    assert told.endswith("All engines of the model are as before.")


async def test_a_failed_rollback_of_a_swap_is_reported(monkeypatch) -> None:
    first, second = ToyBackend(threads=1), Picky(threads=1)
    monkeypatch.setattr(first, "remade", lambda model, changes: broken_or_new(changes))

    def broken_or_new(changes) -> CustomBackend:
        return ToyBackend(threads=2) if changes else Picky(threads=2)

    told, engines = await swap_both(first, second)
    assert [each._options.threads for each in engines] == [2, 1]
    assert "m-0" in told and "m-1" not in told and "Swap the model again" in told


async def test_only_our_own_engines_can_be_swapped() -> None:
    backend = OnDemand("m", FakeBackend, Residency())
    await backend.start()
    with pytest.raises(ConflictError, match="of our own"):
        await backend.swap(lambda old: old.remade(None, {}))
    assert backend.num_open == 0
    await backend.stop()
