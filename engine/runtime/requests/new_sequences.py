"""Makes the sequences of a request: one for each choice."""

import itertools
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from engine.core.interfaces.request import GenerateRequest, Resumed
from engine.runtime.model_runner import U32, ModelRunner, RunnerSpec
from engine.runtime.requests.grammar import Constraint
from engine.runtime.requests.images import PlacedImage
from engine.runtime.samplers.repetition import (
    Breakers,
    allowed_mask,
    by_first_token,
)
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Sequence, Tokens, namespace_of, packed

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.runtime.interp.probe import Probe


class ReadyRequest(msgspec.Struct, frozen=True):
    """A request that can be queued, with all that it waited for."""

    request: GenerateRequest
    prompt: Tokens
    choices: list[int]
    submitted_at: float
    matcher: "LLMatcher | None" = None
    images: tuple[PlacedImage, ...] = ()
    place: int = 0  # of its adapter

    def deadlines(self, queued_at: float) -> tuple[float | None, float | None]:
        """When the request must have ended, and when it must have begun if that is earlier. The
        time before `queued_at`, in which it waited for its grammar, its images or its adapter, is
        no waiting for its turn.
        """
        request, now = self.request, self.submitted_at
        deadline = None if request.timeout_s is None else now + request.timeout_s
        begin_by = None if request.queue_timeout_s is None else queued_at + request.queue_timeout_s
        if begin_by is not None and deadline is not None and begin_by >= deadline:
            begin_by = None
        return deadline, begin_by


class Shared(msgspec.Struct, frozen=True):
    """What all choices of a request share."""

    seed: int
    stop_ids: frozenset[int]
    allowed: U32 | None
    breakers: Breakers


class SequenceMaker:
    def __init__(self, spec: RunnerSpec, scheduler: Scheduler, runner: ModelRunner | None) -> None:
        self._spec, self._scheduler, self._runner = spec, scheduler, runner
        self._arrivals = itertools.count()

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
            seed=params.seed if params.seed is not None else secrets.randbits(62),
            stop_ids=frozenset((*params.stop_token_ids, *ends)),
            allowed=allowed,
            breakers=by_first_token(request.dry_breakers),
        )

    def _sequence(
        self, ready: ReadyRequest, before: Resumed, shared: Shared, queued_at: float
    ) -> Sequence:
        request, params, matcher = ready.request, ready.request.params, ready.matcher
        is_first = before.choice == 0
        deadline, begin_by = ready.deadlines(queued_at)
        probe, namespace = self.probe(request), namespace_of(request)
        return Sequence(
            request_id=request.request_id,
            choice=before.choice,
            tokens=ready.prompt + packed(before.token_ids),
            num_prompt=len(ready.prompt),
            max_tokens=self.max_tokens(request),
            params=params,
            stop_ids=shared.stop_ids,
            seed=shared.seed,
            namespace=namespace if probe is None else probe.root(namespace),
            adapter=ready.place,
            tenant=request.tenant,
            priority=request.priority,
            arrival=next(self._arrivals),
            submitted_at=ready.submitted_at,
            deadline=deadline,
            begin_by=begin_by,
            constraint=None if matcher is None else Constraint.after(matcher, before.token_ids),
            pools=request.pools,
            images=ready.images,
            allowed=shared.allowed,
            bad_words=request.bad_words,
            dry_breakers=shared.breakers,
            expected=packed(request.expected),
            # All choices have the same prompt, so only the first choice computes the prompt's
            # logprobs.
            scores_prompt=params.score_prompt and is_first and not before.token_ids,
            probe=probe,
            reports_progress=request.reports_progress and is_first,
            tells_begin=request.tells_begin and is_first,
            queued_at=queued_at,
            num_resumed=len(before.token_ids),
            handover=request.handover,
            keeps_blocks=request.keeps_blocks,
            # Only the last limit is read.
            surprise_limits=[before.surprise_limit or 0.0]
            * (len(before.token_ids) if params.mirostat else 0),
        )

    def probe(self, request: GenerateRequest) -> "Probe | None":
        if request.interp is None or self._runner is None:
            return None
        from engine.runtime.interp.steps import make_probe  # few servers need it

        live = self._scheduler.probed()
        return make_probe(request, self._runner, self.max_tokens(request), live)

    def max_tokens(self, request: GenerateRequest) -> int:
        """The requested max_tokens, limited to the room that the prompt leaves in the context."""
        if request.pools:
            return 1
        asked, room = request.params.max_tokens, self._spec.max_seq_len - len(request.prompt)
        return room if asked is None else min(asked, room)
