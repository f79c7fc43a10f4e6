"""The router over backends without a model: who is asked, and who is asked next."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from engine.backends.base import EventFeed, InterruptedRequest
from engine.core.errors import (
    InvalidRequestError,
    RateLimitError,
    RequestTimeoutError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    ChatRequest,
    Event,
    UsageEvent,
)
from engine.routing import attempts as attempts_module
from engine.routing.replica import CONSECUTIVE_FAILURES
from engine.routing.report import describe_routes
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.fakes.routed_replicas import (
    GONE,
    Fed,
    answer,
    asking,
    both_ways,
    fake,
    replica,
    router,
    text,
)


@both_ways
async def test_a_failure_before_the_first_event_moves_the_request_to_another_replica(
    take: Any,
) -> None:
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


@both_ways
async def test_a_stream_is_not_retried_after_its_first_event(take: Any) -> None:
    one, two = replica("one"), replica("two")
    fake(one).failure, fake(one).fail_after = GONE, 2
    with pytest.raises(UnavailableError, match="it is gone"):
        await take(router(one, two), asking())
    assert not fake(two).requests and one.in_flight == 0


@both_ways
async def test_client_errors_are_not_retried(take: Any) -> None:
    one, two = replica("one"), replica("two")
    fake(one).refusal = InvalidRequestError("no", param="messages")
    with pytest.raises(InvalidRequestError):
        await take(router(one, two), asking())
    assert not fake(two).requests and one.num_failures == 0


async def test_retries_are_bounded_and_the_last_error_is_returned() -> None:
    everyone = [replica(f"r{number}") for number in range(6)]
    for each in everyone:
        fake(each).refusal = GONE
    made = router(*everyone)
    with pytest.raises(UnavailableError, match="it is gone"):
        await answer(made)
    assert sum(len(fake(each).requests) for each in everyone) == attempts_module.MAX_ATTEMPTS


async def test_no_replica_is_tried_twice() -> None:
    one = replica("one")
    fake(one).refusal = GONE
    with pytest.raises(UnavailableError):
        await answer(router(one))
    assert len(fake(one).requests) == 1


async def test_the_router_keeps_a_backends_feed_interface() -> None:
    one = replica("one", Fed())
    events: list[Event] = []
    stream = router(one).chat(asking())
    assert isinstance(stream, EventFeed)
    await stream.feed(events.append)
    assert text(events) == "Hello from a fake model." and isinstance(events[-1], UsageEvent)
    assert one.generated_tokens == 6 and one.first_token_p50_s is not None


@both_ways
async def test_cancelling_a_request_releases_the_replica(take: Any) -> None:
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


async def test_closing_a_stream_early_releases_the_replica() -> None:
    one = replica("one")
    async with aclosing(router(one).chat(asking())) as events:  # type: ignore[type-var]
        await anext(events)
        assert one.in_flight == 1
    assert (fake(one).num_open, one.in_flight) == (0, 0)


async def test_a_replica_that_is_down_gets_no_requests_until_it_is_back() -> None:
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


async def test_a_failing_replica_is_ejected_probed_and_taken_back() -> None:
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


async def test_a_replica_that_is_only_busy_is_never_ejected() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(one).refusal = RateLimitError("busy")
    for number in range(4 * CONSECUTIVE_FAILURES):
        await answer(made, asking(f"a{number}"))
    assert not one.outlier.is_out and one.num_failures == 0


async def test_the_last_replica_is_never_ejected() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(two).ready = False
    fake(one).refusal = GONE
    for number in range(20):
        with pytest.raises(UnavailableError):
            await answer(made, asking(f"a{number}"))
    assert len(fake(one).requests) == 20 and not one.outlier.is_ejected


async def test_an_ejected_replica_is_used_if_no_other_is_available() -> None:
    one, two = replica("one"), replica("two")
    made = router(one, two)
    fake(one).refusal = GONE
    for number in range(2 * CONSECUTIVE_FAILURES):
        await answer(made, asking(f"a{number}"))
    assert one.outlier.is_out
    fake(one).refusal, fake(two).ready = None, False
    assert text(await answer(made, asking("last")))
    assert made.answered_by("last") == ("one",)


async def test_a_replica_that_was_down_starts_with_a_clean_record() -> None:
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


async def test_a_full_replica_is_skipped_and_then_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts_module, "MAX_WAIT_S", 600.0)
    one, two = replica("one", max_concurrent=1), replica("two", max_concurrent=1)
    for each in (one, two):
        fake(each).token_s = 0.02
    made = router(one, two, policy="session")
    tasks = [
        asyncio.create_task(answer(made, asking(f"a{number}", session="s"))) for number in range(4)
    ]
    async with asyncio.timeout(60):  # whoever waits is told when a place is free
        answers = await asyncio.gather(*tasks)
    assert all(text(each) == "Hello from a fake model." for each in answers)
    assert {made.answered_by(f"a{number}") for number in range(2)} == {("one",), ("two",)}
    assert made.decisions.find("a3")[0].waited_s > 0
    assert (one.in_flight, two.in_flight) == (0, 0)


async def test_waiting_too_long_for_a_full_replica_is_a_rate_limit_error(
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


async def test_a_cancelled_waiter_passes_its_turn_to_the_next() -> None:
    one = replica("one", max_concurrent=2)
    made = router(one)
    one.in_flight = 2
    leaver = asyncio.create_task(answer(made, asking("leaver")))
    waiter = asyncio.create_task(answer(made, asking("waiter")))
    while len(made.routes[0]._waiting) < 2:
        await asyncio.sleep(0)
    one.release()
    made.freed(one)
    leaver.cancel()
    assert text(await asyncio.wait_for(waiter, 30))
    await asyncio.gather(leaver, return_exceptions=True)
    assert one.in_flight == 1


class Steps:
    """A clock that goes on by a second whenever it is looked at."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1.0
        return self._now


@both_ways
async def test_a_retry_gets_the_remaining_time_of_the_request(
    take: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts_module, "time", Steps())
    one, two = replica("one"), replica("two")
    fake(one).refusal = GONE
    await take(router(one, two), asking(timeout_s=100.0))
    left = fake(two).requests[0].context.timeout_s
    assert left is not None and 50.0 < left < 100.0


async def test_answered_by_is_empty_if_all_replicas_failed() -> None:
    replicas = [replica(f"r{number}") for number in range(attempts_module.MAX_ATTEMPTS)]
    made = router(*replicas)
    for each in replicas:
        fake(each).refusal = GONE
    with pytest.raises(UnavailableError):
        await answer(made, asking())
    assert made.answered_by("id") == ()


async def test_a_timeout_counts_as_a_failure_only_before_the_first_event() -> None:
    one = replica("one")
    late = RequestTimeoutError("too late")
    fake(one).failure, fake(one).fail_after = late, 2
    with pytest.raises(RequestTimeoutError):
        await answer(router(one))
    assert one.num_failures == 0
    fake(one).refusal = late
    with pytest.raises(RequestTimeoutError):
        await answer(router(one))
    assert one.num_failures == 1


async def test_a_probe_whose_client_disconnects_is_repeated() -> None:
    now = [1000.0]
    one, two = (replica(name, clock=lambda: now[0]) for name in ("one", "two"))
    made = router(one, two)
    fake(one).refusal = GONE
    for number in range(2 * CONSECUTIVE_FAILURES):
        await answer(made, asking(f"a{number}"))
    fake(one).refusal = None
    fake(one).prefill_s = 60.0
    now[0] += 1.5
    trying = asyncio.create_task(answer(made, asking("trial")))
    while not fake(one).num_open:
        await asyncio.sleep(0)
    assert not one.outlier.wants_probe
    trying.cancel()
    await asyncio.gather(trying, return_exceptions=True)
    assert one.outlier.wants_probe
    fake(one).prefill_s = 0.0
    await answer(made, asking("again"))
    assert made.answered_by("again") == ("one",) and not one.outlier.is_ejected


async def test_flushing_prefixes_clears_what_replicas_have_seen() -> None:
    one = replica("one")
    made = router(one, policy="prefix")
    long = ({"role": "user", "content": "a" * 640},)
    request = asking()
    await answer(made, ChatRequest(context=request.context, messages=long))
    assert len(one.seen) == 10
    await made.flush_prefixes()
    assert len(one.seen) == 0


class Adopting(FakeBackend):
    """Continues requests whose fingerprint it knows."""

    fingerprint = "same"

    def take_over(self, interrupted: InterruptedRequest) -> bool:
        return interrupted.fingerprint == self.fingerprint


async def test_an_interrupted_request_moves_to_a_ready_replica_with_its_fingerprint() -> None:
    names = ("home", "else", "down", "full", "kin")
    home, other, down, full, kin = (replica(n, Adopting(), max_concurrent=1) for n in names)
    other.backend.fingerprint, fake(down).ready = "another", False
    full.take()
    made = router(home, other, down, full, kin)
    fake(home).prefill_s = 60.0
    asked = asyncio.create_task(answer(made))
    while not home.in_flight:
        await asyncio.sleep(0)
    assert not home.backend.on_interrupted(InterruptedRequest("unknown", "same", None))
    assert home.backend.on_interrupted(InterruptedRequest("id", "same", None))
    assert (home.in_flight, kin.in_flight) == (0, 1)
    (decision,) = made.decisions.find("id")
    assert (decision.chosen, decision.failed[0].backend) == ("kin", "home")
    fake(home).ready = False
    assert not kin.backend.on_interrupted(InterruptedRequest("id", "same", None)), (
        "there is nobody else"
    )
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert kin.in_flight == 0 and not made.running


async def test_requests_wait_for_a_replica_that_is_being_restarted() -> None:
    class Restarting(FakeBackend):
        is_ready = True

    one, two = replica("one", Restarting()), replica("two")
    fake(one).ready = False
    made = router(one, two)
    assert text(await answer(made)) and made.answered_by("id") == ("two",)
    fake(two).ready = False
    assert made.is_ready and not made.health().ready
    assert text(await answer(made, asking("next"))) and made.answered_by("next") == ("one",)
