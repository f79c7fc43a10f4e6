"""The tier in Redis or Valkey, which several engines share.

A block is one string. A sorted set has the name and size of every block. Its scores are the order
of eviction: the time of last use, the number of uses, or the time of storing. A counter has the
total size. Whoever stores a block removes others if the total has become too large. Blocks also
expire by themselves. Then the sorted set still has them, and their turn to be removed comes early.

Redis content is checked like that of a file. It is never unpickled or executed. Every call has a
short timeout. The URL may hold a password, so it is in no message.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.errors import ConfigError
from engine.runtime.model_runner import Bytes
from engine.runtime.radix_cache import EvictionPolicy
from engine.runtime.tiers.base import Loaded, Record, Wanted
from engine.runtime.tiers.record import PIECE_BYTES

PREFIX = "engine:kv:1:"
INDEX, TOTAL = f"{PREFIX}index", f"{PREFIX}bytes"
TIMEOUT_S = 0.2
EVICT_AT_ONCE = 64
MAX_SIZE = 2**62


def connect(url: str) -> Any:
    """A client of the Redis server. It connects with the first call, which the mover makes before
    the engine is ready, and never tries a call again. Raises `ConfigError` if the URL or the
    library can't be used.
    """
    try:
        import redis  # imported late: few engines use Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError(
            "cache.tiers.redis_url needs a package: pip install 'engine[redis]'",
            param="tiers.redis_url",
        ) from None
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError:
        raise ConfigError(
            "cache.tiers.redis_url can't be used: it is written redis://HOST:PORT/DB, or"
            " rediss://USER:PASSWORD@HOST:PORT/DB with TLS",
            param="tiers.redis_url",
        ) from None


class RedisTier:
    name = "redis"
    takes_blocks = True

    def __init__(
        self,
        client: Any,
        max_bytes: int,
        policy: EvictionPolicy,
        ttl_s: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`client` is a `redis.Redis` that decodes no responses."""
        self._client = client
        self._max_bytes = max_bytes
        self._policy = policy
        self._ttl_ms = None if ttl_s is None else max(1, int(1000 * ttl_s))
        self._clock = clock
        self._used: list[str] = []
        self._total = self._count = 0

    @property
    def num_bytes(self) -> int:
        return self._total

    @property
    def num_records(self) -> int:
        return self._count

    def find(self, names: Sequence[str]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.exists(PREFIX + name)
        return [found == 1 for found in pipe.execute()]

    def load(self, wanted: Wanted, rows: Bytes) -> list[Loaded]:
        names = [wanted.name(index) for index in range(len(wanted.places))]
        found = [Loaded.MISSING] * len(names)
        step = max(1, PIECE_BYTES // wanted.shape.record_bytes)
        for start in range(0, len(names), step):
            some = names[start : start + step]
            for index, value in enumerate(self._get(some, wanted.shape.record_bytes), start):
                found[index] = self._take(wanted, index, value, rows[index].data)
        self.use([name for name, each in zip(names, found, strict=True) if each is Loaded.OK])
        bad = [name for name, each in zip(names, found, strict=True) if each is Loaded.BAD]
        if bad:
            self._remove(bad, wanted.shape.record_bytes)
        return found

    def store(self, records: Sequence[Record]) -> int:
        has = self.find([record.name for record in records])
        new = [record for record, is_there in zip(records, has, strict=True) if not is_there]
        for record in new:
            self._put(record)
        if new:
            self._evict()
        return len(new)

    def use(self, names: Sequence[str]) -> None:
        self._used.extend(names)

    def tidy_up(self) -> None:
        used, self._used = self._used, []
        pipe = self._client.pipeline(transaction=False)
        pipe.get(TOTAL)
        pipe.zcard(INDEX)
        for name in dict.fromkeys(used):
            # Other tiers may have blocks that are missing here. XX changes only existing entries.
            if self._policy == "lru":
                pipe.zadd(INDEX, {name: self._clock()}, xx=True)
            elif self._policy == "lfu":
                pipe.zadd(INDEX, {name: 1.0}, xx=True, incr=True)
            if self._ttl_ms is not None:
                pipe.pexpire(PREFIX + name, self._ttl_ms)
        # A Redis whose memory is full refuses to change the index, but can still be read.
        total, count, *_ = pipe.execute(raise_on_error=False)
        if isinstance(total, Exception):
            raise total
        self._total, self._count = _size(total), int(count)
        if self._policy == "lru" and self._ttl_ms is not None and self._count:
            self._forget_expired(self._clock() - self._ttl_ms / 1000)

    def close(self) -> None:
        self._client.close()

    def clear(self) -> int:
        """Remove every block. Returns how many there were."""
        names = self.names()
        for start in range(0, len(names), EVICT_AT_ONCE):
            some = names[start : start + EVICT_AT_ONCE]
            self._client.unlink(*(PREFIX + name for name in some))
        self._client.unlink(INDEX, TOTAL)
        return len(names)

    def names(self) -> list[str]:
        """The names of all blocks. Those that are evicted next come last."""
        return [name.decode("ascii", "replace") for name in self._client.zrevrange(INDEX, 0, -1)]

    def uses(self) -> dict[str, int]:
        """How often each block was used, by name. Only LFU counts that."""
        if self._policy != "lfu":
            return {}
        found = self._client.zrange(INDEX, 0, -1, withscores=True)
        return {name.decode("ascii", "replace"): int(score) for name, score in found}

    def read(self, name: str, max_bytes: int = -1) -> bytes | None:
        """The first bytes of a record, or all of them, unchecked."""
        end = max_bytes - 1 if max_bytes > 0 else -1
        value: bytes = self._client.getrange(PREFIX + name, 0, end)
        return value or None

    def _get(self, names: Sequence[str], record_bytes: int) -> list[bytes | None]:
        if record_bytes <= PIECE_BYTES:
            values: list[bytes | None] = self._client.mget([PREFIX + name for name in names])
            return values
        pieces = [
            self._client.getrange(PREFIX + name, start, start + PIECE_BYTES - 1)
            for name in names
            for start in range(0, record_bytes, PIECE_BYTES)
        ]
        return [b"".join(pieces) or None]

    def _take(self, wanted: Wanted, index: int, value: bytes | None, payload: memoryview) -> Loaded:
        if value is None:
            return Loaded.MISSING
        header_bytes = wanted.shape.header_bytes
        if not isinstance(value, bytes) or len(value) != header_bytes + len(payload):
            return Loaded.BAD
        payload[:] = memoryview(value)[header_bytes:]
        is_valid = wanted.is_valid(index, value[:header_bytes], payload)
        return Loaded.OK if is_valid else Loaded.BAD

    def _put(self, record: Record) -> None:
        score = 0.0 if self._policy == "lfu" else self._clock()
        pipe = self._client.pipeline(transaction=True)
        value = b"".join((record.header(), record.payload.data))
        pipe.set(PREFIX + record.name, value, px=self._ttl_ms)
        pipe.zadd(INDEX, {record.name: score})
        pipe.incrby(TOTAL, len(value))
        _, is_new, _ = pipe.execute()
        if not is_new:  # another engine has just stored it, or the index had it since it expired
            self._client.decrby(TOTAL, len(value))

    def _evict(self) -> None:
        pipe = self._client.pipeline(transaction=False)
        pipe.get(TOTAL)
        pipe.zcard(INDEX)
        total, count = map(_size, pipe.execute())
        while total > self._max_bytes and count > 0:
            each = max(1, total // count)  # mean size: models may share this Redis
            wanted = min(EVICT_AT_ONCE, -(-(total - self._max_bytes) // each))
            popped = self._client.zpopmin(INDEX, wanted)
            if not popped:
                break
            names = [name.decode("ascii", "replace") for name, _ in popped]
            total, count = self._forget(names, each), count - len(popped)
        self._total, self._count = total, count

    def _forget_expired(self, before: float) -> None:
        """Remove blocks from the index that Redis has removed itself."""
        each = max(1, self._total // self._count)
        num_expired = int(self._client.zremrangebyscore(INDEX, "-inf", before))
        if num_expired:
            self._count -= num_expired
            self._total = _size(self._client.decrby(TOTAL, each * num_expired))

    def _remove(self, names: Sequence[str], record_bytes: int) -> None:
        self._client.zrem(INDEX, *names)
        self._forget(names, record_bytes)

    def _forget(self, names: Sequence[str], record_bytes: int) -> int:
        """Delete records, and reduce the total. Returns the new total."""
        pipe = self._client.pipeline(transaction=True)
        pipe.unlink(*(PREFIX + name for name in names))
        pipe.decrby(TOTAL, record_bytes * len(names))
        return _size(pipe.execute()[-1])


def _size(value: Any) -> int:
    """A number of Redis, which may hold anything. It is counted and sent in statistics."""
    try:
        return min(max(0, int(value or 0)), MAX_SIZE)
    except ValueError:
        return 0
