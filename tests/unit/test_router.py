"""The router over backends without a model: who is asked, who is asked next, and what a client and
an operator are told.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.backends.base import EventFeed, EventSink
from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    ModelFormatError,
    NotFoundError,
    RateLimitError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    ChatRequest,
    EmbedRequest,
    Event,
    GenerationContext,
    TextEvent,
    UsageEvent,
)
from engine.core.interfaces.request import EngineStats, SamplingParams
from engine.routing import attempts as attempts_module
from engine.routing.metrics import RouterMetrics
from engine.routing.outliers import CONSECUTIVE_FAILURES
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.report import describe_decisions, describe_routes
from engine.routing.route import Route
from engine.routing.router import Router, ShadowTraffic
from tests.fake_backend import FakeBackend

GONE = UnavailableError("it is gone", retry_after=3.0)


class Fed(FakeBackend):
    """Pushes its events."""

    def chat(self, request: ChatRequest) -> "Feed":
        return Feed(super().chat(request))


class Feed(EventFeed):
    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self.was_read = False

    async def feed(self, sink: EventSink) -> None:
        async for event in self._events:
            sink(event)

    async def __anext__(self) -> Event:
        self.was_read = True
        return await anext(self._events)


def replica(name: str, backend: FakeBackend | None = None, **options: Any) -> Replica:
    made = Replica(name, "fake", backend or FakeBackend(), **options)
    made.has_started = True
    return made


def router(
    *replicas: Replica,
    policy: str = "round_robin",
    shadow: ShadowTraffic | None = None,
    registry: CollectorRegistry | None = None,
    **options: Any,
) -> Router:
    route = Route(
        "m", [Member(each, 1.0) for each in replicas], policy, make_policy(policy), **options
    )
    metrics = RouterMetrics(registry or CollectorRegistry())
    metrics.watch(replicas)
    return Router(replicas, [route], metrics, shadow)


def asking(name: str = "id", **context: Any) -> ChatRequest:
    fields = {"request_id": name, "params": SamplingParams(max_tokens=50), "model": "m"} | context
    messages = ({"role": "user", "content": "hello"},)
    return ChatRequest(context=GenerationContext(**fields), messages=messages)


async def answer(made: Router, request: ChatRequest | None = None) -> list[Event]:
    return [event async for event in made.chat(request or asking())]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


def fake(each: Replica) -> FakeBackend:
    assert isinstance(each.backend, FakeBackend)
    return each.backend


@pytest.fixture(params=["read", "fed"])
def take(request: pytest.FixtureRequest) -> Any:
    async def read(made: Router, asked: ChatRequest) -> list[Event]:
        return await answer(made, asked)

    async def fed(made: Router, asked: ChatRequest) -> list[Event]:
        events: list[Event] = []
        stream = made.chat(asked)
        assert isinstance(stream, EventFeed)
        await stream.feed(events.append)
        return events

    return {"read": read, "fed": fed}[request.param]


async def test_a_failure_before_the_first_event_moves_the_request(take: Any) -> None:
    one, two = replica("one"), replica("two")
    fake(one).refusal = GONE
    made = router(one, two)
    events = await take(made, asking())
    assert text(events) == "Hello from a fake model."
    (decision,) = made.decisions.find("id")
    assert (decision.chosen, decision.attempts) == ("two", 2)
    assert decision.failed[0].backend == "one"
    assert made.answered_by("id") == ("two",)
    assert (one.in_flight, two.in_flight, one.num_failures) == (0, 0, 1)


async def test_nothing_is_repeated_after_the_first_event(take: Any) -> None:
    one, two = replica("one"), replica("two")
    fake(one).failure, fake(one).fail_after = GONE, 2
    with pytest.raises(UnavailableError, match="it is gone"):
        await take(router(one, two), asking())
    assert not fake(two).requests and one.in_flight == 0


async def test_what_is_the_clients_fault_is_told_at_once(take: Any) -> None:
    one, two = replica("one"), replica("two")
    fake(one).refusal = InvalidRequestError("no", param="messages")
    with pytest.raises(InvalidRequestError):
        await take(router(one, two), asking())
    assert not fake(two).requests and one.num_failures == 0


async def test_attempts_are_bounded_and_the_last_error_is_the_answer() -> None:
    everyone = [replica(f"r{number}") for number in range(6)]
    for each in everyone:
        fake(each).refusal = GONE
    made = router(*everyone)
    with pytest.raises(UnavailableError, match="it is gone"):
        await answer(made)
    assert sum(len(fake(each).requests) for each in everyone) == attempts_module.MAX_ATTEMPTS


async def test_no_replica_is_asked_twice() -> None:
    one = replica("one")
    fake(one).refusal = GONE
    with pytest.raises(UnavailableError):
        await answer(router(one))
    assert len(fake(one).requests) == 1


async def test_a_fast_path_is_kept() -> None:
    one = replica("one", Fed())
    events: list[Event] = []
    stream = router(one).chat(asking())
    assert isinstance(stream, EventFeed)
    await stream.feed(events.append)
    assert text(events) == "Hello from a fake model." and isinstance(events[-1], UsageEvent)
    assert one.generated_tokens == 6 and one.first_token_p50_s is not None


async def test_leaving_early_releases_the_backend(take: Any) -> None:
    one = replica("one")
    fake(one).token_s = 60.0
    made = router(one)
    reading = asyncio.create_task(take(made, asking()))
    while not fake(one).num_open:
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (fake(one).num_open, fake(one).num_cut_short, one.in_flight) == (0, 1, 0)
    assert one.num_failures == 0


async def test_closing_a_stream_early_releases_the_backend() -> None:
    one = replica("one")
    async with aclosing(router(one).chat(asking())) as events:  # type: ignore[type-var]
        await anext(events)
        assert one.in_flight == 1
    assert (fake(one).num_open, one.in_flight) == (0, 0)


async def test_who_is_down_is_not_asked_and_comes_back() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(one).ready = False
    for number in range(4):
        await answer(made, asking(f"a{number}"))
    assert not fake(one).requests
    (decision,) = made.decisions.find("a0")
    assert decision.candidates[0].why_not == "down: loading weights"
    fake(one).ready = True
    for number in range(4):
        await answer(made, asking(f"b{number}"))
    assert len(fake(one).requests) == 2


async def test_who_says_it_is_well_and_fails_is_left_out_tried_and_taken_back() -> None:
    now = [1000.0]
    one = replica("one", clock=lambda: now[0])
    two = replica("two", clock=lambda: now[0])
    made = router(one, two)
    fake(one).refusal = GONE
    for number in range(2 * CONSECUTIVE_FAILURES + 4):
        assert text(await answer(made, asking(f"a{number}")))
    assert len(fake(one).requests) == CONSECUTIVE_FAILURES
    assert describe_routes(made)["models"][0]["backends"][0]["state"] == "ejected"
    now[0] += 1.5
    await answer(made, asking("probe"))  # fails there, answered by the other
    assert made.answered_by("probe") == ("two",)
    now[0] += 1.5  # the second time takes longer
    await answer(made, asking("early"))
    assert len(fake(one).requests) == CONSECUTIVE_FAILURES + 1
    now[0] += 1.0
    fake(one).refusal = None
    await answer(made, asking("again"))
    assert made.answered_by("again") == ("one",)
    assert describe_routes(made)["models"][0]["backends"][0]["state"] == "ready"


async def test_the_last_one_is_never_left_out() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(two).ready = False
    fake(one).refusal = GONE
    for number in range(20):
        with pytest.raises(UnavailableError):
            await answer(made, asking(f"a{number}"))
    assert len(fake(one).requests) == 20 and not one.outlier.is_ejected


async def test_who_is_out_is_asked_when_nobody_else_is_left() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(one).refusal = GONE
    for number in range(2 * CONSECUTIVE_FAILURES):
        await answer(made, asking(f"a{number}"))
    assert one.outlier.is_out
    fake(one).refusal, fake(two).ready = None, False
    assert text(await answer(made, asking("last")))
    assert made.answered_by("last") == ("one",)


async def test_who_was_down_begins_afresh() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(one).refusal = GONE
    for number in range(2 * CONSECUTIVE_FAILURES):
        await answer(made, asking(f"a{number}"))
    assert one.outlier.is_out
    fake(one).refusal, fake(one).ready = None, False
    made.health()
    fake(one).ready = True
    for number in range(2):
        await answer(made, asking(f"b{number}"))
    assert not one.outlier.is_ejected and len(fake(one).requests) == CONSECUTIVE_FAILURES + 1


async def test_who_is_full_is_passed_over_and_then_waited_for() -> None:
    one, two = replica("one", max_concurrent=1), replica("two", max_concurrent=1)
    for each in (one, two):
        fake(each).token_s = 0.02
    made = router(one, two, policy="session")
    tasks = [
        asyncio.create_task(answer(made, asking(f"a{number}", session="s"))) for number in range(4)
    ]
    answers = await asyncio.gather(*tasks)
    assert all(text(each) == "Hello from a fake model." for each in answers)
    assert {made.answered_by(f"a{number}") for number in range(2)} == {("one",), ("two",)}
    assert made.decisions.find("a3")[0].waited_s > 0
    assert (one.in_flight, two.in_flight) == (0, 0)


async def test_when_all_are_full_for_long_the_client_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts_module, "MAX_WAIT_S", 0.02)
    one = replica("one", max_concurrent=1)
    fake(one).token_s = 60.0
    made = router(one)
    busy = asyncio.create_task(answer(made, asking("busy")))
    while not fake(one).num_open:
        await asyncio.sleep(0)
    with pytest.raises(RateLimitError) as caught:
        await answer(made, asking("late"))
    assert caught.value.retry_after
    waiting = [asyncio.create_task(answer(made, asking(f"w{number}"))) for number in range(2)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, RateLimitError) for each in results)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    assert not made.routes[0].has_waiting


async def test_whoever_leaves_when_its_turn_comes_passes_it_on() -> None:
    one = replica("one", max_concurrent=2)
    made = router(one)
    one.in_flight = 2
    leaver = asyncio.create_task(answer(made, asking("leaver")))
    waiter = asyncio.create_task(answer(made, asking("waiter")))
    await asyncio.sleep(0.01)
    one.release()
    made.freed(one)
    leaver.cancel()
    assert text(await asyncio.wait_for(waiter, 2))
    await asyncio.gather(leaver, return_exceptions=True)
    assert one.in_flight == 1


async def test_nobody_ready_is_503_with_a_time_to_come_back() -> None:
    one = replica("one")
    fake(one).ready = False
    with pytest.raises(UnavailableError) as caught:
        await answer(router(one))
    assert caught.value.retry_after and "m" in caught.value.message


async def test_another_model_answers_while_all_backends_are_down_and_says_so() -> None:
    one, two = replica("one"), replica("two")
    policy = make_policy("round_robin")
    routes = [
        Route("a", [Member(one, 1)], "round_robin", policy, aliases=("x",), fallbacks=("b",)),
        Route("b", [Member(two, 1)], "round_robin", policy),
    ]
    made = Router([one, two], routes, RouterMetrics(CollectorRegistry()))
    resolved = made.resolve("x")
    assert resolved is not None and resolved.card.id == "x" and resolved.card.root == "a"
    fake(one).ready = False
    resolved = made.resolve("x")
    assert resolved is not None and resolved.card.id == "b"
    assert resolved.warning == "no backend of a is up; b answers"
    assert made.health().ready and not made.model_health("a").ready
    fake(two).ready = False
    resolved = made.resolve("x")
    assert resolved is not None and resolved.card.id == "x"
    assert not made.health().ready
    assert made.resolve("nothing") is None
    with pytest.raises(NotFoundError):
        await answer(made, asking(model="nothing"))


def test_a_model_can_what_all_its_backends_can() -> None:
    one, two = replica("one"), replica("two")
    fake(one).set_card(max_model_len=100, backend="native", emulated=("tools",), lacks=("min_p",))
    fake(two).set_card(capabilities=("chat", "tools"), backend="vllm", emulated=("min_p", "n"))
    (card,) = router(one, two).models()
    assert (card.id, card.max_model_len, card.backend) == ("m", 100, "native+vllm")
    assert card.capabilities == ("chat", "tools")
    assert (card.lacks, card.emulated) == (("min_p",), ("tools", "n"))


async def test_all_start_at_once_and_none_stays_if_one_cannot() -> None:
    one, two = replica("one"), replica("two")
    fake(two).start_error = ModelFormatError("broken file")
    with pytest.raises(ModelFormatError, match="backend two: broken file"):
        await router(one, two).start()
    assert fake(one).is_stopped and fake(two).is_stopped


async def test_a_model_is_served_before_all_backends_are_ready() -> None:
    class Slow(FakeBackend):
        begun = asyncio.Event()

        async def start(self) -> str:
            await self.begun.wait()
            self.ready = True
            return "slow://"

    slow = Slow()
    slow.ready = False
    one, two = replica("one"), replica("two", slow)
    one.has_started = two.has_started = False
    made = router(one, two)
    starting = asyncio.create_task(made.start())
    await asyncio.sleep(0.01)
    assert text(await answer(made))
    assert describe_routes(made)["models"][0]["backends"][1]["state"] == "loading"
    assert not starting.done()
    slow.begun.set()
    await starting
    await made.stop()
    assert slow.is_stopped


async def test_totals_go_on_when_an_engine_is_replaced() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(one).stats_now = EngineStats(num_steps=10, prompt_tokens=100, num_running=1)
    fake(two).stats_now = EngineStats(num_steps=5, prompt_tokens=50, num_running=2)
    stats = made.stats()
    assert stats is not None and (stats.prompt_tokens, stats.num_running) == (150, 3)
    fake(one).stats_now = None
    stats = made.stats()
    assert stats is not None and (stats.prompt_tokens, stats.num_running) == (150, 2)
    fake(one).stats_now = EngineStats(num_steps=1, prompt_tokens=7)
    stats = made.stats()
    assert stats is not None and stats.prompt_tokens == 157


async def test_vectors_are_retried_as_well() -> None:
    one, two = replica("one"), replica("two")
    fake(one).refusal = GONE
    request = EmbedRequest(request_id="e", model="m", inputs=("a b",))
    made = router(one, two)
    assert (await made.embed(request)).prompt_tokens == 2
    assert made.answered_by("e") == ("two",) and two.prompt_tokens == 2


async def test_tokens_are_told_by_whoever_can() -> None:
    class Mute(FakeBackend):
        async def tokenize(self, *args: Any, **options: Any) -> tuple[int, ...]:
            raise InvalidRequestError("does not tell", param="model")

    made = router(replica("one", Mute()), replica("two"))
    assert await made.tokenize("a", model="m") == (256, 97)
    with pytest.raises(InvalidRequestError, match="There is no token"):
        await made.detokenize((999,), model="m")


async def test_a_decision_is_explained_in_words() -> None:
    one, two, three = replica("one"), replica("two"), replica("three", max_concurrent=1)
    fake(one).refusal = GONE
    three.in_flight = 1
    made = router(one, two, three)
    await answer(made)
    (told,) = describe_decisions(made, "id")
    words = told["explanation"]
    assert "m was asked for; its policy is round_robin." in words
    assert "one was tried and failed: it is gone" in words
    assert "two was chosen: weight 1 of 1." in words
    assert "Not three: full: 1 of 1 in flight." in words
    listed = describe_routes(made)["decisions"][0]
    assert {
        "request_id",
        "model",
        "chosen",
        "policy",
        "why",
        "candidates",
        "attempts",
        "at",
    } <= set(listed)
    assert {"name", "state", "score", "why_not"} <= set(listed["candidates"][0])


async def test_prompts_of_one_request_are_found_by_its_id() -> None:
    made = router(replica("one"), replica("two"))
    for number in range(3):
        await answer(made, asking(f"cmpl-x-{number}"))
    assert made.answered_by("cmpl-x") == ("one", "two")
    assert len(made.decisions.find("cmpl-x")) == 3


async def test_metrics_have_a_series_for_each_backend() -> None:
    registry = CollectorRegistry()
    one, two = replica("one"), replica("two")
    fake(one).refusal = GONE
    await answer(router(one, two, registry=registry))
    page = generate_latest(registry).decode()
    assert 'engine_backend_requests_total{backend="one",model_name="m",outcome="error"} 1.0' in page
    assert 'engine_backend_requests_total{backend="two",model_name="m",outcome="ok"} 1.0' in page
    assert 'engine_backend_generated_tokens_total{backend="two",kind="fake"} 6.0' in page
    assert 'engine_backend_failures_total{backend="one",kind="fake"} 1.0' in page


class Looker:
    """Shadow traffic that only looks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[Event] = []
        self.asked: list[tuple[str, str]] = []
        self.error = error
        self.is_stopped = False

    def mirror(self, model: str, request: Any) -> "Looker":
        self.asked.append((model, request.context.request_id))
        return self

    def primary(self, event: Event) -> None:
        self.seen.append(event)
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        self.is_stopped = True


async def test_shadow_traffic_sees_a_request_once_and_all_events(take: Any) -> None:
    one, two, looker = replica("one"), replica("two"), Looker()
    fake(one).refusal = GONE
    made = router(one, two, shadow=looker)
    events = await take(made, asking())
    assert looker.asked == [("m", "id")] and looker.seen == events
    await made.stop()
    assert looker.is_stopped


async def test_shadow_traffic_that_fails_harms_nobody(take: Any) -> None:
    looker = Looker(EngineError("bug"))
    assert text(await take(router(replica("one"), shadow=looker), asking()))
    assert len(looker.seen) == 1


async def test_a_replaced_engine_has_seen_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two, policy="prefix")
    long = ({"role": "user", "content": "a" * 640},)
    request = asking()
    await answer(made, ChatRequest(context=request.context, messages=long))
    assert len(one.seen) == 10
    health = one.backend.health()
    restarted = msgspec.structs.replace(health, num_restarts=1)
    monkeypatch.setattr(one.backend, "health", lambda: restarted)
    made.health()
    assert len(one.seen) == 0
