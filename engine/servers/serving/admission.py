"""Admission control: limits how many requests the server handles at a time.

A request is counted before any work is done for it. A `Ticket` stands for one admitted request. It
holds the request's place in this count, its quota and its event pump. `Ticket.close` releases all
of them, however the request ended.
"""

import asyncio
import contextlib
import copy
import logging
import time
from dataclasses import dataclass

from engine.core.errors import InvalidRequestError, RateLimitError, UnavailableError
from engine.core.forecast import WaitForecast, may_take, most_places
from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.request import FinishReason
from engine.core.observability.metrics import FinishedRequest, Metrics
from engine.core.observability.tracing import BackendWork
from engine.servers.access.quotas import Lease, answer_tokens
from engine.servers.http.errors import AbortedError
from engine.servers.http.request_log import RequestRecord
from engine.servers.serving.event_pump import EventPump

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
# Seconds that a drain waits, after it has aborted the remaining requests, until their error
# responses are sent.
FLUSH_S = 2.0
REVIVED = "the engine was restarted while it computed this answer"


@dataclass(slots=True)
class WorkTotals:
    """What all requests together have used that ended without error."""

    computed_tokens: int = 0  # of prompts; tokens from the cache are not computed
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    longest: int = 0  # tokens of the longest prompt with its answers

    def add(self, usage: UsageEvent) -> None:
        self.computed_tokens += usage.prompt_tokens - usage.cached_tokens
        self.cached_tokens += usage.cached_tokens
        self.generated_tokens += usage.completion_tokens
        self.prefill_s += usage.prefill_s
        self.decode_s += usage.decode_s
        self.longest = max(self.longest, usage.prompt_tokens + usage.completion_tokens)


class Lifecycle:
    """Counts the admitted requests of the server and of each tenant, refuses more than
    `max_concurrent`, and drains the server. No tenant gets all places.
    """

    def __init__(self, max_concurrent: int, slow_request_s: float) -> None:
        self.started = time.monotonic()
        self.total_requests = 0
        self.num_admitted = 0
        self._num_of: dict[str, int] = {}  # admitted requests of each tenant
        self._num_released = 0
        self._forecast = WaitForecast()
        self.totals = WorkTotals()
        self.is_draining = False  # whether new requests are refused
        self.is_ending = False  # set on shutdown; never cleared again
        self.pumps: set[EventPump] = set()
        self.slow_request_s = slow_request_s
        self.max_concurrent = max_concurrent
        self.busy = asyncio.Event()  # set while requests are admitted
        self._idle = asyncio.Event()
        self._idle.set()

    def most_of(self, tenant: str) -> int:
        """How many requests of a tenant may be admitted at a time."""
        return most_places(tenant, self.max_concurrent)

    def reserve(self, count: int, tenant: str = "") -> None:
        """Admit `count` more requests of a tenant. Raises if the server is full or being drained.
        Never waits.
        """
        if self.is_draining:
            raise UnavailableError(
                "The server is being drained and takes no new requests.", retry_after=RETRY_AFTER_S
            )
        own, most = self._num_of.get(tenant, 0), self.max_concurrent
        self._forecast.observe(time.monotonic(), self.num_admitted, self._num_released)
        if not may_take(tenant, own, self.num_admitted, most, count):
            raise RateLimitError(
                f"The server already works on {self.num_admitted} requests, {own} of them yours;"
                f" its limit is {most}, and each tenant leaves some places to others. Retry later.",
                retry_after=self._forecast.seconds(count - 1),
            )
        self._num_of[tenant] = own + count
        self.num_admitted += count
        self.busy.set()
        self._idle.clear()

    def release(self, count: int, tenant: str = "") -> None:
        self.num_admitted -= count
        self._num_released += count
        self._num_of[tenant] -= count
        assert self.num_admitted >= 0 <= self._num_of[tenant], (tenant, self.num_admitted)
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        self._forecast.observe(time.monotonic(), self.num_admitted, self._num_released)
        if self.num_admitted == 0:
            self.busy.clear()
            self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Shut down: refuse new requests and let running requests finish. Requests that still run
        after `timeout_s` are aborted.
        """
        self.is_draining = self.is_ending = True
        if await self._idle_within(timeout_s):
            return
        self.fail_all()
        await self._idle_within(FLUSH_S)

    def pause(self) -> None:
        """Refuse new requests until `resume`. Running requests continue."""
        self.is_draining = True

    def resume(self) -> bool:
        """Admit requests again. Has no effect and returns False if the server is shutting down."""
        self.is_draining = self.is_ending
        return not self.is_ending

    def fail_all(self) -> None:
        self.is_draining = self.is_ending = True
        error = UnavailableError(
            "The server shut down before this request was finished.", retry_after=RETRY_AFTER_S
        )
        for pump in list(self.pumps):
            pump.fail(error)

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()


class Ticket:
    """One admitted request and what it holds: its place, its quota and its event pump. `close`
    releases them and is idempotent.
    """

    def __init__(
        self, lifecycle: Lifecycle, metrics: Metrics, record: RequestRecord, tenant: str
    ) -> None:
        self._lifecycle = lifecycle
        self._tenant = tenant
        self._metrics = metrics
        self._record = record
        self._pump: EventPump | None = None
        self._max_tokens: int | None = None
        self._lease: Lease | None = None
        lifecycle.reserve(1, tenant)
        lifecycle.total_requests += 1
        self._num_reserved = 1

    def hold(self, lease: Lease | None) -> None:
        """Attach the request's share of its key's rate limits. It is released when this ticket is
        closed.
        """
        self._lease = lease

    async def begin(
        self,
        num_prompts: int,
        *,
        num_choices: int,
        max_tokens: int | None,
        timeout_s: float,
        writes: bool = True,
    ) -> EventPump:
        """Create the `EventPump` of this request. Each prompt counts as one admitted request.

        `num_choices` is per prompt. If `writes` is true, the request generates tokens, and these
        are charged to the key's quota in addition to the prompt's tokens.
        """
        assert self._pump is None
        most = self._lifecycle.most_of(self._tenant)
        if num_prompts > most:
            raise InvalidRequestError(
                f"prompt: this server takes at most {most} prompts at once, got {num_prompts}.",
                param="prompt",
            )
        if self._lease is not None:
            await self._lease.grow(self._record.num_body_bytes)
            if writes:
                num_answers = num_prompts * num_choices
                await self._lease.charge(answer_tokens(max_tokens, num_answers), "max_tokens")
        if num_prompts > 1:
            self._lifecycle.reserve(num_prompts - 1, self._tenant)
            self._num_reserved = num_prompts
        self._max_tokens = max_tokens
        self._pump = EventPump(
            num_prompts,
            choices_per_source=num_choices,
            timeout_s=timeout_s,
            on_tokens=self._metrics.inter_token,
            on_usage=self._warn_of_revival,
            on_end=self._note_end,
            trace=self._record.trace,
        )
        if self._lease is not None:
            self._lease.pump = self._pump
        self._lifecycle.pumps.add(self._pump)
        return self._pump

    def _warn_of_revival(self, usage: UsageEvent) -> None:
        warnings = self._record.warnings
        if usage.num_revivals and REVIVED not in warnings:
            warnings.append(REVIVED)

    def _note_end(self) -> None:
        self._record.is_ending = True

    def detach(self) -> "Ticket":
        """Move everything that this ticket holds to a new ticket, for work that continues after its
        HTTP request. Closing the old ticket then has no effect.
        """
        heir = copy.copy(self)
        self._num_reserved = 0
        return heir

    async def close(self) -> None:
        count, self._num_reserved = self._num_reserved, 0
        if count == 0:
            return
        try:
            if self._pump is not None:
                await self._pump.close()
                self._account(self._pump)
        finally:
            self._lifecycle.release(count, self._tenant)
            if self._lease is not None:
                await self._lease.close(self._num_used())

    def _num_used(self) -> int:
        """Prompt and output tokens that the request has used. This is an estimate if the request
        did not complete, and 0 if an error of the server ended it before its first token.
        """
        pump = self._pump
        if pump is None:
            return 0
        if pump.is_complete:
            usage = pump.usage
            return usage.prompt_tokens + usage.completion_tokens
        if pump.first_token_at is None and not self._was_left(pump):
            return 0
        assert self._lease is not None
        return self._lease.num_prompt + sum(pump.choice_tokens)

    @staticmethod
    def _was_left(pump: EventPump) -> bool:
        """Whether the client ended the request early. In this case, the prompt tokens are charged
        even if there is no output.
        """
        return pump.failure is None or isinstance(pump.failure, AbortedError)

    def _account(self, pump: EventPump) -> None:
        self._lifecycle.pumps.discard(pump)
        record, failure, first = self._record, pump.failure, pump.first_token_at
        if first is None and isinstance(failure, InvalidRequestError | RateLimitError):
            self._metrics.request_refused()
            return
        record.answered_at = pump.ended_at
        record.ttft_s = None if first is None else first - record.started
        record.usage = pump.usage if pump.is_complete else None
        unfinished: FinishReason = "abort" if isinstance(failure, AbortedError) else "error"
        finish_reasons = tuple(each or unfinished for each in pump.finish_reasons)
        if pump.trace is not None:
            pump.trace.worked(_work(pump, record, finish_reasons))
        if record.usage is not None:
            self._lifecycle.totals.add(record.usage)
        seconds = time.monotonic() - record.started
        self._metrics.request_finished(
            FinishedRequest(
                finish_reasons=finish_reasons,
                choice_tokens=tuple(pump.choice_tokens),
                max_tokens=self._max_tokens,
                ttft_s=record.ttft_s,
                e2e_s=seconds,
                usage=record.usage,
            )
        )
        if seconds > self._lifecycle.slow_request_s:
            self._metrics.slow_request()
            fields = {"seconds": round(seconds, 6)} | record.work_fields()
            logger.warning("slow request", extra=fields)


def _work(
    pump: EventPump, record: RequestRecord, finish_reasons: tuple[FinishReason, ...]
) -> BackendWork:
    failure = pump.failure
    return BackendWork(
        request=pump.first_request,
        submitted_at=pump.submitted_at,
        first_token_at=pump.first_token_at,
        ended_at=pump.ended_at or time.monotonic(),
        usage=pump.usage if pump.is_complete else None,
        finish_reasons=finish_reasons,
        preparations=record.notes.preparations,
        timelines=record.notes.timelines,
        longest=max(pump.choice_tokens, default=0),
        error_code=None if failure is None else failure.error_code,
    )
