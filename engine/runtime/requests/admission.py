"""Takes in requests in the engine process. Each request becomes sequences for the scheduler, or is
refused. This module also ends requests whose deadline has passed.
"""

import heapq
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.core.errors import (
    EngineError,
    InferenceError,
    InvalidRequestError,
    RateLimitError,
    RequestTimeoutError,
)
from engine.core.forecast import WaitForecast, may_take
from engine.core.interfaces.request import GenerateRequest, TokenDelta
from engine.runtime.model_runner import ModelRunner, RunnerSpec
from engine.runtime.outputs import refusal, too_late
from engine.runtime.requests.grammar import Grammars
from engine.runtime.requests.images import (
    ImageAccount,
    ImageStore,
    fault_in,
    placed_tokens,
)
from engine.runtime.requests.new_sequences import PendingRequest, ReadyRequest, SequenceMaker
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Sequence, Tokens, packed

if TYPE_CHECKING:
    from engine.runtime.groups.adapter_slots import AdapterSlots

log = logging.getLogger(__name__)

LOADING_GRACE_S = 1.0
# Logprobs of prompt tokens and of their alternatives, which are sent in one message
MAX_PROMPT_SCORES = 2**22


class Deadline(NamedTuple):
    """When a request must have ended, or must have begun if not `is_end`."""

    at: float
    arrival: int
    is_end: bool
    queued_at: float
    choices: list[Sequence]

    @property
    def is_live(self) -> bool:
        return any(not seq.finish_reason for seq in self.choices)


class RequestChecks:
    """Finds why a request is refused: it can never run here, or it would wait too long. The
    frontend has validated it, so only checks that protect other requests are repeated here.
    """

    def __init__(self, spec: RunnerSpec, scheduler: Scheduler, maker: SequenceMaker) -> None:
        self._spec, self._scheduler, self._maker = spec, scheduler, maker
        self._forecast = WaitForecast()
        # A heap. Entries of ended requests stay in it for a while. They are removed when they are
        # the majority.
        self.deadlines: list[Deadline] = []

    def packed(self, prompt: tuple[int, ...]) -> Tokens | None:
        """The prompt as an int32 array. None if a token id is outside the vocabulary."""
        try:
            tokens = packed(prompt)
        except OverflowError:
            return None
        ids = np.frombuffer(tokens, np.int32)
        in_range = not len(ids) or 0 <= ids.min() <= ids.max() < self._spec.vocab_size
        return tokens if in_range else None

    def find_fault(self, request: GenerateRequest, prompt: Tokens | None) -> EngineError | None:
        """An error if the request can never run. `prompt` is its prompt, packed."""
        spec = self._spec
        if not request.prompt:
            return InvalidRequestError("The prompt has no tokens.", param="prompt")
        if prompt is None:
            return InvalidRequestError(
                f"Prompt token ids must be within 0..{spec.vocab_size - 1}.", param="prompt"
            )
        if request.images and (fault := fault_in(request.images, len(prompt))) is not None:
            return InvalidRequestError(fault)
        if not self._knows_tokens(request):
            return InvalidRequestError(f"Token ids must be within 0..{spec.vocab_size - 1}.")
        # An embedding request generates no token, so its prompt may fill the whole context.
        if len(prompt) + (not request.pools) > spec.max_seq_len:
            return InvalidRequestError(
                f"This model's maximum context length is {spec.max_seq_len} tokens, "
                f"but the prompt has {len(prompt)}."
            )
        if (excess := _too_many_scores(request)) is not None:
            return excess
        try:
            self._maker.probe(request)
        except EngineError as error:
            return error
        max_tokens = self._maker.max_tokens(request)
        num_tokens = len(prompt) + max_tokens - 1
        if not self._scheduler.kv.can_ever_fit(num_tokens):
            capacity = self._scheduler.kv.pool.num_usable * spec.block_size
            return InvalidRequestError(
                f"The request needs room for {num_tokens} tokens; the KV cache holds {capacity}. "
                "Lower max_tokens, shorten the prompt, or give the server a larger cache."
            )
        num_before = max((len(each.token_ids) for each in request.resumed or ()), default=0)
        if num_before >= max_tokens:
            return InferenceError("The restarted engine has no room for the rest of this request.")
        return None

    def _knows_tokens(self, request: GenerateRequest) -> bool:
        """Whether all tokens that the request names beside its prompt are in the vocabulary."""
        named = [*request.params.logit_bias, *request.params.stop_token_ids, *request.eos_ids]
        named += request.params.allowed_token_ids
        attribution = request.interp and request.interp.attribution
        if attribution and attribution.target is not None:
            named.append(attribution.target)
        named += [*request.expected, *(token for word in request.bad_words for token in word)]
        named += (token for each in request.resumed or () for token in each.token_ids)
        return not named or 0 <= min(named) <= max(named) < self._spec.vocab_size

    def observe(self, now: float) -> None:
        """Measure how fast sequences start. The engine calls this in each turn."""
        num_waiting = len(self._scheduler.table.waiting)
        self._forecast.observe(now, num_waiting, self._scheduler.num_started)

    def again_s(self, tenant: str, priority: int, now: float) -> float:
        """After how many seconds a refused request should come again: when it would have begun, but
        at the latest when all that wait now have begun or were refused.
        """
        ends = dict.fromkeys(self._scheduler.table.waiting, math.inf)
        for entry in self.deadlines:
            for seq in entry.choices:
                if seq in ends:
                    ends[seq] = min(ends[seq], entry.at)
        last = max(ends.values(), default=now)
        return max(0.0, min(self._wait_s(tenant, priority), last - now))

    def _wait_s(self, tenant: str, priority: int) -> float:
        """How long a request would wait for its first step, if it were queued now."""
        waiting, step = self._scheduler.table.waiting, self._scheduler.step
        return self._forecast.seconds(waiting.num_before(tenant, priority, step))

    def find_wait(self, request: GenerateRequest, now: float) -> EngineError | None:
        """An error if the request would wait longer than it may."""
        longest = self._forecast.seconds(self._scheduler.table.num_waiting)
        limit_s = request.queue_timeout_s
        if request.resumed is not None or limit_s is None or longest <= limit_s:
            return None
        expected = self._wait_s(request.tenant, request.priority)
        if expected <= limit_s:
            return None
        return RateLimitError(
            f"This request would wait about {expected:.0f} s for its first step, and may wait"
            f" {limit_s:.0f} s; try again later.",
            retry_after=self.again_s(request.tenant, request.priority, now),
        )


def _too_many_scores(request: GenerateRequest) -> EngineError | None:
    params = request.params
    count = len(request.prompt) * (1 + params.num_prompt_logprobs) if params.score_prompt else 0
    if count <= MAX_PROMPT_SCORES:
        return None
    return InvalidRequestError(
        f"The prompt would have {count:,} logprobs, and may have {MAX_PROMPT_SCORES:,}; ask for"
        " fewer alternatives, or send a shorter prompt.",
        param="prompt_logprobs",
    )


class RequestAdmission:
    """Checks requests, waits for their grammars to compile, their images to be encoded and their
    adapters to be loaded, and puts them into the scheduler's queue.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        scheduler: Scheduler,
        max_queued: int,
        grammars: Grammars | None = None,
        images: ImageStore | None = None,
        make_adapters: "Callable[[], AdapterSlots] | None" = None,
        runner: ModelRunner | None = None,
    ) -> None:
        self._grammars = grammars
        self._images = images
        self._account = None if images is None else ImageAccount(images)
        self._make_adapters = make_adapters
        self.adapters: AdapterSlots | None = None  # made when the first one is used
        self._pending: dict[str, PendingRequest] = {}
        self._max_queued = max_queued
        self._scheduler = scheduler
        self._maker = SequenceMaker(spec, scheduler, runner)
        self._checks = RequestChecks(spec, scheduler, self._maker)

    @property
    def num_pending(self) -> int:
        """Number of requests that wait for a grammar, images or an adapter."""
        return len(self._pending)

    def observe(self, now: float) -> None:
        """Measure how fast sequences start. The engine calls this in each turn."""
        self._checks.observe(now)

    def submit(self, request: GenerateRequest, now: float) -> list[TokenDelta]:
        """Queue every choice of a request. Returns an empty list or, if the request is refused, a
        final delta with the error for each choice.
        """
        prompt = self._checks.packed(request.prompt)
        error = self._find_no_room(request, now) or self._find_lack(request)
        error = error or self._checks.find_fault(request, prompt)
        error = error or self._checks.find_wait(request, now)
        choices = _choices(request)
        if error is not None:
            return refusals(request, choices, error)
        assert prompt is not None
        if request.grammar is None and not request.images and request.adapter is None:
            try:
                self._enqueue(ReadyRequest(request, prompt, choices, now), now)
            except EngineError as refused:
                return refusals(request, choices, refused)
            return []
        matcher = None
        if request.grammar is not None:
            assert self._grammars is not None
            matcher = self._grammars.compile(request.grammar)
        self._pending[request.request_id] = PendingRequest(request, prompt, choices, matcher, now)
        return self.admit_ready(now)

    def admit_ready(self, now: float) -> list[TokenDelta]:
        """Queue the requests whose grammar is compiled and whose images are encoded. Refuse a
        request if its grammar failed to compile, or if it was not ready within its time limit.
        """
        refused: list[TokenDelta] = []
        if self.adapters is not None:
            self.adapters.begin_pass()
        for each in list(self._pending.values()):
            request, timeout_s = each.request, each.request.timeout_s
            try:
                place = self._place(request) if each.is_ready else None
            except EngineError as error:
                del self._pending[request.request_id]
                refused += refusals(request, each.choices, error)
                continue
            except Exception:  # such as a lack of memory on the device
                log.exception("request %s got no adapter", request.request_id)
                refused += self.fail(request, each.choices, now)
                continue
            if place is None:
                if timeout_s is not None and now > each.submitted_at + timeout_s:
                    del self._pending[request.request_id]
                    late = RequestTimeoutError("The request's time limit passed before it began.")
                    refused += refusals(request, each.choices, late)
                continue
            del self._pending[request.request_id]
            try:
                matcher = None if each.matcher is None else each.matcher.result()
                prompt = placed_tokens(each.prompt, each.images)
                images, since = tuple(each.images), each.submitted_at
                own = (images, None if request.adapter is None else self.adapters, place)
                ready = ReadyRequest(request, prompt, each.choices, since, matcher, *own)
                self._enqueue(ready, now)
            except EngineError as error:
                refused += refusals(request, each.choices, error)
            except Exception:
                log.exception("request %s could not be queued", request.request_id)
                refused += self.fail(request, each.choices, now)
        return refused

    def _place(self, request: GenerateRequest) -> int | None:
        """The place of the request's adapter. None: the request must wait for it."""
        if request.adapter is None:
            return 0
        assert self.adapters is not None, "`_find_lack` made it"
        return self.adapters.place(request.adapter)

    def with_adapters(self) -> "AdapterSlots | None":
        """The places of LoRA adapters. None if the runner does not compute adapters."""
        if self.adapters is None and self._make_adapters is not None:
            self.adapters = self._make_adapters()
        return self.adapters

    @property
    def has_images(self) -> bool:
        """Whether an image waits to be encoded."""
        return self._next_with_image() is not None

    def encode_image(self, now: float) -> list[TokenDelta]:
        """Encode the next image of the request that waits longest, or refuse this request."""
        pending = self._next_with_image()
        if pending is None or self._images is None:
            return []
        request, image = pending.request, pending.request.images[len(pending.images)]
        try:
            pending.images.append(self._images.place(image, request.prompt[image.start]))
            return []
        except Exception:
            log.exception("an image of request %s could not be encoded", request.request_id)
            return self.fail(request, pending.choices, now)

    def _next_with_image(self) -> PendingRequest | None:
        waiting = self._pending.values()
        return next((each for each in waiting if len(each.images) < len(each.request.images)), None)

    def fail(
        self, request: GenerateRequest, choices: Iterable[int], now: float
    ) -> list[TokenDelta]:
        """Remove a request that could not be queued because of an unexpected error."""
        self._pending.pop(request.request_id, None)
        self._scheduler.abort(request.request_id, None, now)
        return refusals(
            request, choices, InferenceError("The engine could not take in this request.")
        )

    def abort(self, request_id: str, choice: int | None, now: float) -> list[TokenDelta]:
        """Abort one choice of a request, or all choices if `choice` is None, in any state. Unknown
        ids are ignored.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            return self._scheduler.abort(request_id, choice, now)
        ended = [each for each in pending.choices if choice in (None, each)]
        pending.choices[:] = [each for each in pending.choices if each not in ended]
        if not pending.choices:
            del self._pending[request_id]
        return [TokenDelta(request_id, each, finish_reason="abort") for each in ended]

    def abort_pending(self, now: float) -> list[TokenDelta]:
        """Abort every request that waits for its grammar or its images."""
        return [delta for each in list(self._pending) for delta in self.abort(each, None, now)]

    def _enqueue(self, ready: ReadyRequest, now: float) -> None:
        group: list[Sequence] = []
        try:
            for seq in self._maker.sequences(ready, now):
                group.append(seq)
                self._scheduler.add(seq, ready.request, ready.submitted_at, now)
        except Exception:
            # If one choice can't be queued, none of them runs.
            self._scheduler.abort(ready.request.request_id, None, now)
            for seq in group:
                self._scheduler.forget(seq)
            raise
        for is_end, when in zip((True, False), ready.deadlines(now), strict=True):
            if when is not None:
                entry = Deadline(when, group[0].arrival, is_end, now, group)
                heapq.heappush(self._checks.deadlines, entry)
        self._drop_ended()

    def expire(self, now: float) -> list[TokenDelta]:
        """End requests whose deadline has passed, and requests that waited too long for admission.
        A request counts as admitted once one of its choices is admitted. Its other choices may then
        wait longer.
        """
        ended = []
        kv = self._scheduler.kv
        while self._checks.deadlines and self._checks.deadlines[0].at <= now:
            entry = heapq.heappop(self._checks.deadlines)
            if not entry.is_end and any(seq.has_started for seq in entry.choices):
                continue
            if not entry.is_end and any(kv.is_reading(seq) for seq in entry.choices):
                # It waits for blocks of a tier, and not for its turn.
                heapq.heappush(self._checks.deadlines, entry._replace(at=now + LOADING_GRACE_S))
                continue
            error = too_late(entry.is_end, now - entry.queued_at)
            live = [seq for seq in entry.choices if seq.finish_reason is None]
            ended += [self._scheduler.fail(seq, error, now) for seq in live]
        return ended

    def _drop_ended(self) -> None:
        live = self._scheduler.table.num_running + self._scheduler.table.num_waiting
        if len(self._checks.deadlines) > 64 + 4 * live:
            self._checks.deadlines = [entry for entry in self._checks.deadlines if entry.is_live]
            heapq.heapify(self._checks.deadlines)

    def _find_no_room(self, request: GenerateRequest, now: float) -> EngineError | None:
        """An error if too much is waiting."""
        if request.resumed is None and not self._has_place(request.tenant):
            return RateLimitError(
                "Too many requests are waiting; try again later.",
                retry_after=self._checks.again_s(request.tenant, request.priority, now),
            )
        if not request.images:
            return None
        return None if self._account is None else self._account.find_fault(request, self._held())

    def _held(self) -> Iterator[tuple[str, int]]:
        """The tenant and the bytes of each request with images that has not ended."""
        assert self._account is not None
        for each in self._pending.values():
            yield each.request.tenant, self._account.needed(each.request.images)
        yield from self._maker.images.bytes_held()

    def _has_place(self, tenant: str) -> bool:
        """Whether one more request of the tenant may wait."""
        own = sum(each.request.tenant == tenant for each in self._pending.values())
        own += self._scheduler.table.waiting.counts().get(tenant, 0)
        num_taken = self._scheduler.table.num_waiting + self.num_pending
        return may_take(tenant, own, num_taken, self._max_queued)

    def _find_lack(self, request: GenerateRequest) -> EngineError | None:
        """An error if the request needs what this engine does not have."""
        if request.grammar is not None and self._grammars is None:
            return InvalidRequestError("This engine follows no grammars.")
        if request.adapter is not None and self.with_adapters() is None:
            return InvalidRequestError("This engine serves no LoRA adapters.", param="model")
        if request.images and self._images is None:
            return InvalidRequestError("This engine does not read images.")
        return None


def refusals(
    request: GenerateRequest, choices: Iterable[int], error: EngineError
) -> list[TokenDelta]:
    return [refusal(request.request_id, choice, error) for choice in choices]


def _choices(request: GenerateRequest) -> list[int]:
    if request.resumed is None:
        return list(range(request.params.n))
    return [each.choice for each in request.resumed]
