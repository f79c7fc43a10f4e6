"""Takes in requests in the engine process. Each request becomes sequences for the scheduler, one
for each choice, or is refused. This module also ends requests whose deadline has passed.
"""

import heapq
import itertools
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from engine.core.errors import (
    EngineError,
    InferenceError,
    InvalidRequestError,
    RateLimitError,
)
from engine.core.forecast import WaitForecast, may_take
from engine.core.interfaces.request import GenerateRequest, Resumed, SamplingParams, TokenDelta
from engine.runtime.model_runner import U32, ModelRunner, RunnerSpec
from engine.runtime.outputs import refusal, too_late
from engine.runtime.requests.grammar import Constraint, Grammars
from engine.runtime.requests.images import ImageStore, PromptImages, fault_in
from engine.runtime.requests.pending import PendingRequests, ReadyRequest
from engine.runtime.samplers.prompt_logprobs import PromptScores
from engine.runtime.samplers.repetition import Breakers, allowed_mask, by_first_token
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import QueueEntry, Sequence, TokenRules, Tokens, packed

if TYPE_CHECKING:
    from engine.runtime.groups.adapter_slots import AdapterSlots
    from engine.runtime.interp.probe import Probe
    from engine.runtime.interp.steps import Probes

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


def deadlines_of(ready: ReadyRequest, queued_at: float) -> tuple[float | None, float | None]:
    """When the request must have ended, and when it must have begun if that is earlier. The time
    before `queued_at`, in which it waited for its grammar, its images or its adapter, is no waiting
    for its turn.
    """
    request, now = ready.request, ready.submitted_at
    deadline = None if request.timeout_s is None else now + request.timeout_s
    begin_by = None if request.queue_timeout_s is None else queued_at + request.queue_timeout_s
    if begin_by is not None and deadline is not None and begin_by >= deadline:
        begin_by = None
    return deadline, begin_by


def namespace_of(request: GenerateRequest) -> str:
    """The namespace of a request's cached prefixes. Keys and values depend on the adapter, so each
    adapter has namespaces of its own. A salt never contains a null character.
    """
    return request.salt if request.adapter is None else f"{request.salt}\0{request.adapter.key}"


class Shared(msgspec.Struct, frozen=True):
    """What all choices of a request share."""

    params: SamplingParams
    stop_ids: frozenset[int]
    allowed: U32 | None
    breakers: Breakers


class SequenceMaker:
    """Makes the sequences of a request: one for each choice."""

    def __init__(self, spec: RunnerSpec, scheduler: Scheduler, runner: ModelRunner | None) -> None:
        self._spec, self._scheduler, self._runner = spec, scheduler, runner
        self._arrivals = itertools.count()
        # The extensions of those sequences that need them
        self.images = PromptImages()
        self._scores = PromptScores()
        self._probes: Probes | None = None

    def sequences(self, ready: ReadyRequest, queued_at: float) -> Iterator[Sequence]:
        """One sequence for each choice. The caller queues each before it takes the next one,
        because probes are limited by what the tenant's queued sequences capture.
        """
        shared = self._shared(ready.request)
        resumed = {each.choice: each for each in ready.request.resumed or ()}
        for choice in ready.choices:
            before = resumed.get(choice, Resumed(choice, ()))
            yield self._sequence(ready, before, shared, queued_at)

    def _shared(self, request: GenerateRequest) -> Shared:
        params, allowed = request.params, None
        ends = () if params.ignore_eos else request.eos_ids
        if params.allowed_token_ids:
            allowed = allowed_mask(params.allowed_token_ids, self._spec.vocab_size)
        return Shared(
            params=params if params.seed is not None else replace(params, seed=_new_seed()),
            stop_ids=frozenset((*params.stop_token_ids, *ends)),
            allowed=allowed,
            breakers=by_first_token(request.dry_breakers) if request.dry_breakers else {},
        )

    def _sequence(
        self, ready: ReadyRequest, before: Resumed, shared: Shared, queued_at: float
    ) -> Sequence:
        request = ready.request
        probe, namespace = self.probe(request), namespace_of(request)
        seq = Sequence(
            request_id=request.request_id,
            choice=before.choice,
            tokens=ready.prompt + packed(before.token_ids),
            num_prompt=len(ready.prompt),
            max_tokens=self.max_tokens(request),
            params=shared.params,
            stop_ids=shared.stop_ids,
            namespace=namespace if probe is None else probe.root(namespace),
            tenant=request.tenant,
            priority=request.priority,
            arrival=next(self._arrivals),
            pools=request.pools,
            rules=_rules(ready, before, shared),
            queue=QueueEntry(num_resumed=len(before.token_ids)),
        )
        self._attach(seq, ready, probe, queued_at)
        return seq

    def _attach(
        self, seq: Sequence, ready: ReadyRequest, probe: "Probe | None", queued_at: float
    ) -> None:
        """Let the features that the sequence needs shape its rows."""
        scheduler = self._scheduler
        if ready.images:
            self.images.put(seq, ready.images)
            scheduler.extend(seq, self.images)
        if ready.adapters is not None:
            ready.adapters.use(seq, ready.place)
            scheduler.extend(seq, ready.adapters)
        # All choices have the same prompt, so only the first choice computes the prompt's logprobs.
        if seq.params.score_prompt and seq.choice == 0 and not seq.queue.num_resumed:
            self._scores.begin(seq)
            scheduler.extend(seq, self._scores)
        if probe is not None:
            assert self._probes is not None, "`probe` made it"
            self._probes.put(seq, probe, deadlines_of(ready, queued_at)[0])
            scheduler.extend(seq, self._probes)

    def probe(self, request: GenerateRequest) -> "Probe | None":
        if request.interp is None or self._runner is None:
            return None
        from engine.runtime.interp.steps import Probes, make_probe  # few servers need it

        if self._probes is None:
            self._probes = Probes()
        live, max_tokens = self._probes.live(), self.max_tokens(request)
        return make_probe(request, request.interp, self._runner, max_tokens, live)

    def max_tokens(self, request: GenerateRequest) -> int:
        """The requested max_tokens, limited to the room that the prompt leaves in the context."""
        if request.pools:
            return 1
        asked, room = request.params.max_tokens, self._spec.max_seq_len - len(request.prompt)
        return room if asked is None else min(asked, room)


def _rules(ready: ReadyRequest, before: Resumed, shared: Shared) -> TokenRules | None:
    """What decides the tokens of a sequence beside its parameters, if anything does."""
    request, matcher, mirostat = ready.request, ready.matcher, shared.params.mirostat
    named = (shared.allowed is not None, request.bad_words, shared.breakers, mirostat)
    if matcher is None and not any(named):
        return None
    return TokenRules(
        constraint=None if matcher is None else Constraint.after(matcher, before.token_ids),
        allowed=shared.allowed,
        bad_words=request.bad_words,
        dry_breakers=shared.breakers,
        # Only the last limit is read.
        surprise_limits=[before.surprise_limit or 0.0] * (len(before.token_ids) if mirostat else 0),
    )


def _new_seed() -> int:
    return secrets.randbits(62)


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
    """Checks requests, and puts them into the scheduler's queue. Those that need a grammar, images
    or an adapter wait for it before (`pending.py`).
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
        self._max_queued = max_queued
        self._scheduler = scheduler
        self._maker = SequenceMaker(spec, scheduler, runner)
        self.pending = PendingRequests(self._maker.images, grammars, images, make_adapters)
        self._checks = RequestChecks(spec, scheduler, self._maker)

    @property
    def num_pending(self) -> int:
        """Number of requests that wait for a grammar, images or an adapter."""
        return len(self.pending.requests)

    def observe(self, now: float) -> None:
        """Measure how fast sequences start. The engine calls this in each turn."""
        self._checks.observe(now)

    def submit(self, request: GenerateRequest, now: float) -> list[TokenDelta]:
        """Queue every choice of a request. Returns an empty list or, if the request is refused, a
        final delta with the error for each choice.
        """
        prompt = self._checks.packed(request.prompt)
        waits = request.grammar is not None or request.images or request.adapter is not None
        error = self._find_no_place(request, now)
        error = error or (self.pending.find_lack(request) if waits else None)
        error = error or self._checks.find_fault(request, prompt)
        error = error or self._checks.find_wait(request, now)
        choices = _choices(request)
        if error is not None:
            return refusals(request, choices, error)
        assert prompt is not None
        if waits:
            self.pending.add(request, prompt, choices, now)
            return self.admit_ready(now)
        try:
            self._enqueue(ReadyRequest(request, prompt, choices, now), now)
        except EngineError as refused:
            return refusals(request, choices, refused)
        return []

    def admit_ready(self, now: float) -> list[TokenDelta]:
        """Queue the pending requests that wait no longer. Refuse those that can't go on, for
        example because their grammar failed to compile, or because they were not ready in time.
        """
        refused: list[TokenDelta] = []
        for each, ready in self.pending.take(now):
            try:
                if isinstance(ready, EngineError):
                    raise ready
                self._enqueue(ready, now)
            except EngineError as error:
                refused += refusals(each.request, each.choices, error)
            except Exception:
                log.exception("request %s could not be queued", each.request.request_id)
                refused += self.fail(each.request, each.choices, now)
        return refused

    def encode_image(self, now: float) -> list[TokenDelta]:
        """Encode the next image of the request that waits longest, or refuse this request."""
        failed = self.pending.encode_image()
        return [] if failed is None else self.fail(failed.request, failed.choices, now)

    def fail(
        self, request: GenerateRequest, choices: Iterable[int], now: float
    ) -> list[TokenDelta]:
        """Remove a request that could not be queued because of an unexpected error."""
        self.pending.requests.pop(request.request_id, None)
        self._scheduler.abort(request.request_id, None, now)
        return refusals(
            request, choices, InferenceError("The engine could not take in this request.")
        )

    def abort(self, request_id: str, choice: int | None, now: float) -> list[TokenDelta]:
        """Abort one choice of a request, or all choices if `choice` is None, in any state. Unknown
        ids are ignored.
        """
        pending = self.pending.requests.get(request_id)
        if pending is None:
            return self._scheduler.abort(request_id, choice, now)
        ended = [each for each in pending.choices if choice in (None, each)]
        pending.choices[:] = [each for each in pending.choices if each not in ended]
        if not pending.choices:
            del self.pending.requests[request_id]
        return [TokenDelta(request_id, each, finish_reason="abort") for each in ended]

    def abort_pending(self, now: float) -> list[TokenDelta]:
        """Abort every request that waits for its grammar or its images."""
        pending = list(self.pending.requests)
        return [delta for each in pending for delta in self.abort(each, None, now)]

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
        for is_end, when in zip((True, False), deadlines_of(ready, now), strict=True):
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

    def _find_no_place(self, request: GenerateRequest, now: float) -> EngineError | None:
        """An error if too much is waiting."""
        if request.resumed is not None or self._has_place(request.tenant):
            return None
        return RateLimitError(
            "Too many requests are waiting; try again later.",
            retry_after=self._checks.again_s(request.tenant, request.priority, now),
        )

    def _has_place(self, tenant: str) -> bool:
        """Whether one more request of the tenant may wait."""
        own = sum(each.request.tenant == tenant for each in self.pending.requests.values())
        own += self._scheduler.table.waiting.counts().get(tenant, 0)
        num_taken = self._scheduler.table.num_waiting + self.num_pending
        return may_take(tenant, own, num_taken, self._max_queued)


def refusals(
    request: GenerateRequest, choices: Iterable[int], error: EngineError
) -> list[TokenDelta]:
    return [refusal(request.request_id, choice, error) for choice in choices]


def _choices(request: GenerateRequest) -> list[int]:
    if request.resumed is None:
        return list(range(request.params.n))
    return [each.choice for each in request.resumed]
