"""Checks requests before they are queued. The frontend has already validated them, so only checks
that protect other requests are repeated here.
"""

import math

import numpy as np

from engine.core.errors import EngineError, InferenceError, InvalidRequestError, RateLimitError
from engine.core.forecast import WaitForecast
from engine.core.interfaces.request import GenerateRequest
from engine.runtime.model_runner import RunnerSpec
from engine.runtime.requests.images import fault_in
from engine.runtime.requests.new_sequences import SequenceMaker
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Tokens, packed

# Logprobs of prompt tokens and of their alternatives, which are sent in one message
MAX_PROMPT_SCORES = 2**22


class RequestChecks:
    """Finds why a request is refused: it can never run here, or it would wait too long."""

    def __init__(self, spec: RunnerSpec, scheduler: Scheduler, maker: SequenceMaker) -> None:
        self._spec, self._scheduler, self._maker = spec, scheduler, maker
        self._forecast = WaitForecast()

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
        self._forecast.observe(now, self._scheduler.num_waiting, self._scheduler.num_started)

    def again_s(self, tenant: str, priority: int, now: float) -> float:
        """After how many seconds a refused request should come again: when it would have begun, but
        at the latest when all that wait now have begun or were refused.
        """
        ends = [seq.begin_by or seq.deadline or math.inf for seq in self._scheduler.waiting]
        return max(0.0, min(self._wait_s(tenant, priority), max(ends, default=now) - now))

    def _wait_s(self, tenant: str, priority: int) -> float:
        """How long a request would wait for its first step, if it were queued now."""
        waiting, step = self._scheduler.waiting, self._scheduler.step
        return self._forecast.seconds(waiting.num_before(tenant, priority, step))

    def find_wait(self, request: GenerateRequest, now: float) -> EngineError | None:
        """An error if the request would wait longer than it may."""
        longest = self._forecast.seconds(self._scheduler.num_waiting)
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
