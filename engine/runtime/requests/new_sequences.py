"""Makes the sequences of a request: one for each choice."""

import itertools
import secrets
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from engine.core.interfaces.request import GenerateRequest, Resumed, SamplingParams
from engine.runtime.model_runner import U32, ModelRunner, RunnerSpec
from engine.runtime.requests.grammar import Constraint
from engine.runtime.requests.images import PlacedImage, PromptImages
from engine.runtime.samplers.prompt_logprobs import PromptScores
from engine.runtime.samplers.repetition import (
    Breakers,
    allowed_mask,
    by_first_token,
)
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import QueueEntry, Sequence, TokenRules, Tokens, packed

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.runtime.groups.adapter_slots import AdapterSlots
    from engine.runtime.interp.probe import Probe
    from engine.runtime.interp.steps import Probes


class PendingRequest(msgspec.Struct, frozen=True):
    """A request that has no sequences yet: its grammar is being compiled, its images are not all
    encoded, or its adapter has no place.
    """

    request: GenerateRequest
    prompt: Tokens
    choices: list[int]  # indices of the choices that were not aborted
    matcher: "Future[LLMatcher] | None"
    submitted_at: float
    images: list[PlacedImage] = msgspec.field(default_factory=list)  # those that are encoded

    @property
    def is_ready(self) -> bool:
        """Whether grammar and images are ready."""
        is_compiled = self.matcher is None or self.matcher.done()
        return is_compiled and len(self.images) == len(self.request.images)


def namespace_of(request: GenerateRequest) -> str:
    """The namespace of a request's cached prefixes. Keys and values depend on the adapter, so each
    adapter has namespaces of its own. A salt never contains a null character.
    """
    return request.salt if request.adapter is None else f"{request.salt}\0{request.adapter.key}"


class ReadyRequest(msgspec.Struct, frozen=True):
    """A request that can be queued, with all that it waited for."""

    request: GenerateRequest
    prompt: Tokens
    choices: list[int]
    submitted_at: float
    matcher: "LLMatcher | None" = None
    images: tuple[PlacedImage, ...] = ()
    adapters: "AdapterSlots | None" = None  # if it has an adapter, which has this place
    place: int = 0

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
            self._probes.put(seq, probe, ready.deadlines(queued_at)[0])
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
