"""Windows in which requests and tokens are counted: clocks that jump, and a Redis that fails."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from limits.storage import storage_from_string

from engine.core.config_schema import LimitsSettings
from engine.core.errors import RateLimitError
from engine.core.key_file import KeyLimits
from engine.servers.access import rate_windows
from engine.servers.access.auth import Principal
from engine.servers.access.quotas import Quotas
from engine.servers.access.rate_windows import WINDOW_S, Window, Windows
from tests.unit.servers.access.test_quotas import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rate_windows, "time", clock)
    return clock


async def test_a_clock_jump_locks_no_client_out(clock: Clock) -> None:
    counted = Windows()
    for _ in range(5):
        await counted.add("x", 1)
    for jump in (86_400.0, -2 * 86_400.0):
        clock.now += jump
        assert (await counted.add("x", 1)).used <= 1


async def test_a_correction_is_booked_in_the_window_of_the_charge(clock: Clock) -> None:
    counted = Windows()
    charged = await counted.add("x", 100)
    clock.now += WINDOW_S
    await counted.add("x", 10)
    corrected = await counted.add("x", -90, charged.minute)
    assert (corrected.previous, corrected.current) == (10, 10)
    clock.now += 2 * WINDOW_S
    late = await counted.add("x", -5, charged.minute)
    assert (late.previous, late.current) == (0, 0)


@pytest.mark.parametrize(
    ("window", "limit", "amount"),
    [
        (Window(0, 30.0, 10, 0), 10, 6),
        (Window(0, 0.0, 10, 3), 10, 1),
        (Window(0, 59.0, 0, 10), 10, 1),
        (Window(0, 10.0, 100, 100), 100, 50),
    ],
)
def test_retry_after_suffices_and_is_not_much_too_long(
    window: Window, limit: int, amount: int
) -> None:
    def fits_after(seconds: float) -> bool:
        position, previous, current = window.position + seconds, window.previous, window.current
        if position >= WINDOW_S:
            position, previous, current = position - WINDOW_S, current, 0
        return Window(0, position, previous, current).used + amount <= limit + 1e-6

    wait_s = window.wait_s(limit, amount)
    assert wait_s > 0
    assert fits_after(wait_s)
    assert not fits_after(wait_s - 1)


class BrokenRedis:
    def __init__(self) -> None:
        self.num_calls = 0

    async def incr(self, key: str, *words: int) -> int:
        self.num_calls += 1
        await asyncio.sleep(60)
        return 0

    get = incr


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_wall_clock_jump_changes_no_rate_window(clock: Clock, days: int) -> None:
    windows = Windows()
    await windows.add("key", 5)
    wall = clock.now
    clock.time = lambda: wall + 86400 * days  # type: ignore[method-assign]
    assert (await windows.look("key")).used == 5
    clock.now += 2 * WINDOW_S
    assert (await windows.look("key")).used == 0


async def test_a_hanging_redis_is_bypassed_and_limits_still_hold(clock: Clock) -> None:
    quotas = Quotas(LimitsSettings(requests_per_minute=3))
    await quotas.windows.prepare()
    quotas.windows._redis = broken = BrokenRedis()
    who = Principal("t", limits=KeyLimits())
    for _ in range(3):
        assert await quotas.enter(who, 0, {}) is not None
    with pytest.raises(RateLimitError):
        await quotas.enter(who, 0, {})
    assert broken.num_calls == 1
    await quotas.stop()


async def test_no_request_waits_to_find_out_whether_redis_is_back(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_windows, "REDIS_PAUSE_S", 0.01)
    monkeypatch.setattr(rate_windows, "REDIS_TIMEOUT_S", 0.01)
    windows = Windows()
    await windows.prepare()
    windows._redis = broken = BrokenRedis()
    windows._pool = SimpleNamespace(disconnect=AsyncMock())
    assert (await windows.add("key", 1)).used == 1
    while broken.num_calls < 3:  # a task asks, and not the requests
        await asyncio.sleep(0.005)
    assert (await windows.add("key", 1)).used == 2
    windows._redis = storage_from_string("async+memory://")
    while windows._probing is not None:
        await asyncio.sleep(0.005)
    await windows.add("key", 1)
    assert list(windows._redis.storage.values()) == [1]
    assert windows._pool.disconnect.await_count >= 3  # no request gets an old connection


async def test_limits_are_kept_when_redis_fails_or_comes_back_empty(clock: Clock) -> None:
    quotas = Quotas(LimitsSettings(requests_per_minute=3))
    await quotas.windows.prepare()
    who = Principal("t", limits=KeyLimits())
    for storage in ("async+memory://", "broken", "async+memory://"):
        quotas.windows._redis = (
            BrokenRedis() if storage == "broken" else storage_from_string(storage)
        )
        assert await quotas.enter(who, 0, {}) is not None
        quotas.windows.close()
        quotas.windows._probing = None
    with pytest.raises(RateLimitError):
        await quotas.enter(who, 0, {})


@pytest.mark.parametrize("answer", [b"hello", None, [1], 10**24, -(10**24)])
async def test_invalid_redis_replies_are_not_trusted(clock: Clock, answer: object) -> None:
    class Nonsense:
        async def incr(self, *args: object) -> object:
            return answer

        get = incr

    quotas = Quotas(LimitsSettings(requests_per_minute=3))
    await quotas.windows.prepare()
    quotas.windows._redis = Nonsense()
    who = Principal("t", limits=KeyLimits())
    for _ in range(3):
        assert await quotas.enter(who, 0, {}) is not None
    with pytest.raises(RateLimitError):
        await quotas.enter(who, 0, {})
