"""Computes the logprobs of prompt tokens. At a prompt position, the next token is already known, so
the sampler must return that token with its logprob (a forced row).

A forced row goes through the sampler like any other row. Its penalties and its temperature are off.
"""

from dataclasses import replace

import numpy as np
from msgspec import structs

from engine.core.interfaces.request import TokenDelta, TokenLogprobs
from engine.runtime.model_runner import I32, MAX_SCORED, SAMPLE, SamplingInputs, StepOutput
from engine.runtime.outputs import scores
from engine.runtime.sequence import Extension, Row, ScheduledBatch, Sequence

# Sampling parameters of a forced row. Parameters that are not listed here keep the value of the
# row's request.
_NEUTRAL = {"temperature": 0, "repetition": 1, "presence": 0, "frequency": 0}
_PER_ROW = ("top_k", "top_p", "min_p", "seed", "choice", "position", "num_logprobs")


class PromptScores(Extension):
    """The logprobs of prompt tokens, for sequences that want them. Every prompt position must be
    computed for them, so the prefix cache can't be used until all are known.
    """

    def __init__(self) -> None:
        # The logprobs that are computed so far. They start with the second token.
        self.of: dict[Sequence, list[TokenLogprobs]] = {}

    def begin(self, seq: Sequence) -> None:
        self.of[seq] = []

    def ended(self, seq: Sequence) -> None:
        self.of.pop(seq, None)

    def starts_over(self, seq: Sequence) -> bool:
        return len(self.of[seq]) < seq.num_prompt - 1

    def needs_logits(self, seq: Sequence, start: int, end: int) -> bool:
        return start < seq.num_prompt and self.starts_over(seq)

    def admitted(self, seq: Sequence, is_first: bool, chain: list[int], uses_cache: bool) -> None:
        if seq in self.of and self.starts_over(seq):
            self.of[seq].clear()  # a preemption discarded that work, so scoring starts over

    def scored(self, row: Row, output: StepOutput, first: int) -> None:
        """Add the logprobs of prompt tokens that a row computed. Rows may go beyond the prompt."""
        seq = row.seq
        count = min(row.num_scored, seq.num_prompt - 1 - row.start)
        if count > 0 and self.starts_over(seq):
            self.of[seq] += scores(seq, output, first, first + count)

    def complete(self, seq: Sequence, delta: TokenDelta, is_first: bool, now: float) -> TokenDelta:
        if not is_first or seq not in self.of:
            return delta
        return structs.replace(delta, prompt_logprobs=tuple(self.of[seq]))


def with_scores(sampling: SamplingInputs, batch: ScheduledBatch) -> SamplingInputs:
    """Add the forced rows to the sampling inputs.

    `sampling` has only the rows that sample. The result has a row for each entry of
    `BatchInputs.logit_rows`, in that order.
    """
    forced, owner, place = _layout(batch)
    is_forced = forced != SAMPLE
    # A forced row copies the parameters of its sequence's sampling row. A sequence in mid-prefill
    # has no sampling row. Then any other row will do, because the parameters that matter are set
    # below.
    source = np.maximum(place, 0)
    fields = {name: getattr(sampling, name) for name in (*_NEUTRAL, *_PER_ROW)}
    if not len(sampling.slots):
        fields = {name: np.zeros(1, values.dtype) for name, values in fields.items()}
    grown = {name: values[source] for name, values in fields.items()}
    for name, value in _NEUTRAL.items():
        grown[name] = np.where(is_forced, value, grown[name]).astype(grown[name].dtype)
    rows = batch.rows
    grown["slots"] = np.array([rows[index].slot for index in owner], np.int32)
    asked = np.array([rows[index].seq.params.num_prompt_logprobs for index in owner], np.int32)
    grown["num_logprobs"] = np.where(is_forced, asked, grown["num_logprobs"]).astype(np.int32)
    where = np.flatnonzero(~is_forced).astype(np.int32)  # index of each sampling row in the result
    mask = sampling.mask
    if mask is not None:
        wide = np.full((len(forced), mask.shape[1]), 0xFFFFFFFF, np.uint32)
        wide[where] = mask
        mask = wide
    return replace(
        sampling,
        **grown,
        sample_rows=owner,
        forced=forced,
        mask=mask,
        bias_rows=where[sampling.bias_rows],
        hidden_rows=where[sampling.hidden_rows],
        host_rows=where[sampling.host_rows],
    )


def _layout(batch: ScheduledBatch) -> tuple[I32, I32, I32]:
    """Three arrays with an entry for each row of logits. The first has the forced token, or SAMPLE.
    The second has the index of the row in the batch. The third has the index of its sequence among
    the rows that sample, or -1 if the sequence does not sample.
    """
    forced: list[int] = []
    owner: list[int] = []
    place: list[int] = []
    num_sampling = 0
    for index, row in enumerate(batch.rows):
        if row.num_scored:
            forced += row.seq.known_ids(row.start + 1, row.start + 1 + row.num_scored)
        if row.samples:
            forced.append(SAMPLE)
        count = row.num_scored + row.samples
        owner += [index] * count
        place += [num_sampling if row.samples else -1] * count
        num_sampling += row.samples
    return (np.array(forced, np.int32), np.array(owner, np.int32), np.array(place, np.int32))


def num_scorable(rows: list[Row]) -> int:
    """For how many prompt tokens one more row of this step may compute logprobs. The result is at
    least 1, so that every sequence makes progress.
    """
    return max(1, MAX_SCORED - sum(row.num_scored for row in rows))


def has_scored_enough(rows: list[Row], count: int) -> bool:
    """Whether `count` more logprobs must wait for a later step. A row with an image whose tokens
    are computed together may need more than a step usually has room for, but only one such row.
    """
    return count > num_scorable(rows) and any(row.num_scored for row in rows)
