"""The engine loop for text encoders. It uses the same messages as the loop for decoders, but each
answer is an embedding vector.

There is no KV cache and no continuous batching. Waiting requests are computed in batches, the most
urgent first. As in the queue of other engines, a priority below 0 orders only the requests of its
own tenant, and one above 0 lets those of all tenants go first. Otherwise the tenant that has
received the fewest tokens is next. If a batch raises, its requests are computed again one by one.
Only requests that raise even alone fail.
"""

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import EncoderConfig, ModelConfig
from engine.core.errors import (
    EngineError,
    InferenceError,
    InvalidRequestError,
    RateLimitError,
)
from engine.core.forecast import WaitForecast, may_take
from engine.core.interfaces.request import (
    Abort,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    Stats,
    Stop,
    TokenDelta,
)
from engine.core.interfaces.stats import EngineStats
from engine.core.observability.logging import set_level
from engine.core.sandbox.liveness import UNKNOWN_STEP_TIMEOUT_S, NoPulse, Pulse
from engine.ipc.transport import Channel
from engine.runtime.budget import StepCounter
from engine.runtime.loop import IDLE_POLL_S, NO_ADAPTERS, STATS_INTERVAL_S
from engine.runtime.outputs import refusal, too_late

log = logging.getLogger(__name__)

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A queued request. Those of one tenant are sorted by priority, then by arrival."""

    priority: int
    arrival: int
    request: GenerateRequest
    submitted_at: float
    deadline: float
    begin_by: float


class EncoderQueue:
    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._lines: dict[str, list[Waiting]] = {}  # a heap for each tenant
        self._given: dict[str, int] = {}  # tokens of each tenant that waits
        self._clock = 0  # what the last tenant had been given; new tenants start with it
        self._num_waiting = 0
        self.num_taken = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            yield from line

    def has_place(self, tenant: str) -> bool:
        """Whether one more request of the tenant may wait."""
        return may_take(tenant, len(self._lines.get(tenant, ())), len(self), self._max_queued)

    def add(self, waiting: Waiting) -> None:
        tenant = waiting.request.tenant
        if tenant not in self._lines:
            self._lines[tenant] = []
            self._given[tenant] = self._clock
        heapq.heappush(self._lines[tenant], waiting)
        self._num_waiting += 1

    def first(self) -> Waiting:
        """The request that is next."""
        return self._lines[self._next_tenant()][0]

    def take(self) -> Waiting:
        """Remove the request that is next, and charge its tenant."""
        tenant = self._next_tenant()
        line = self._lines[tenant]
        waiting = heapq.heappop(line)
        self._clock = max(self._clock, self._given[tenant])
        self._given[tenant] += len(waiting.request.prompt)
        self._num_waiting -= 1
        self.num_taken += 1
        if not line:
            del self._lines[tenant], self._given[tenant]
        return waiting

    def remove(self, is_unwanted: Callable[[Waiting], bool]) -> list[Waiting]:
        """Remove and return all requests that are no longer wanted."""
        removed = [each for each in self if is_unwanted(each)]
        for each in removed:
            tenant = each.request.tenant
            line = self._lines[tenant]
            line.remove(each)
            heapq.heapify(line)
            if not line:
                del self._lines[tenant], self._given[tenant]
        self._num_waiting -= len(removed)
        return removed

    def _next_tenant(self) -> str:
        def place(tenant: str) -> tuple[int, int, int]:
            first = self._lines[tenant][0]
            return (max(first.priority, 0), self._given[tenant], first.arrival)

        return min(self._lines, key=place)


class EncoderSpec(msgspec.Struct, frozen=True):
    """Sizes and limits of a loaded encoder."""

    vocab_size: int
    max_seq_len: int  # max tokens of one text
    num_dimensions: int  # of a result; 1 for cross-encoders, whose results are scores

    @classmethod
    def of(cls, config: ModelConfig) -> "EncoderSpec":
        encoder = config.encoder
        assert encoder is not None, config
        size = config.hidden_size if encoder.head is None else 1
        return cls(config.vocab_size, encoder.max_tokens, size)


class Encoder(Protocol):
    """A loaded text encoder."""

    @property
    def spec(self) -> EncoderSpec: ...

    def encode(
        self, prompts: Sequence[Prompt], starts: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """One vector for each prompt, (S, D), in the same order. For pairs of texts, `starts` has
        the index of the first token with token type 1 in each prompt; 0: all have type 0.
        """
        ...

    def close(self) -> None: ...


def finished(vectors: NDArray[np.float32], encoder: EncoderConfig) -> NDArray[np.float32]:
    """The results of an encoder from its pooled vectors (S, D): vectors of unit length if the model
    has them, or the scores (S, 1) of a cross-encoder.
    """
    if encoder.head is not None:
        if not encoder.head.squashes:
            return vectors
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-vectors.astype(np.float64)))).astype(np.float32)
    if not encoder.normalizes:
        return vectors
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


def _control(message: Control) -> ControlReply:
    if message.action == "log_level":
        return ControlReply(message.control_id, True, set_level(message.value))
    if message.action == "snapshot":
        return ControlReply(message.control_id, True)
    if message.action == "load_adapter":
        return ControlReply(message.control_id, False, NO_ADAPTERS)
    return ControlReply(message.control_id, True, "an encoder keeps no cache")


def is_encoder(config: ModelConfig) -> bool:
    return config.encoder is not None


def warm_up(encoder: Encoder) -> None:
    """Encode a few tokens. Raises if the encoder does not work at all."""
    encoder.encode([(0,) * min(8, encoder.spec.max_seq_len)])


class EncoderLoop:
    """Owns an encoder. All work is done in the thread that calls `run`."""

    def __init__(
        self,
        encoder: Encoder,
        channel: Channel,
        max_batch_tokens: int,
        max_queued: int,
        pulse: Pulse | None = None,
    ) -> None:
        self._encoder = encoder
        self._channel = channel
        self._max_batch_tokens = max_batch_tokens
        self._pulse = pulse or NoPulse()
        self._queue = EncoderQueue(max_queued)
        self._forecast = WaitForecast()
        self._arrivals = itertools.count()
        self._stopping = False
        self._num_steps = 0
        self._num_tokens = 0
        self._num_nonfinite = 0
        self._steps = StepCounter()
        self._stats_sent_at = 0.0
        self._stats_step = 0  # number of steps at the last stats message
        # Whether the encoder is computing a batch, which the watchdog may interrupt.
        self.is_computing = False
        self._pulse.watch(self)

    def run(self) -> None:
        """Serve until a `Stop` message arrives, then abort the waiting requests."""
        while not self._stopping:
            self.turn(IDLE_POLL_S)
        ended = [
            TokenDelta(each.request.request_id, 0, finish_reason="abort") for each in self._queue
        ]
        self._send(ended)
        self._encoder.close()

    def turn(self, idle_timeout_s: float) -> None:
        """Run one iteration. If there is no work, it waits up to `idle_timeout_s` for messages."""
        is_idle = not self._queue
        self._beat(not is_idle)
        self._forecast.observe(time.monotonic(), len(self._queue), self._queue.num_taken)
        self._read_inbox(idle_timeout_s if is_idle else 0.0)
        if self._queue:
            self._beat(True)  # report the start of the batch, so that a hung batch is noticed
            self._expire(time.monotonic())
            self._step(self._next_batch())
        self._send_stats()

    def describe(self) -> str:
        """The loop's state for the log. The watchdog thread calls this while the loop is stuck."""
        return str(self.stats())

    def _beat(self, busy: bool) -> None:
        self._pulse.beat(busy, UNKNOWN_STEP_TIMEOUT_S)

    def _read_inbox(self, timeout_s: float) -> None:
        for message in self._channel.poll(timeout_s):
            if isinstance(message, GenerateRequest):
                self._submit(message)
            elif isinstance(message, Abort):
                self._abort(message.request_id)
            elif isinstance(message, Control):
                self._channel.send(_control(message))
            elif isinstance(message, Stop):
                self._stopping = True

    def _submit(self, request: GenerateRequest) -> None:
        error = self._find_fault(request)
        if error is not None:
            choices = range(request.params.n)
            self._send([refusal(request.request_id, choice, error) for choice in choices])
            return
        now = time.monotonic()
        deadline = now + request.timeout_s if request.timeout_s is not None else float("inf")
        begin_by = min(deadline, now + (request.queue_timeout_s or float("inf")))
        waiting = Waiting(request.priority, next(self._arrivals), request, now, deadline, begin_by)
        self._queue.add(waiting)

    def _find_fault(self, request: GenerateRequest) -> EngineError | None:
        prompt, spec = request.prompt, self._encoder.spec
        if not request.pools:
            return InvalidRequestError(
                "This model turns text into vectors and writes none; ask it for embeddings.",
                param="model",
            )
        if request.resumed is None and not self._queue.has_place(request.tenant):
            return RateLimitError(
                "Too many requests are waiting; try again later.",
                retry_after=self._forecast.seconds(len(self._queue)),
            )
        if not prompt:
            return InvalidRequestError("The input has no tokens.", param="input")
        if not 0 <= min(prompt) <= max(prompt) < spec.vocab_size:
            return InvalidRequestError(
                f"Token ids must be within 0..{spec.vocab_size - 1}.", param="input"
            )
        if len(prompt) > spec.max_seq_len:
            return InvalidRequestError(
                f"This model's maximum context length is {spec.max_seq_len} tokens, but the input "
                f"has {len(prompt)}.",
                param="input",
            )
        return None

    def _abort(self, request_id: str) -> None:
        if self._queue.remove(lambda each: each.request.request_id == request_id):
            self._send([TokenDelta(request_id, 0, finish_reason="abort")])

    def _expire(self, now: float) -> None:
        late = self._queue.remove(lambda each: each.begin_by <= now)
        if not late:
            return
        self._send(
            [
                refusal(
                    each.request.request_id,
                    0,
                    too_late(each.deadline <= now, now - each.submitted_at),
                )
                for each in late
            ]
        )

    def _next_batch(self) -> list[Waiting]:
        """Take requests from the front of the queue, up to `max_batch_tokens` tokens, but at least
        one request.
        """
        batch: list[Waiting] = []
        num_tokens = 0
        while self._queue:
            num_tokens += len(self._queue.first().request.prompt)
            if batch and num_tokens > self._max_batch_tokens:
                break
            batch.append(self._queue.take())
        return batch

    def _step(self, batch: list[Waiting]) -> None:
        if not batch:
            return
        started_at = time.monotonic()
        try:
            vectors = self._encode(batch)
        except Exception as error:
            log.exception("a batch failed; repeating it row by row", exc_info=error)
            self._step_by_row(batch)
            # If even a warm-up raises, no request is at fault, and the engine ends.
            warm_up(self._encoder)
        else:
            self._answer(batch, vectors, started_at)

    def _encode(self, batch: Sequence[Waiting]) -> NDArray[np.float32]:
        starts = [each.request.second_start for each in batch]
        self.is_computing = True
        try:
            return self._encoder.encode(
                [each.request.prompt for each in batch], starts if any(starts) else None
            )
        finally:
            self.is_computing = False

    def _step_by_row(self, batch: list[Waiting]) -> None:
        for each in batch:
            self._beat(True)
            started_at = time.monotonic()
            try:
                vectors = self._encode([each])
            except Exception as error:
                request_id = each.request.request_id
                log.exception("request %s failed alone", request_id, exc_info=error)
                failure = InferenceError("The model failed on this request.")
                self._send([refusal(request_id, 0, failure)])
            else:
                self._answer([each], vectors, started_at)

    def _answer(
        self, batch: list[Waiting], vectors: NDArray[np.float32], started_at: float
    ) -> None:
        now = time.monotonic()
        num_tokens = sum(len(each.request.prompt) for each in batch)
        deltas = [
            _vector_delta(each, vector, started_at, now)
            for each, vector in zip(batch, vectors, strict=True)
        ]
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_nonfinite += sum(delta.vector is None for delta in deltas)
        self._steps.add(num_tokens, now - started_at)
        self._send(deltas)

    def _send(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self._channel.send(Deltas(tuple(deltas)))

    def _send_stats(self) -> None:
        now = time.monotonic()
        has_news = not self._queue and self._stats_step != self._num_steps
        if has_news or now - self._stats_sent_at >= STATS_INTERVAL_S:
            self._stats_sent_at = now
            self._stats_step = self._num_steps
            self._channel.send(Stats(self.stats()))

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._queue),
            num_steps=self._num_steps,
            prompt_tokens=self._num_tokens,
            num_nonfinite=self._num_nonfinite,
            steps=self._steps.counts(),
        )


def _vector_delta(
    waiting: Waiting, vector: NDArray[np.float32], started_at: float, now: float
) -> TokenDelta:
    request_id = waiting.request.request_id
    if not np.isfinite(vector).all():
        error = InferenceError("The model's result for this request is not finite.")
        return refusal(request_id, 0, error)
    return TokenDelta(
        request_id,
        0,
        finish_reason="stop",
        queue_s=started_at - waiting.submitted_at,
        prefill_s=now - started_at,
        vector=vector.astype("<f4").tobytes(),
    )
