"""The Redis tier: against a real server, and while that server fails in every way it can."""

import signal
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import redis

from engine.core.errors import ConfigError
from engine.core.interfaces.stats import EngineStats, TierStats
from engine.runtime.tiers.offload_worker import OffloadWorker
from engine.runtime.tiers.redis_tier import (
    INDEX,
    MAX_SIZE,
    PREFIX,
    TOTAL,
    RedisTier,
    connect,
)
from tests.support.servers.redis_server import PROGRAM, RedisServer
from tests.support.toy_engine.tiers import tiered_engine
from tests.unit.runtime.tiers.test_tiers import PROMPT, answer

MIB = 2**20
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    yield made
    made.stop()


@pytest.fixture
def url(server) -> str:
    server.client().flushall()
    return server.url


def redis_tier(url: str, max_bytes: int = MIB, policy="lru", ttl_s=60.0) -> RedisTier:
    return RedisTier(connect(url), max_bytes, policy, ttl_s)


def test_another_replica_continues_from_blocks_in_redis(url) -> None:
    first, _ = tiered_engine(redis_tier(url))
    told = answer(first, "a")
    second, mover = tiered_engine(redis_tier(url))
    again = answer(second, "b")
    assert (again.tokens, again.num_cached) == (told.tokens, 16)
    assert mover.tiers[0].num_hits == 8


def test_the_redis_connection_is_open_before_the_first_request(url, monkeypatch) -> None:
    """The connection is open by then: a request does not wait for a slow one."""
    first, _ = tiered_engine(redis_tier(url))
    told = answer(first, "a")
    second, mover = tiered_engine(redis_tier(url))
    mover.reach_tiers()

    def fail(self) -> None:
        raise redis.ConnectionError("too late")

    monkeypatch.setattr(redis.UnixDomainSocketConnection, "_connect", fail)
    again = answer(second, "b")
    assert (again.tokens, again.num_cached) == (told.tokens, 16)


def test_the_offload_worker_connects_to_its_tiers_when_it_starts(url) -> None:
    tier = redis_tier(url)
    _, mover = tiered_engine(tier, make_mover=OffloadWorker)
    pool = tier._client.connection_pool
    assert not pool._created_connections
    mover.start()
    assert pool._created_connections
    mover.close()


def test_a_full_redis_tier_evicts_and_counts(url, server) -> None:
    engine, mover = tiered_engine(redis_tier(url, max_bytes=2000))
    for index in range(6):
        answer(engine, str(index), [index, *PROMPT])
    client = server.client()
    names = [key for key in client.keys(PREFIX + "*") if key.endswith(b".full")]
    stored = sum(client.strlen(name) for name in names)
    assert 0 < stored <= 2000
    assert int(client.get(TOTAL)) == stored and client.zcard(INDEX) == len(names)
    mover.tidy_up()
    assert (mover.tiers[0].tier.num_bytes, mover.tiers[0].tier.num_records) == (stored, len(names))
    assert all(0 < client.pttl(name) <= 60_000 for name in names)


def test_blocks_stored_by_two_engines_at_once_count_once(url, server) -> None:
    for name in "ab":
        tier = redis_tier(url)
        tier.find = lambda names: [False] * len(names)  # each looked before the other one stored
        engine, _ = tiered_engine(tier)
        answer(engine, name)
    client = server.client()
    names = [key for key in client.keys(PREFIX + "*") if key.endswith(b".full")]
    assert int(client.get(TOTAL)) == sum(client.strlen(name) for name in names)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_the_eviction_policy_decides_which_blocks_stay_in_redis(url, server, policy) -> None:
    """The first prompt is used again. So LRU and LFU keep it, and FIFO does not."""
    engine, mover = tiered_engine(redis_tier(url, 4400, policy), num_blocks=64)
    answer(engine, "a")
    answer(engine, "b", [7, *PROMPT])
    mover.tidy_up()
    answer(engine, "a again")
    mover.tidy_up()
    answer(engine, "c", [8, *PROMPT])
    other, _ = tiered_engine(redis_tier(url, 4400, policy))
    assert (answer(other, "d").num_cached > 0) == (policy != "fifo")


@pytest.mark.parametrize("damage", ["flip", "cut", "list", "empty", "other"])
def test_damaged_blocks_in_redis_are_not_used(url, server, damage) -> None:
    first, _ = tiered_engine(redis_tier(url))
    answer(first, "a")
    client = server.client()
    names = sorted(key for key in client.keys(PREFIX + "*") if key.endswith(b".full"))
    values = [client.get(name) for name in names]
    for name, value, other in zip(names, values, values[1:] + values[:1], strict=True):
        client.delete(name)
        if damage == "list":
            client.rpush(name, b"x")
        else:
            changed = {
                "flip": value[:-1] + bytes([value[-1] ^ 4]),
                "cut": value[:-3],
                "empty": b"",
                "other": other,
            }
            client.set(name, changed[damage])
    second, mover = tiered_engine(redis_tier(url))
    assert answer(second, "b").num_cached == 0
    # Redis itself says of a list that it is no string.
    assert mover.tiers[0].num_bad >= (damage != "list")
    # Blocks that were computed again take the place of the bad ones.
    mover.tidy_up()
    answer(second, "c", [9, *PROMPT])


@pytest.mark.parametrize("total", [b"abc", b"-5", b"9" * 40])
def test_an_invalid_size_total_in_redis_ends_no_engine(url, server, total) -> None:
    """It is in the statistics, which are encoded and must be sound."""
    server.client().set(TOTAL, total)
    tier = redis_tier(url, 1000)
    tier.tidy_up()
    stats = EngineStats(tiers=(TierStats(name="redis", num_bytes=tier.num_bytes),))
    assert stats.is_sound and msgspec.msgpack.encode(stats)
    tier._evict()
    assert 0 <= tier.num_bytes <= MAX_SIZE


def test_killing_redis_fails_no_request_and_it_is_used_again_later(tmp_path) -> None:
    server = RedisServer(tmp_path)
    try:
        engine, mover = tiered_engine(redis_tier(server.url))
        answer(engine, "a")
        server.stop()
        for index in range(3):
            engine.kv.flush()
            answer(engine, f"down {index}")
        assert not mover.tiers[0].is_readable
        server.start()
        mover.tiers[0]._reading._retry_at = 0.0  # the pause is over
        mover.tiers[0]._writing._retry_at = 0.0
        mover.tidy_up()
        assert mover.tiers[0].is_readable
        engine.kv.flush()
        answer(engine, "up")
        engine.kv.flush()
        assert answer(engine, "up again").num_cached > 0
    finally:
        server.stop()


def test_a_frozen_redis_is_waited_for_only_once(url, server) -> None:
    engine, mover = tiered_engine(redis_tier(url))
    answer(engine, "a")
    server.process.send_signal(signal.SIGSTOP)
    try:
        engine.kv.flush()
        answer(engine, "b")
        assert not mover.tiers[0].is_readable
        began = time.monotonic()
        for index in range(20):
            engine.kv.flush()
            answer(engine, f"c {index}")
        assert mover.tiers[0].num_errors <= 3, "the tier was tried again and again"
        assert time.monotonic() - began < 10
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_a_redis_out_of_memory_stores_nothing_but_is_read(tmp_path) -> None:
    server = RedisServer(tmp_path, "--maxmemory-policy", "noeviction")
    try:
        engine, mover = tiered_engine(redis_tier(server.url))
        answer(engine, "a")
        server.client().config_set("maxmemory", 1)
        num_stored = mover.tiers[0].num_stored
        answer(engine, "b", [9, *PROMPT])
        assert mover.tiers[0].num_stored == num_stored and mover.tiers[0].num_errors >= 1
        mover.tidy_up()
        engine.kv.flush()
        assert mover.tiers[0].is_readable and answer(engine, "c").num_cached > 0
        mover.tidy_up()
        assert mover.tiers[0].is_readable
    finally:
        server.stop()


@pytest.mark.parametrize("reply", [b"-ERR no\r\n", b"\x00\xff" * 100, b"$5\r\nhello\r\n" * 99, b""])
def test_a_redis_server_that_answers_garbage_fails_no_request(reply, tmp_path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
                peer.recv(100)
                peer.sendall(reply)
                peer.close()
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    engine, mover = tiered_engine(redis_tier(f"unix://{tmp_path}/s"))
    for name in "ab":
        answer(engine, name)
    mover.tidy_up()
    assert mover.tiers[0].num_errors >= 1 and mover.tiers[0].num_hits == 0
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_an_invalid_redis_url_is_refused_without_echoing_it() -> None:
    with pytest.raises(ConfigError) as caught:
        connect("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value) and "redis://HOST" in str(caught.value)
