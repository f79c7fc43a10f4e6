"""What clients and operators are told by a router: models, decisions, metrics, shadow traffic."""

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    ModelFormatError,
    NotFoundError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    ChatRequest,
    EmbedRequest,
    Event,
)
from engine.core.interfaces.stats import EngineStats
from engine.routing.metrics import RouterMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member
from engine.routing.report import describe_decisions, describe_routes
from engine.routing.route import Route
from engine.routing.router import Router
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.fakes.routed_replicas import (
    GONE,
    answer,
    asking,
    both_ways,
    fake,
    replica,
    router,
    text,
)


async def test_no_ready_replica_is_503_with_retry_after() -> None:
    one = replica("one")
    fake(one).ready = False
    with pytest.raises(UnavailableError) as caught:
        await answer(router(one))
    assert caught.value.retry_after and "m" in caught.value.message


async def test_a_fallback_model_answers_while_all_backends_are_down() -> None:
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


def test_a_models_capabilities_are_those_of_all_its_backends() -> None:
    one, two = replica("one"), replica("two")
    fake(one).set_card(max_model_len=100, backend="native", emulated=("tools",), lacks=("min_p",))
    fake(two).set_card(capabilities=("chat", "tools"), backend="vllm", emulated=("min_p", "n"))
    (card,) = router(one, two).models()
    assert (card.id, card.max_model_len, card.backend) == ("m", 100, "native+vllm")
    assert card.capabilities == ("chat", "tools")
    assert (card.lacks, card.emulated) == (("min_p",), ("tools", "n"))


async def test_all_backends_start_at_once_and_are_stopped_if_one_fails() -> None:
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
    while not one.has_started:
        await asyncio.sleep(0)
    assert text(await answer(made))
    assert describe_routes(made)["models"][0]["backends"][1]["state"] == "loading"
    assert not starting.done()
    slow.begun.set()
    await starting
    await made.stop()
    assert slow.is_stopped


async def test_token_totals_continue_when_an_engine_is_replaced() -> None:
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


async def test_embeddings_are_retried_on_another_replica() -> None:
    one, two = replica("one"), replica("two")
    fake(one).refusal = GONE
    request = EmbedRequest(request_id="e", model="m", inputs=("a b",))
    made = router(one, two)
    assert (await made.embed(request)).prompt_tokens == 2
    assert made.answered_by("e") == ("two",) and two.prompt_tokens == 2


async def test_tokenization_uses_a_replica_that_supports_it() -> None:
    class Mute(FakeBackend):
        async def tokenize(self, *args: Any, **options: Any) -> tuple[int, ...]:
            raise InvalidRequestError("does not tell", param="model")

    made = router(replica("one", Mute()), replica("two"))
    assert await made.tokenize("a", model="m") == (256, 97)
    with pytest.raises(InvalidRequestError, match="There is no token"):
        await made.detokenize((999,), model="m")


async def test_a_routing_decision_is_explained_in_text() -> None:
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


async def test_decisions_of_all_prompts_of_a_request_are_found_by_its_id() -> None:
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


@both_ways
async def test_shadow_traffic_sees_a_request_once_and_all_events(take: Any) -> None:
    one, two, looker = replica("one"), replica("two"), Looker()
    fake(one).refusal = GONE
    made = router(one, two, shadow=looker)
    events = await take(made, asking())
    assert looker.asked == [("m", "id")] and looker.seen == events
    await made.stop()
    assert looker.is_stopped


@both_ways
async def test_failing_shadow_traffic_does_not_affect_the_answer(take: Any) -> None:
    looker = Looker(EngineError("bug"))
    assert text(await take(router(replica("one"), shadow=looker), asking()))
    assert len(looker.seen) == 1


async def test_a_restarted_engine_has_no_seen_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
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
