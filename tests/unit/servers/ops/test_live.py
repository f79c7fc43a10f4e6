"""The live view: what a snapshot shows, and that it costs nothing when nobody watches."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.core.errors import RateLimitError
from engine.core.interfaces.request import Control, ControlReply
from engine.core.interfaces.snapshot import MAX_NODES, MAX_WAITING, EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.core.observability.metrics import Metrics
from engine.runtime.insight.snapshot import WATCHED_S, SnapshotTaker
from engine.servers.app import create_app
from engine.servers.ops import live
from engine.servers.ops.live import LiveView
from engine.servers.serving.services import NUM_PAST
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.servers.live_server import make_settings
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.llm import ToyBackend


def snapshot_of(engine: ToyEngine) -> EngineSnapshot:
    engine.channel.inbox.append(Control(1, "snapshot"))
    engine.loop._read_inbox(0.0)
    (reply,) = [each for each in engine.channel.outbox if isinstance(each, ControlReply)]
    engine.channel.outbox.clear()
    assert reply.snapshot is not None
    return reply.snapshot


def test_a_live_snapshot_shows_batch_queue_and_prefix_tree() -> None:
    engine = ToyEngine(max_slots=2, num_blocks=200, max_seq_len=128)
    prefix = tuple(range(20))
    engine.submit("before", prefix, max_tokens=1)
    engine.run()
    for number in range(3):
        engine.submit(f"r{number}", (*prefix, number), max_tokens=8, tenant=f"t{number}")
    engine.turn(2)
    shot = snapshot_of(engine)
    assert [(row.request_id, row.num_cached) for row in shot.running] == [("r0", 20), ("r1", 20)]
    assert [row.request_id for row in shot.waiting] == ["r2"]
    assert (shot.blocked_by, shot.max_slots) == ("slots", 2)
    assert shot.steps[-1].num_rows == 2
    shares = {each.tenant: (each.num_running, each.num_waiting) for each in shot.tenants}
    assert shares == {"t0": (1, 0), "t1": (1, 0), "t2": (0, 1)}
    # The tree has one prefix, which two sequences hold.
    assert (shot.tree.num_nodes, shot.tree.num_blocks, shot.tree.num_shared) == (1, 10, 1)
    assert (shot.tree.nodes[0].num_blocks, shot.tree.nodes[0].num_holders) == (10, 2)
    engine.run()
    engine.check()


def test_a_live_snapshot_is_bounded() -> None:
    engine = ToyEngine(max_slots=2, num_blocks=900, max_seq_len=64)
    for number in range(220):
        engine.submit(f"r{number}", (number % 20, number // 20, 3, 4), max_tokens=1)
    engine.run()
    for number in range(100):
        engine.submit(f"s{number}", (1, 2, 3), max_tokens=30)
    engine.turn()
    shot = snapshot_of(engine)
    assert len(shot.waiting) == MAX_WAITING
    assert shot.tree.num_nodes > MAX_NODES == len(shot.tree.nodes)
    assert all(each.parent < index for index, each in enumerate(shot.tree.nodes))


def test_a_bug_in_a_snapshot_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine()
    monkeypatch.setattr(SnapshotTaker, "take", lambda taker, now: 1 // 0)
    engine.submit("a", (1, 2, 3), max_tokens=4)
    engine.channel.inbox.append(Control(1, "snapshot"))
    engine.run()
    assert len(engine.outcomes["a", 0].tokens) == 4


def test_kernels_are_timed_only_while_a_live_view_is_open() -> None:
    engine = ToyEngine()
    switched: list[bool] = []
    timer: Any = SimpleNamespace(time_kernels=switched.append, kernel_seconds=lambda: {"mlp": 0.1})
    taker = SnapshotTaker(engine.scheduler, engine.loop._timings, timer)
    taker.expire(10.0)
    assert switched == []
    assert taker.take(10.0).kernels[0].name == "mlp"
    taker.take(10.0 + WATCHED_S)
    taker.expire(10.0 + 2 * WATCHED_S)
    assert switched == [True]
    taker.expire(10.1 + 2 * WATCHED_S)
    taker.expire(20.0 + 2 * WATCHED_S)
    assert switched == [True, False]


async def test_all_watchers_share_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL_S", 0.01)
    services = create_app(make_settings(), FakeBackend(), Metrics("m")).state.services
    view = LiveView(services)
    taken: list[dict[str, Any]] = []
    take = view.take

    async def counted() -> dict[str, Any]:
        taken.append(await take())
        return taken[-1]

    view.take = counted  # type: ignore[method-assign]
    await asyncio.sleep(0.05)
    assert not taken, "nobody watches"
    streams = [view.watch(), view.watch()]
    for each in streams:
        assert await anext(each) == b"event: past\ndata: []\n\n"
    seen = [[await anext(each) for _ in range(3)] for each in streams]
    assert set(seen[0]) & set(seen[1]) or len(taken) >= 6
    assert json.loads(seen[0][0].removeprefix(b"data: "))["in_flight"] == 0
    for each in streams:
        await each.aclose()
    assert view.num_watchers == 0
    while not view._taking.done():  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
    count = len(taken)
    await asyncio.sleep(0.05)
    assert len(taken) == count


async def test_a_live_stream_begins_with_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    services = create_app(make_settings(), backend, Metrics("m")).state.services
    for second in range(0, 1000, 1):  # the watcher looks more often than it keeps
        stats = EngineStats(generated_tokens=10 * second, num_running=second % 7)
        monkeypatch.setattr(backend, "stats", lambda stats=stats: stats)
        monkeypatch.setattr("time.monotonic", lambda second=second: 100.0 + second)
        services.watcher.observe()
    monkeypatch.undo()
    stream = LiveView(services).watch()
    past = json.loads((await anext(stream)).removeprefix(b"event: past\ndata: "))
    await stream.aclose()
    assert len(past) == NUM_PAST - 1 and past[-1]["at"] == 1098.0
    assert {each["rates"]["generated_tokens"] for each in past} == {10.0}
    assert past[-1]["num_running"] == 998 % 7


async def test_a_failing_snapshot_ends_the_live_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL_S", 0.01)
    backend = FakeBackend()
    view = LiveView(create_app(make_settings(), backend, Metrics("m")).state.services)
    streams = [view.watch(), view.watch()]
    for each in streams:
        assert await anext(each)

    async def failing() -> dict[str, EngineSnapshot]:
        raise RuntimeError("no snapshot")

    monkeypatch.setattr(backend, "snapshots", failing)
    async with asyncio.timeout(60):
        for each in streams:
            async for _ in each:
                pass
    assert view.num_watchers == 0
    monkeypatch.undo()
    again = view.watch()
    assert await anext(again), "a new watcher starts the view again"
    await again.aclose()


async def test_live_viewers_are_counted_before_their_first_frame() -> None:
    view = LiveView(create_app(make_settings(), FakeBackend(), Metrics("m")).state.services)
    streams = [view.watch() for _ in range(live.MAX_WATCHERS)]
    with pytest.raises(RateLimitError):
        view.watch()
    streams.pop()  # its client went away before the first frame
    streams.append(view.watch())
    assert view.num_watchers == live.MAX_WATCHERS


async def test_a_real_engine_serves_live_snapshots() -> None:
    backend = ToyBackend()
    await backend.start()
    app = create_app(make_settings(), backend, Metrics("toy"))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 3, "parse_special": False}
        await client.post("/v1/completions", json=body)
        shown = (await client.get("/v1/admin/snapshot")).json()
    assert shown["stats"]["num_steps"] >= 1
    assert shown["engines"][0]["max_slots"] > 0
    assert shown["tenants"] == {}
    await backend.stop()
