"""Takes in requests in the engine process. Each request becomes sequences for the scheduler, or is
refused. This module also ends requests whose deadline has passed.

The frontend has already validated the requests. Only checks that protect other requests are
repeated here.
"""

import heapq
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from engine.backends.custom.runtime.grammar import Constraint, Grammars
from engine.backends.custom.runtime.images import (
    ImageStore,
    PlacedImage,
    fault_in,
    placed_tokens,
)
from engine.backends.custom.runtime.model_runner import ModelRunner, RunnerSpec
from engine.backends.custom.runtime.outputs import refusal, too_late
from engine.backends.custom.runtime.queue import WaitForecast
from engine.backends.custom.runtime.samplers.repetition import allowed_mask, by_first_token
from engine.backends.custom.runtime.scheduler import Scheduler
from engine.backends.custom.runtime.sequence import (
    PendingRequest,
    Sequence,
    Tokens,
    namespace_of,
    packed,
)
from engine.core.errors import (
    EngineError,
    InferenceError,
    InvalidRequestError,
    RateLimitError,
    RequestTimeoutError,
)
from engine.core.interfaces.request import GenerateRequest, Resumed, TokenDelta

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.backends.custom.runtime.groups.adapter_places import AdapterPlaces
    from engine.backends.custom.runtime.interp.probe import Probe

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 512 * 2**20  # pixels of images that wait to be encoded


class Intake:
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
        make_adapters: "Callable[[], AdapterPlaces] | None" = None,
        runner: ModelRunner | None = None,
    ) -> None:
        self._spec = spec
        self._runner = runner
        self._grammars = grammars
        self._images = images
        self._make_adapters = make_adapters
        self.adapters: AdapterPlaces | None = None  # made when the first one is used
        self._pending: dict[str, PendingRequest] = {}
        self._max_queued = max_queued
        self._scheduler = scheduler
        self._forecast = WaitForecast()
        self._arrivals = itertools.count()
        # A heap of deadlines. An entry has the deadline and all choices of a request. Entries of
        # ended requests stay in the heap for a while. They are removed when they are the majority.
        self._deadlines: list[tuple[float, int, list[Sequence]]] = []

    @property
    def num_pending(self) -> int:
        """Number of requests that wait for a grammar, images or an adapter."""
        return len(self._pending)

    def submit(self, request: GenerateRequest, now: float) -> list[TokenDelta]:
        """Queue every choice of a request. Returns an empty list or, if the request is refused, a
        final delta with the error for each choice.
        """
        prompt = self._packed(request.prompt)
        error = self._find_fault(request, prompt) or self._find_wait(request, now)
        choices = _choices(request)
        if error is not None:
            return refusals(request, choices, error)
        assert prompt is not None
        if request.grammar is None and not request.images and request.adapter is None:
            self._enqueue(request, prompt, choices, None, now, now)
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
                self._enqueue(
                    request,
                    prompt,
                    each.choices,
                    matcher,
                    each.submitted_at,
                    now,
                    tuple(each.images),
                    place,
                )
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
        assert self.adapters is not None, "`_find_fault` made it"
        return self.adapters.place(request.adapter)

    def with_adapters(self) -> "AdapterPlaces | None":
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

    def _enqueue(
        self,
        request: GenerateRequest,
        prompt: Tokens,
        choices: list[int],
        matcher: "LLMatcher | None",
        now: float,
        queued_at: float,
        images: tuple[PlacedImage, ...] = (),
        place: int = 0,
    ) -> None:
        params = request.params
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        ends = () if params.ignore_eos else request.eos_ids
        stop_ids = frozenset((*params.stop_token_ids, *ends))
        deadline, begin_by = _deadlines(request, now)
        allowed = None
        if params.allowed_token_ids:
            allowed = allowed_mask(params.allowed_token_ids, self._spec.vocab_size)
        breakers = by_first_token(request.dry_breakers)
        group: list[Sequence] = []
        resumed = {each.choice: each for each in request.resumed or ()}
        namespace = namespace_of(request)
        for choice in choices:
            before = resumed.get(choice, Resumed(choice, ()))
            probe = self._probe(request)
            seq = Sequence(
                request_id=request.request_id,
                choice=choice,
                tokens=prompt + packed(before.token_ids),
                num_prompt=len(prompt),
                max_tokens=self._max_tokens(request),
                params=params,
                stop_ids=stop_ids,
                seed=seed,
                namespace=namespace if probe is None else probe.root(namespace),
                adapter=place,
                tenant=request.tenant,
                priority=request.priority,
                arrival=next(self._arrivals),
                submitted_at=now,
                deadline=deadline,
                constraint=None if matcher is None else Constraint.after(matcher, before.token_ids),
                pools=request.pools,
                images=images,
                allowed=allowed,
                bad_words=request.bad_words,
                dry_breakers=breakers,
                expected=packed(request.expected),
                # All choices have the same prompt, so only the first choice computes the prompt's
                # logprobs.
                scores_prompt=(params.score_prompt and choice == 0 and not before.token_ids)
                or (probe is not None and probe.needs_logits),
                probe=probe,
                reports_progress=request.reports_progress and choice == 0,
                queued_at=queued_at,
                num_resumed=len(before.token_ids),
                handover=request.handover,
                keeps_blocks=request.keeps_blocks,
                # Only the last limit is read.
                surprise_limits=[before.surprise_limit or 0.0]
                * (len(before.token_ids) if params.mirostat else 0),
            )
            self._scheduler.add(seq)
            group.append(seq)
        self._scheduler.has_adapters |= place > 0
        for when in (deadline, begin_by):
            if when is not None:
                heapq.heappush(self._deadlines, (when, group[0].arrival, group))
        self._drop_ended()

    def expire(self, now: float) -> list[TokenDelta]:
        """End requests whose deadline has passed, and requests that waited too long for admission.
        A request counts as admitted once one of its choices is admitted. Its other choices may then
        wait longer.
        """
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            when, _, group = heapq.heappop(self._deadlines)
            is_over = when == group[0].deadline
            if not is_over and any(seq.started_at is not None for seq in group):
                continue
            error = too_late(is_over, now - group[0].submitted_at)
            live = [seq for seq in group if seq.finish_reason is None]
            ended += [self._scheduler.fail(seq, error, now) for seq in live]
        return ended

    def _drop_ended(self) -> None:
        live = self._scheduler.num_running + self._scheduler.num_waiting
        if len(self._deadlines) > 64 + 4 * live:
            self._deadlines = [
                entry for entry in self._deadlines if any(not seq.finish_reason for seq in entry[2])
            ]
            heapq.heapify(self._deadlines)

    def _packed(self, prompt: tuple[int, ...]) -> Tokens | None:
        """The prompt as an int32 array. None if a token id is outside the vocabulary."""
        try:
            tokens = packed(prompt)
        except OverflowError:
            return None
        ids = np.frombuffer(tokens, np.int32)
        in_range = not len(ids) or 0 <= ids.min() <= ids.max() < self._spec.vocab_size
        return tokens if in_range else None

    def _find_image_fault(self, request: GenerateRequest, num_prompt: int) -> EngineError | None:
        if self._images is None:
            return InvalidRequestError("This engine does not read images.")
        if (fault := fault_in(request.images, num_prompt)) is not None:
            return InvalidRequestError(fault)
        held = sum(each.num_image_bytes for each in self._pending.values())
        if held > MAX_PENDING_BYTES:
            return RateLimitError("Too many images are waiting; try again later.")
        return None

    def _find_wait(self, request: GenerateRequest, now: float) -> EngineError | None:
        """An error if the request would wait longer than it may."""
        if request.resumed is not None:
            return None
        scheduler = self._scheduler
        expected = self._forecast.seconds(now, scheduler.num_waiting, scheduler.num_started)
        if request.queue_timeout_s is None or expected <= request.queue_timeout_s:
            return None
        return RateLimitError(
            f"This request would wait about {expected:.0f} s for its first step, and may wait"
            f" {request.queue_timeout_s:.0f} s; try again later."
        )

    def _find_fault(self, request: GenerateRequest, prompt: Tokens | None) -> EngineError | None:
        spec = self._spec
        is_full = self._scheduler.num_waiting + self.num_pending >= self._max_queued
        if is_full and request.resumed is None:
            return RateLimitError("Too many requests are waiting; try again later.")
        if request.grammar is not None and self._grammars is None:
            return InvalidRequestError("This engine follows no grammars.")
        if request.adapter is not None and self.with_adapters() is None:
            return InvalidRequestError("This engine serves no LoRA adapters.", param="model")
        if not request.prompt:
            return InvalidRequestError("The prompt has no tokens.", param="prompt")
        if prompt is None:
            return InvalidRequestError(
                f"Prompt token ids must be within 0..{spec.vocab_size - 1}.", param="prompt"
            )
        if request.images and (error := self._find_image_fault(request, len(prompt))) is not None:
            return error
        biased = [*request.params.logit_bias, *request.params.stop_token_ids, *request.eos_ids]
        biased += request.params.allowed_token_ids
        biased += [*request.expected, *(token for word in request.bad_words for token in word)]
        if biased and not 0 <= min(biased) <= max(biased) < spec.vocab_size:
            return InvalidRequestError(f"Token ids must be within 0..{spec.vocab_size - 1}.")
        # An embedding request generates no token, so its prompt may fill the whole context.
        if len(prompt) + (not request.pools) > spec.max_seq_len:
            return InvalidRequestError(
                f"This model's maximum context length is {spec.max_seq_len} tokens, "
                f"but the prompt has {len(prompt)}."
            )
        try:
            self._probe(request)
        except EngineError as error:
            return error
        num_tokens = len(prompt) + self._max_tokens(request) - 1
        if not self._scheduler.kv.can_ever_fit(num_tokens):
            capacity = self._scheduler.kv.pool.num_usable * spec.block_size
            return InvalidRequestError(
                f"The request needs room for {num_tokens} tokens; the KV cache holds {capacity}. "
                "Lower max_tokens, shorten the prompt, or give the server a larger cache."
            )
        num_before = max((len(each.token_ids) for each in request.resumed or ()), default=0)
        if num_before >= self._max_tokens(request):
            return InferenceError("The restarted engine has no room for the rest of this request.")
        return None

    def _probe(self, request: GenerateRequest) -> "Probe | None":
        if request.interp is None or self._runner is None:
            return None
        from engine.backends.custom.runtime.interp.steps import make_probe  # few servers need it

        live = self._scheduler.sequences()
        return make_probe(request, self._runner, self._max_tokens(request), live)

    def _max_tokens(self, request: GenerateRequest) -> int:
        """The requested max_tokens, limited to the room that the prompt leaves in the context."""
        if request.pools:
            return 1
        asked, room = request.params.max_tokens, self._spec.max_seq_len - len(request.prompt)
        return room if asked is None else min(asked, room)


def refusals(
    request: GenerateRequest, choices: Iterable[int], error: EngineError
) -> list[TokenDelta]:
    return [refusal(request.request_id, choice, error) for choice in choices]


def _deadlines(request: GenerateRequest, now: float) -> tuple[float | None, float | None]:
    """When a request must have ended, and when it must have begun if that is earlier."""
    deadline = None if request.timeout_s is None else now + request.timeout_s
    begin_by = None if request.queue_timeout_s is None else now + request.queue_timeout_s
    if begin_by is not None and deadline is not None and begin_by >= deadline:
        begin_by = None
    return deadline, begin_by


def _choices(request: GenerateRequest) -> list[int]:
    if request.resumed is None:
        return list(range(request.params.n))
    return [each.choice for each in request.resumed]
