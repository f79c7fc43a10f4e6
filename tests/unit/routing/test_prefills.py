"""Which prompts go to prefill nodes, and what happens if a node does not answer. The engines are
stand-ins that only note what they are sent.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from engine.core.errors import UnavailableError
from engine.core.interfaces.handover import BlockSource
from engine.core.interfaces.request import (
    UNSHARED,
    CachedPrefixes,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from engine.core.interfaces.stats import EngineStats, TierStats
from engine.core.prefix_hashes import prompt_hashes
from engine.frontend import request_recovery as survival
from engine.routing.nodes import prefill
from engine.routing.nodes.pool import NodePool
from engine.routing.nodes.pooled import PooledEngine
from engine.routing.nodes.prefill import MAX_TOKENS, MIN_TOKENS, PrefillCosts

LONG = tuple(range(600))
SOURCE = BlockSource("10.0.0.2", 7001, "secret-of-the-node")


class Link:
    """An engine that answers nothing by itself."""

    def __init__(self, identity: str = "same") -> None:
        self.ready = SimpleNamespace(cache_identity=identity)
        self.stats: EngineStats | None = None
        self.is_up = True
        self.num_restarts = self.num_revived = 0
        self.sent: dict[str, tuple[GenerateRequest, Any]] = {}
        self.forgotten: list[str] = []
        self.is_gone = False

    @property
    def num_open(self) -> int:
        return len(self.sent)

    def submit(self, request: GenerateRequest, receiver: Any) -> None:
        if self.is_gone:
            raise UnavailableError("gone")
        self.sent[request.request_id] = request, receiver

    def take_over(self, opened: Any) -> None:
        opened.receiver.engine = self
        self.submit(opened.resumed(), opened.receiver)

    def forget(self, request_id: str, choice: int | None) -> None:
        self.forgotten.append(request_id)
        self.sent.pop(request_id, None)

    def done(self, request_id: str) -> None:
        self.sent.pop(request_id, None)

    async def control(self, action: str) -> None:
        pass

    def lost(self, reason: str) -> None:
        pass

    def release(self) -> list[Any]:
        return []


class Client:
    engine: Any = None

    def __init__(self) -> None:
        self.got: list[Any] = []

    def deliver(self, *items: Any) -> None:
        self.got += items


class Cluster:
    """A pool with engines of the given roles and cache identities."""

    def __init__(self, min_tokens: int | None = 64, **roles: Any) -> None:
        self.pool = NodePool(None, "", 8, min_tokens)
        self.links: dict[str, Link] = {}
        for name, given in roles.items():
            role, identity = given if isinstance(given, tuple) else (given, "same")
            self.links[name] = Link(identity)
            link: Any = self.links[name]
            engine = self.pool._add(PooledEngine(name, link, ""))
            engine.role = role
            engine.blocks = SOURCE if role == "prefill" else None
            self.pool.begin(engine)

    def ask(self, prompt: tuple[int, ...] = LONG, **fields: Any) -> Client:
        client = Client()
        params = fields.pop("params", SamplingParams(seed=1))
        request = GenerateRequest(request_id="r", prompt=prompt, params=params, **fields)
        self.pool.submit(request, client)
        return client

    def where(self) -> list[str]:
        return [name for name, link in self.links.items() if link.sent]

    def answer(self, name: str, **fields: Any) -> None:
        """The prefill node answers."""
        _, receiver = self.links[name].sent["r:prefill"]
        given = {"finish_reason": "length", "num_cached": 64, "prefill_s": 0.5} | fields
        receiver.deliver(TokenDelta("r:prefill", 0, (1,), **given))

    @property
    def handover(self) -> Any:
        return self.links["d"].sent["r"][0].handover


async def test_a_long_prompt_goes_to_a_prefill_node_first() -> None:
    cluster = Cluster(p="prefill", d="decode")
    client = cluster.ask(timeout_s=60.0, salt="s", tenant="t")
    assert cluster.where() == ["p"]
    question, _ = cluster.links["p"].sent["r:prefill"]
    assert (question.prompt, question.salt, question.tenant) == (LONG, "s", "t")
    assert question.keeps_blocks and question.params.max_tokens == 1
    cluster.answer("p")
    assert cluster.where() == ["d"] and client.engine is cluster.links["d"]
    request = cluster.links["d"].sent["r"][0]
    assert cluster.handover.source == SOURCE
    done = cluster.handover.prefilled
    assert (done.node, done.outcome, done.num_cached) == ("p", "done", 64)
    assert request.resumed is None and request.timeout_s <= 60.0 and request.params.seed == 1
    assert [name for _, name, _ in cluster.pool.decisions] == ["p", "d"]
    assert cluster.pool.answered_by("r") == ("d",)


async def test_the_begin_event_is_forwarded_when_a_prefill_node_starts() -> None:
    cluster = Cluster(p="prefill", d="decode")
    client = cluster.ask(tells_begin=True)
    question, receiver = cluster.links["p"].sent["r:prefill"]
    assert question.tells_begin
    receiver.deliver(TokenDelta("r:prefill", 0, begins=True))
    assert client.got == [TokenDelta("r", 0, begins=True)]
    cluster.answer("p")
    assert len(client.got) == 1


async def test_time_at_a_prefill_node_does_not_count_as_queue_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(survival.time, "monotonic", lambda: now[0])
    cluster = Cluster(p="prefill", d="decode")
    cluster.ask(timeout_s=600.0, queue_timeout_s=10.0)
    now[0] += 50.0  # of which it waited four seconds in the queue of the node
    cluster.answer("p", queue_s=4.0, prefill_s=46.0)
    request = cluster.links["d"].sent["r"][0]
    assert request.queue_timeout_s == pytest.approx(6.0)
    assert request.timeout_s == pytest.approx(550.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": LONG[:63]},
        {"pools": True},
        {"salt": f"{UNSHARED}1"},
        {"params": SamplingParams(score_prompt=True)},
    ],
)
async def test_short_and_special_requests_go_straight_to_a_decode_node(
    fields: dict[str, Any],
) -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.ask(**fields)
    assert cluster.where() == ["d"] and cluster.handover is None


async def test_a_cached_prompt_goes_straight_to_its_decode_node() -> None:
    cluster = Cluster(p="prefill", d="decode")
    number = cluster.pool.engines["d"].number
    known = CachedPrefixes(tuple(prompt_hashes("", LONG)))
    cluster.pool.router.update_routing_table(number, known)
    cluster.ask()
    assert cluster.where() == ["d"]


@pytest.mark.parametrize(
    "roles",
    [
        {"p": ("prefill", "other"), "d": "decode"},  # other blocks: files, numerics or version
        {"p": ("prefill", ""), "d": ("decode", "")},
        {"p": "both", "d": "decode"},
    ],
)
async def test_blocks_are_moved_only_between_engines_of_the_same_layout(
    roles: dict[str, Any],
) -> None:
    cluster = Cluster(**roles)
    cluster.ask()
    assert [list(link.sent) for link in cluster.links.values() if link.sent] == [["r"]]


async def test_a_prefill_node_gets_whole_requests_only_if_there_is_no_other_node() -> None:
    cluster = Cluster(p="prefill", d="decode")
    for _ in range(8):
        cluster.links["d"].sent["busy" + str(_)] = (None, None)  # type: ignore[assignment]
    cluster.ask(LONG[:32])
    assert not cluster.links["p"].sent
    alone = Cluster(p="prefill")
    alone.ask()
    assert "r" in alone.links["p"].sent


async def test_a_request_continues_if_its_prefill_node_refuses_or_is_lost() -> None:
    def refuse(cluster: Cluster) -> None:
        cluster.answer("p", finish_reason="error", error_code="RATE_LIMIT")

    def lose(cluster: Cluster) -> None:
        cluster.links["p"].sent["r:prefill"][1].deliver(UnavailableError("it died"))

    for outcome, act in (("refused", refuse), ("lost", lose)):
        cluster = Cluster(p="prefill", d="decode")
        client = cluster.ask()
        act(cluster)
        assert not client.got and cluster.handover.source is None
        assert cluster.handover.prefilled.outcome == outcome
        assert cluster.pool.prefills.outcomes == {outcome: 1}
    cluster = Cluster(p="prefill", d="decode")
    cluster.links["p"].is_gone = True  # while it is asked
    cluster.ask()
    assert cluster.handover.prefilled.outcome == "lost"


async def test_a_slow_prefill_node_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MIN_PATIENCE_S", 0.01)
    monkeypatch.setattr(prefill, "PATIENCE", 0.0)
    cluster = Cluster(p="prefill", d="decode")
    cluster.ask()
    _, receiver = cluster.links["p"].sent["r:prefill"]
    while not cluster.links["p"].forgotten:
        await asyncio.sleep(0.001)
    assert cluster.handover.prefilled.outcome == "late"
    assert cluster.links["p"].forgotten == ["r:prefill"]
    receiver.deliver(TokenDelta("r:prefill", 0, (1,), finish_reason="length"))  # too late
    assert cluster.pool.prefills.outcomes == {"late": 1}


async def test_a_client_that_leaves_ends_the_prefill() -> None:
    cluster = Cluster(p="prefill", d="decode")
    client = cluster.ask()
    client.engine.forget("r", None)
    assert cluster.links["p"].forgotten == ["r:prefill"] and cluster.where() == []
    assert not cluster.pool.prefills.outcomes


async def test_a_swap_takes_requests_waiting_for_prefill_along() -> None:
    cluster = Cluster(p="prefill", d="decode")
    client = cluster.ask()
    (opened,) = cluster.pool.release()
    assert opened.receiver is client and opened.request.handover is None


def test_the_prefill_threshold_follows_measured_costs() -> None:
    costs = PrefillCosts()
    assert costs.threshold(0.0) == prefill.FIRST_MIN_TOKENS
    costs.record(1000, compute_s=1.0, total_s=1.2)  # 1 ms per token, and 200 ms for asking
    assert costs.threshold(0.0) == pytest.approx(200, abs=1)
    assert costs.threshold(0.0005) == pytest.approx(400, abs=1), "fetching takes half of it"
    assert costs.threshold(0.002) == MAX_TOKENS, "fetching takes longer than computing"
    longer_s = costs.patience_s(3000) - costs.patience_s(1000)
    assert longer_s == pytest.approx(2 * prefill.PATIENCE), "2000 tokens take 2 s"
    fast = PrefillCosts()
    fast.record(1000, compute_s=1.0, total_s=1.001)
    assert fast.threshold(0.0) == MIN_TOKENS
    assert PrefillCosts(99).threshold(1.0) == 99


@pytest.mark.parametrize(
    ("load_s", "places"),
    [
        pytest.param(10.0, ["d"], id="10 ms per token are more than computing takes"),
        pytest.param(0.2, ["p"], id="0.2 ms are less"),
    ],
)
async def test_measured_block_fetch_times_decide_about_prefill_nodes(
    load_s: float, places: list[str]
) -> None:
    cluster = Cluster(min_tokens=None, p="prefill", d="decode")
    cluster.pool.prefills.costs.record(1000, compute_s=1.0, total_s=1.01)
    fetched = TierStats(name="peers", load_s=load_s, saved_tokens=1000)
    cluster.links["d"].stats = structs.replace(EngineStats(), tiers=(fetched,))
    cluster.ask()
    assert cluster.where() == places
