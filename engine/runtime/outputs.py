"""Builds the `TokenDelta` messages that the engine sends to the frontend, and its counters. Also
builds a `StepOutput` from the arrays of a runner.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.core.errors import (
    EngineError,
    InferenceError,
    RateLimitError,
    RequestTimeoutError,
)
from engine.core.interfaces.request import GenerateRequest, TokenDelta, TokenLogprobs
from engine.core.interfaces.stats import EngineStats, StepCounts
from engine.ipc.transport import failed_delta
from engine.runtime.model_runner import F32, I32, Bools, SamplingInputs, StepOutput
from engine.runtime.sequence import Extension, Sequence

if TYPE_CHECKING:
    from engine.runtime.scheduler import Scheduler


def token_delta(
    seq: Sequence,
    tokens: tuple[int, ...],
    sampled: tuple[StepOutput, int] | None,
    is_first: bool,
    error: EngineError | None = None,
) -> TokenDelta:
    """The message for newly sampled tokens. If `tokens` is empty, the message only says how the
    sequence ended.

    `sampled` is the output of the step and the index of the sequence's row in it. The first message
    of a sequence also has the number of cached prompt tokens. Extensions complete the first message
    and the last one.
    """
    rules = seq.rules
    limits = None if rules is None else rules.surprise_limits
    if seq.params.logprobs is None and not limits and not is_first and seq.finish_reason is None:
        return TokenDelta(seq.request_id, seq.choice, tokens)
    ended_by_id = seq.finish_reason == "stop" and bool(tokens) and tokens[-1] in seq.stop_ids
    return TokenDelta(
        seq.request_id,
        seq.choice,
        tokens,
        logprobs=_logprobs(seq, sampled),
        finish_reason=seq.finish_reason,
        stop_token_id=tokens[-1] if ended_by_id else None,
        num_cached=seq.num_cached if is_first else 0,
        error_code=error.error_code if error else None,
        error_message=error.message if error else None,
        retry_after=error.retry_after if error else None,
        # The next token's limit may be known already, if its step was launched.
        surprise_limit=limits[seq.num_generated - 1] if tokens and limits else None,
    )


class Progress(Extension):
    """Tells clients that ask for it when their request begins, and how much of the prompt each step
    has computed.
    """

    def __init__(self) -> None:
        self._reporting: dict[Sequence, float] = {}  # when each has begun
        self._telling: set[Sequence] = set()
        self._begun: list[Sequence] = []
        self._now = 0.0

    def planned(self, now: float) -> None:
        self._now = now

    def queued(
        self, seq: Sequence, request: GenerateRequest, submitted_at: float, queued_at: float
    ) -> None:
        if request.reports_progress and seq.choice == 0:
            self._reporting[seq] = queued_at
        if request.tells_begin and seq.choice == 0:
            self._telling.add(seq)

    def admitted(self, seq: Sequence, is_first: bool, chain: list[int], uses_cache: bool) -> None:
        if is_first and seq in self._telling:
            self._begun.append(seq)
        if is_first and seq in self._reporting:
            self._reporting[seq] = self._now

    def confirmed(self, seq: Sequence, start: int, samples: bool, now: float) -> TokenDelta | None:
        if samples or seq not in self._reporting:
            return None
        return TokenDelta(
            seq.request_id,
            seq.choice,
            num_cached=seq.num_cached,
            prefill_s=now - self._reporting[seq],
            num_processed=seq.num_confirmed,
        )

    def ended(self, seq: Sequence) -> None:
        self._reporting.pop(seq, None)
        self._telling.discard(seq)

    def take_begun(self) -> list[TokenDelta]:
        """Messages that the first steps of requests start. If such a step samples a token, the
        token says the same.
        """
        if not self._begun:
            return []
        begun, self._begun = self._begun, []
        told = [seq for seq in begun if seq.finish_reason is None and not seq.num_sampling]
        return [TokenDelta(seq.request_id, seq.choice, begins=True) for seq in told]


def vector_delta(seq: Sequence, hidden: F32) -> TokenDelta:
    """The message with the embedding `hidden`. It is the only message of an embedding request."""
    return TokenDelta(
        seq.request_id,
        seq.choice,
        finish_reason="stop",
        num_cached=seq.num_cached,
        vector=hidden.astype(np.float32).tobytes(),
    )


def scores(seq: Sequence, output: StepOutput, start: int, end: int) -> list[TokenLogprobs]:
    """Prompt logprobs from rows `start` to `end` of a step's output."""
    num_top = seq.params.num_prompt_logprobs
    return [_row_logprobs(output, row, num_top) for row in range(start, end)]


def _logprobs(
    seq: Sequence, sampled: tuple[StepOutput, int] | None
) -> tuple[TokenLogprobs, ...] | None:
    wanted = seq.params.logprobs
    if wanted is None or sampled is None:
        return None
    output, row = sampled
    if seq.params.logprob_token_ids:
        return (_named_logprobs(output, row, seq.params.logprob_token_ids),)
    return (_row_logprobs(output, row, wanted),)


def _row_logprobs(output: StepOutput, row: int, num_top: int) -> TokenLogprobs:
    assert output.logprobs is not None
    if not num_top:
        return TokenLogprobs(float(output.logprobs[row]))
    assert output.top_ids is not None and output.top_logprobs is not None
    return TokenLogprobs(
        float(output.logprobs[row]),
        tuple(output.top_ids[row, :num_top].tolist()),
        tuple(output.top_logprobs[row, :num_top].tolist()),
    )


def _named_logprobs(output: StepOutput, row: int, token_ids: tuple[int, ...]) -> TokenLogprobs:
    """The logprobs of given tokens and of the sampled one. The output has those of all tokens."""
    assert output.logprobs is not None
    assert output.top_ids is not None and output.top_logprobs is not None
    wanted = np.isin(output.top_ids[row], (*token_ids, int(output.tokens[row])))
    return TokenLogprobs(
        float(output.logprobs[row]),
        tuple(output.top_ids[row][wanted].tolist()),
        tuple(output.top_logprobs[row][wanted].tolist()),
    )


def refusal(request_id: str, choice: int, error: EngineError) -> TokenDelta:
    """The message for a choice that fails without a sequence, because it was refused or because its
    result could not be applied. It is the last message of the choice.
    """
    return failed_delta(request_id, choice, error)


def too_late(is_over: bool, waited_s: float) -> EngineError:
    """The error for a request that passed its deadline (`is_over`) or that waited too long to be
    admitted (not `is_over`). The next one would wait as long.
    """
    if is_over:
        return RequestTimeoutError("The request's time limit passed before it was done.")
    return RateLimitError(
        f"The request waited {waited_s:.0f} s and could not begin; try again later.",
        retry_after=waited_s,
    )


def nonfinite() -> EngineError:
    """The error for a request whose logits are not numbers."""
    return InferenceError("The model produced non-finite values for this request.")


class Sampled(NamedTuple):
    """The results of a sampler, as arrays of any array library. The last three fields are None if
    no row requested logprobs.
    """

    tokens: Any  # (R,) integers
    logprobs: Any = None  # (R,)
    top_ids: Any = None  # (R, K)
    top_logprobs: Any = None  # (R, K)


def step_output(
    sampled: Sampled | None,
    hidden: F32 | None,
    finite: Bools,
    query_start: I32,
    sampling: SamplingInputs,
) -> StepOutput:
    """Build a `StepOutput` from numpy arrays that may be padded, and cut off the padding.

    The arrays in `sampled` may have more than R rows and more than K alternatives. `sampled` is
    None if no row samples. `finite` has an entry for each token, and maybe more entries. `hidden`
    (R, D) has all rows that sample, of which only the requested rows are returned.
    """
    of_rows = np.logical_and.reduceat(finite[: query_start[-1]], query_start[:-1])
    count = len(sampling.slots)
    if sampled is None:
        return StepOutput(np.empty(0, np.int32), of_rows)
    tokens = sampled.tokens[:count]
    wanted = None if hidden is None else hidden[sampling.hidden_rows]
    if sampled.logprobs is None:
        return StepOutput(tokens, of_rows, hidden=wanted)
    num_top = int(sampling.num_logprobs.max())
    return StepOutput(
        tokens,
        of_rows,
        sampled.logprobs[:count],
        sampled.top_ids[:count, :num_top],
        sampled.top_logprobs[:count, :num_top],
        wanted,
    )


def engine_stats(
    scheduler: "Scheduler", num_steps: int, num_invariant_failures: int, steps: StepCounts
) -> EngineStats:
    """The counters that the engine sends to the frontend."""
    kv, table, pool = scheduler.kv, scheduler.table, scheduler.kv.pool
    stats = EngineStats(
        num_running=table.num_running,
        num_waiting=table.num_waiting,
        num_blocks=pool.num_usable,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_referenced_blocks=pool.num_referenced,
        block_size=kv.block_size,
        num_steps=num_steps,
        prompt_tokens=scheduler.num_prompt_tokens,
        cached_tokens=scheduler.num_cached_tokens,
        generated_tokens=scheduler.num_generated_tokens,
        prefix_queries=kv.num_queried,
        prefix_hits=kv.num_hit,
        num_preemptions=scheduler.num_preemptions,
        num_evictions=kv.radix.num_evicted,
        num_nonfinite=scheduler.num_nonfinite,
        num_invariant_failures=num_invariant_failures,
        steps=steps,
    )
    for each in (*scheduler.extensions, *kv.extensions):
        stats = each.add_stats(stats)
    return stats
