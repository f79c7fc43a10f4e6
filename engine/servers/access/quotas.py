"""Quotas of API keys. They limit requests per minute, tokens per minute and concurrent requests.
They also limit the requests that wait for their first token: their number, and the total length of
their prompts.

A request is counted before its body is read. Its number of tokens is not known then, so it is
estimated: prompt tokens from the length of the body, output tokens from the requested maximum. When
the request ends, the charge is corrected to the real number.
"""

import asyncio
import ipaddress
import math
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from engine.core.config_schema import LimitsSettings
from engine.core.errors import InvalidRequestError, RateLimitError
from engine.core.forecast import WaitForecast
from engine.core.key_file import NO_LIMITS, KeyLimits
from engine.servers.access.auth import Principal
from engine.servers.access.rate_windows import Window, Windows

# Estimated number of bytes of a request body per prompt token, for English text in JSON.
BYTES_PER_TOKEN = 4
# Output tokens charged at first for a request without `max_tokens`. The charge is corrected when
# the request ends.
UNSTATED_TOKENS = 256


class AuthThrottle:
    """Slows down key guessing. After too many wrong keys per minute from one address, further wrong
    keys from that address get 429. A valid key always passes, because several clients may share an
    address.
    """

    def __init__(self, max_per_minute: int) -> None:
        self.max_per_minute = max_per_minute
        self._windows = Windows()

    async def note_failure(self, address: str) -> None:
        window = await self._windows.add(_network(address), 1)
        if window.used > self.max_per_minute:
            raise RateLimitError(
                "Too many wrong keys have come from this address; retry later.",
                retry_after=max(1.0, window.wait_s(self.max_per_minute, 1)),
            )


class Answer(Protocol):
    """The answer to a request, as far as quotas ask for it."""

    first_token_at: float | None


class Lease:
    """What one request uses of its key's limits: a place among the concurrent requests, and the
    tokens charged so far. `close` gives both back and is idempotent.
    """

    def __init__(self, quotas: "Quotas", key: str, name: str, limits: KeyLimits) -> None:
        self.pump: Answer | None = None
        self.name = name  # the key's name, for error messages
        self.limits = limits
        self.headers: dict[str, str] = {}
        self._quotas = quotas
        self._key = key
        self._charges: list[tuple[int, int]] = []  # (minute, charged tokens)
        self.num_prompt = 0  # prompt tokens, estimated from the body's length

    @property
    def is_queued(self) -> bool:
        return self.pump is None or self.pump.first_token_at is None

    @property
    def num_charged(self) -> int:
        return sum(tokens for _, tokens in self._charges)

    async def count_request(self) -> None:
        limit = self.limits.requests_per_minute
        if limit is None:
            return
        window = await self._windows.add(self._requests, 1)
        if window.used > limit:
            window = await self._windows.add(self._requests, -1, window.minute)
            self._tell("requests", limit, window)
            raise self._refusal(f"{limit} requests", window.wait_s(limit, 1))
        self._tell("requests", limit, window)

    async def charge(self, tokens: int, param: str | None = None) -> None:
        """Charge `tokens` to the key's current minute. Raises `RateLimitError` if the key's limit
        is reached, and `InvalidRequestError` if this request alone would exceed it. `param` is the
        request field that the error names.
        """
        limit = self.limits.tokens_per_minute
        if limit is None:
            return
        whole = self.num_charged + tokens
        if whole > limit:
            raise InvalidRequestError(
                f"The request may need {whole} tokens; this key has {limit} in a minute. Send a"
                " shorter prompt, or lower max_tokens or n.",
                param=param,
            )
        window = await self._windows.add(self._tokens, tokens)
        # If the limit is already used up, refuse even a charge of 0 tokens, because no output token
        # would fit.
        if window.used > limit or window.used - tokens > limit - 1:
            window = await self._windows.add(self._tokens, -tokens, window.minute)
            self._tell("tokens", limit, window)
            raise self._refusal(f"{limit} tokens", window.wait_s(limit, max(1, tokens)))
        self._charges.append((window.minute, tokens))
        self._tell("tokens", limit, window)

    async def grow(self, num_bytes: int) -> None:
        """Charge for a body that is longer than its `Content-Length` said. A chunked body has no
        `Content-Length`, so this charges all of it.
        """
        more = num_bytes // BYTES_PER_TOKEN - self.num_prompt
        if more <= 0:
            return
        self.num_prompt += more
        self._quotas.check_prompt(self._key, self)
        await self.charge(more)

    async def close(self, num_tokens: int) -> None:
        """Release the lease and correct its charge to `num_tokens`, the tokens that were really
        used.
        """
        if not self._quotas.leave(self._key, self):
            return
        difference = num_tokens - self.num_charged
        if self.limits.tokens_per_minute is None or difference == 0:
            return
        for minute, tokens in reversed(self._charges):
            part = max(difference, -tokens) if difference < 0 else 0
            if part:
                await self._windows.add(self._tokens, part, minute)
                difference -= part
        if difference > 0:
            await self._windows.add(self._tokens, difference)

    @property
    def _windows(self) -> Windows:
        return self._quotas.windows

    @property
    def _requests(self) -> str:
        return f"requests/{self._key}"

    @property
    def _tokens(self) -> str:
        return f"tokens/{self._key}"

    def _tell(self, what: str, limit: int, window: Window) -> None:
        self.headers |= {
            f"x-ratelimit-limit-{what}": str(limit),
            f"x-ratelimit-remaining-{what}": str(max(0, math.floor(limit - window.used))),
            f"x-ratelimit-reset-{what}": f"{math.ceil(window.reset_s)}s",
        }

    def _refusal(self, allowed: str, wait_s: float) -> RateLimitError:
        return RateLimitError(
            f"This key ({self.name}) may use {allowed} in a minute, and has. Retry in"
            f" {math.ceil(wait_s)} s.",
            retry_after=max(1.0, wait_s),
        )


class Quotas:
    """The quotas of all keys. The defaults can be replaced while the server runs."""

    def __init__(self, defaults: LimitsSettings) -> None:
        self.set_defaults(defaults)
        self.windows = Windows(defaults.redis_url)
        self._leases: dict[str, set[Lease]] = {}
        # For each key with requests: how fast they end, and how many have ended
        self._ends: dict[str, tuple[WaitForecast, int]] = {}
        self._preparing: asyncio.Task[None] | None = None

    def set_defaults(self, defaults: LimitsSettings) -> None:
        """Set the limits for keys that have no limits of their own."""
        self.defaults = defaults
        self.limits_all = not NO_LIMITS.over(defaults).is_empty

    async def start(self) -> None:
        """Import the `limits` library, which stores the counters. With Redis, wait for the import,
        and raise `ConfigError` if the Redis settings can't be used. Without Redis, import in the
        background.
        """
        if self.defaults.redis_url is not None:
            await self.windows.prepare()
        else:
            self._preparing = asyncio.create_task(self.windows.prepare())

    async def stop(self) -> None:
        self.windows.close()
        if self._preparing is not None:
            self._preparing.cancel()

    def in_use(self) -> Iterator[tuple[str, int, int]]:
        """For each key with requests: the key's name, the number of its requests, and how many of
        these wait for their first token.
        """
        for key, leases in self._leases.items():
            yield key, len(leases), sum(lease.is_queued for lease in leases)

    async def enter(
        self, principal: Principal, num_bytes: int, headers: dict[str, str]
    ) -> Lease | None:
        """Check the limits of the principal's key and take a lease for one request. Returns None if
        the key has no limits. Raises `RateLimitError` if a limit is reached.

        The remaining quota is written to `headers`, even if an error is raised.
        """
        limits = principal.limits.over(self.defaults)
        if principal.is_admin or limits.is_empty:
            return None
        key = principal.key or principal.name
        lease = Lease(self, key, principal.key or "the only one", limits)
        lease.headers = headers
        lease.num_prompt = num_bytes // BYTES_PER_TOKEN
        self._check_places(key, lease)
        self._leases.setdefault(key, set()).add(lease)
        self._ends.setdefault(key, (WaitForecast(), 0))
        try:
            await lease.count_request()
            await lease.charge(lease.num_prompt)
        except BaseException:
            await lease.close(0)
            raise
        return lease

    def leave(self, key: str, lease: Lease) -> bool:
        """Remove the lease of a request that has ended. Returns False if it was already removed."""
        leases = self._leases.get(key)
        if leases is None or lease not in leases:
            return False
        leases.remove(lease)
        forecast, num_ended = self._ends[key]
        self._ends[key] = forecast, num_ended + 1
        if not leases:
            del self._leases[key], self._ends[key]
        return True

    def _free_in_s(self, key: str) -> float | None:
        """When a request of the key will probably end. None if it has none."""
        if key not in self._ends:
            return None
        forecast, num_ended = self._ends[key]
        forecast.observe(time.monotonic(), len(self._leases[key]), num_ended)
        return forecast.seconds(0)

    def _check_places(self, key: str, lease: Lease) -> None:
        leases = self._leases.get(key, set())
        free_in_s = self._free_in_s(key)
        limits = lease.limits
        if limits.max_concurrent is not None and len(leases) >= limits.max_concurrent:
            raise RateLimitError(
                f"This key ({lease.name}) has {len(leases)} requests at work, which is its limit.",
                retry_after=free_in_s,
            )
        queued = [each for each in leases if each.is_queued]
        if limits.max_queued is not None and len(queued) >= limits.max_queued:
            raise RateLimitError(
                f"This key ({lease.name}) has {len(queued)} requests waiting, which is its limit.",
                retry_after=free_in_s,
            )
        self._check_prompt(queued, lease, free_in_s)

    def check_prompt(self, key: str, lease: Lease) -> None:
        """Check the limit on waiting prompt tokens again, after the estimated prompt of `lease` has
        grown.
        """
        others = self._leases.get(key, set()) - {lease}
        queued = [each for each in others if each.is_queued]
        self._check_prompt(queued, lease, self._free_in_s(key))

    @staticmethod
    def _check_prompt(queued: list[Lease], lease: Lease, free_in_s: float | None) -> None:
        most = lease.limits.max_queued_tokens
        if most is None:
            return
        if lease.num_prompt > most:
            raise InvalidRequestError(
                f"The prompt may have {lease.num_prompt} tokens; those of this key that wait may"
                f" have {most} together. Send a shorter prompt."
            )
        num_tokens = sum(each.num_prompt for each in queued)
        if num_tokens + lease.num_prompt > most:
            raise RateLimitError(
                f"This key ({lease.name}) has requests waiting with about {num_tokens} tokens; its"
                f" limit is {most}.",
                retry_after=free_in_s,
            )


def answer_tokens(max_tokens: int | None, num_choices: int) -> int:
    """Output tokens to charge when a request starts. `max_tokens` is the limit per choice."""
    return (UNSTATED_TOKENS if max_tokens is None else max_tokens) * num_choices


def limits_shown(limits: KeyLimits) -> Mapping[str, int | None]:
    return {
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "max_concurrent": limits.max_concurrent,
        "max_queued": limits.max_queued,
        "max_queued_tokens": limits.max_queued_tokens,
    }


def _network(address: str) -> str:
    """The unit by which wrong keys are counted. For IPv6 this is the /64 network, because one
    client may own all addresses of it. Other addresses are returned unchanged.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)
