"""Named counters over a sliding window of one minute. They are in memory, or in Redis if several
servers share them.

A counter has one value for the current minute and one for the previous minute. The previous value
is scaled by the fraction of that minute that is less than 60 s ago. With Redis, minutes follow the
wall clock, because several servers share them. If that clock jumps, a new minute starts. Without
Redis, the monotonic clock is used. Unlike the windows of the `limits` library, these counters can
be corrected later. If Redis fails or is slow, this process counts alone, and a task tries Redis
again every few seconds. So only the requests that notice the failure are delayed.
"""

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from engine.core.config import is_loopback

logger = logging.getLogger(__name__)

WINDOW_S = 60
REDIS_TIMEOUT_S = 0.1
REDIS_PAUSE_S = 5.0
KEY_PREFIX = "engine-limits"
# Max number of counters in memory. If there are more, all of them are reset at once.
MAX_NAMES = 20_000


@dataclass(frozen=True, slots=True)
class Window:
    """The values of one counter. `minute` is the number of the current minute, and `position` is
    how many seconds of it have passed.
    """

    minute: int
    position: float
    previous: int
    current: int

    @property
    def used(self) -> float:
        return self.previous * (1 - self.position / WINDOW_S) + self.current

    @property
    def reset_s(self) -> float:
        """Seconds until the counter is 0 again, if nothing more is counted."""
        if self.current > 0:
            return 2 * WINDOW_S - self.position
        return WINDOW_S - self.position if self.previous > 0 else 0.0

    def wait_s(self, limit: int, amount: int) -> float:
        """Seconds until `amount` can be added without exceeding `limit`, if nothing else is added
        before.
        """
        free = limit - amount
        if free < 0:
            return math.inf
        if self.current <= free:
            if self.used <= free:
                return 0.0
            part = (free - self.current) / self.previous
            return WINDOW_S * (1 - part) - self.position
        return WINDOW_S - self.position + WINDOW_S * (1 - free / self.current)


class Windows:
    def __init__(self, redis_url: SecretStr | None = None) -> None:
        self._redis_url = redis_url
        self._now = time.monotonic if redis_url is None else time.time
        self._loading = asyncio.Lock()
        self._memory: Any = None
        self._redis: Any = None
        self._pool: Any = None  # the connections to Redis
        self._probing: asyncio.Task[None] | None = None  # while Redis is not used

    async def prepare(self) -> None:
        """Import the `limits` library. The import is slow, so it should be done before the first
        request.
        """
        async with self._loading:
            if self._memory is None:
                await asyncio.to_thread(import_module, "limits.aio.storage")
                from limits.storage import storage_from_string

                if self._redis_url is not None:
                    self._redis = await asyncio.to_thread(_redis, self._redis_url)
                    self._pool = self._redis.bridge.get_connection().connection_pool
                self._memory = storage_from_string("async+memory://")

    async def add(self, name: str, amount: int, minute: int | None = None) -> Window:
        """Add `amount`, which may be negative, to the counter `name` for `minute`, by default the
        current minute. Returns the counter's values. If `minute` has expired, adds nothing.
        """
        now = self._now()
        this = int(now // WINDOW_S)
        at = this if minute is None else minute
        if at < this - 1:
            return await self.look(name)  # that minute has expired
        if self._memory is None:
            await self.prepare()
        if len(self._memory.storage) > MAX_NAMES:
            await self._memory.reset()
        counted = await self._count(f"{name}/{at}", amount, f"{name}/{2 * this - 1 - at}")
        current, previous = counted if at == this else counted[::-1]
        return Window(this, now % WINDOW_S, max(0, previous), max(0, current))

    async def look(self, name: str) -> Window:
        return await self.add(name, 0)

    async def _count(self, changed: str, amount: int, read: str) -> tuple[int, int]:
        """Add `amount` to the counter `changed`. Returns its new value and the value of the counter
        `read`. The counters in memory are updated even if Redis is used, so that counts survive if
        Redis fails or loses its data. The larger count is returned.
        """
        own = await _change(self._memory, changed, amount, read)
        if self._redis is not None and self._probing is None:
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    shared = await _change(self._redis, changed, amount, read)
                    return max(own[0], shared[0]), max(own[1], shared[1])
            except Exception as error:  # a Redis problem must never fail a request
                self._leave_redis(type(error).__name__)
        return own

    def _leave_redis(self, reason: str) -> None:
        if self._probing is None:  # another request may have noticed the same failure
            self._probing = asyncio.create_task(self._probe())
            logger.warning(
                "limits go by the counts of this server until Redis answers again (%s)", reason
            )

    async def _probe(self) -> None:
        """Wait until Redis can be used again."""
        while True:
            await asyncio.sleep(REDIS_PAUSE_S)
            with suppress(Exception):
                # Connections to a Redis that has ended would fail later, one after the other.
                await self._pool.disconnect()
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    await _change(self._redis, "probe", 0, "probe")
                    break
        self._probing = None
        logger.warning("limits are counted in Redis again")

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()


async def _change(storage: Any, changed: str, amount: int, read: str) -> tuple[int, int]:
    if amount == 0:
        return _count(await storage.get(changed)), _count(await storage.get(read))
    now = await storage.incr(changed, 2 * WINDOW_S, amount)
    return _count(now), _count(await storage.get(read))


def _count(value: Any) -> int:
    """Convert a stored counter to an integer. Redis counters have 64 bits. A value outside this
    range is not a counter, so it raises `ValueError`.
    """
    count = int(value)
    if not -(2**63) <= count < 2**63:
        raise ValueError("not a count")
    return count


def _redis(url: SecretStr) -> Any:
    from limits.errors import ConfigurationError
    from limits.storage import storage_from_string

    from engine.core.errors import ConfigError

    _warn_if_open(url.get_secret_value())
    try:
        return storage_from_string(
            "async+" + url.get_secret_value(),
            implementation="redispy",
            key_prefix=KEY_PREFIX,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            socket_timeout=REDIS_TIMEOUT_S,
        )
    except ConfigurationError as error:
        raise ConfigError(
            f"limits.redis_url can't be used ({error}): it is written redis://HOST:PORT/DB, and"
            " needs the extra engine[redis]",
            param="limits.redis_url",
        ) from None


def _warn_if_open(url: str) -> None:
    """Log a warning if Redis is on another machine and has no password or no TLS."""
    parts = urlsplit(url)
    if not parts.hostname or is_loopback(parts.hostname):
        return
    missing = [] if parts.password else ["a password"]
    missing += [] if parts.scheme == "rediss" else ["TLS (rediss://)"]
    if missing:
        logger.warning("limits.redis_url names another machine without %s", " and ".join(missing))
