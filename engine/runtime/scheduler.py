"""Decides what each step computes, by continuous batching under one token budget.

Prefill and decode are not separate phases: a row is a slice of any sequence's uncomputed tokens.
Senior sequences get their rows first, and the most junior sequence is preempted first. So a
sequence that is preempted while a step is planned has no row in that step yet. Only `update`
appends tokens, decides stops and removes finished sequences. An error that concerns one sequence
fails only that sequence.
"""

import logging
from bisect import insort
from collections.abc import Mapping

from msgspec.structs import replace

from engine.core.errors import InferenceError
from engine.core.interfaces.request import TokenDelta
from engine.runtime.insight.request_timing import BLOCKS, BUDGET, SLOTS
from engine.runtime.model_runner import StepOutput
from engine.runtime.outputs import (
    nonfinite,
    progress_delta,
    refusal,
    scores,
    token_delta,
    vector_delta,
)
from engine.runtime.queue import Passing, prefill_shares, tenants_due
from engine.runtime.radix_cache import Match
from engine.runtime.requests.images import whole_images
from engine.runtime.samplers.prompt_logprobs import (
    has_scored_enough,
    num_scorable,
)
from engine.runtime.sequence import (
    Row,
    ScheduledBatch,
    Sequence,
    SequenceFaultError,
)
from engine.runtime.sequence_table import SequenceTable

log = logging.getLogger(__name__)


class Scheduler(SequenceTable):
    """Continuous batching over a `KVCache`."""

    def schedule(self, budget: int, now: float, *, pauses: bool = False) -> ScheduledBatch | None:
        """The rows of the next step, with at most `budget` tokens in total. None if no sequence can
        run. With `pauses`, sequences that decode have no rows.
        """
        self._step += 1
        self.clock.plan(now)
        budget, kept = self._new_tenants.room(
            budget, self._waiting.tenants() if self._free_slots else (), self._running
        )
        is_crowded = self._is_crowded(budget)
        due = tenants_due(self._running, budget - kept)
        if is_crowded:
            kept = max(kept, (budget - len(self._running) - sum(due.values())) // 2)
        rows = self._schedule_running(budget - kept, due, pauses=pauses)
        self._schedule_waiting(rows, budget - sum(row.length for row in rows), now, is_crowded)
        if is_crowded:
            self._top_up(rows, budget - sum(row.length for row in rows))
        if pauses and not rows:  # no prompt can be computed now, so that nothing is gained
            rows = self._schedule_running(budget, due, pauses=False)
        num_drafting, draft_s = 0, 0.0
        if self.speculation is not None:
            num_drafting = self.speculation.add_drafts(rows, budget - sum(r.length for r in rows))
            draft_s = self.speculation.draft_s
        if self.has_adapters:  # rows with the same adapter are computed together
            rows.sort(key=lambda row: row.seq.adapter)
        return ScheduledBatch(tuple(rows), num_drafting, draft_s) if rows else None

    def update(self, batch: ScheduledBatch, output: StepOutput, now: float) -> list[TokenDelta]:
        """Apply the output of a finished step, and return the new deltas. Rows of sequences that
        have ended meanwhile are skipped. If the output of a row cannot be applied, only the
        sequence of that row fails.
        """
        deltas, next_row, pooled = [], 0, 0
        if output.captured is not None:
            from engine.runtime.interp.steps import take_captures

            lost = InferenceError("What this request captured could not be kept.")
            deltas += [self.fail(seq, lost, now) for seq in take_captures(batch, output)]
        tokens = output.tokens.tolist()
        finite = output.finite.tolist()
        for index, row in enumerate(batch.rows):
            seq, start, length, samples, _, life, num_scored, draft = row
            sample_row, pool = next_row + num_scored, pooled
            next_row = sample_row + samples + len(draft)
            pooled += samples and seq.pools
            if seq.finish_reason is not None:
                continue
            seq.num_sampling -= samples
            if not finite[index] and not draft:
                self.num_nonfinite += 1
                deltas.append(self.fail(seq, nonfinite(seq), now))
                continue
            try:
                # A `life` of 0 means that the sequence was preempted after this step was launched.
                if num_scored and seq.lacks_scores and seq.life in (life, 0):
                    self._add_scores(row, output, sample_row - num_scored)
                if draft:
                    deltas += self._take_draft(row, output, sample_row, finite[index], now)
                    continue
                # After a preemption, the computed blocks no longer belong to the sequence.
                if life == seq.life:
                    if seq.num_confirmed < seq.num_prompt:
                        self._confirm_prompt(seq, start, start + length)
                        if seq.reports_progress and not samples:
                            deltas.append(progress_delta(seq, now))
                    else:
                        seq.num_confirmed = start + length
                if samples:
                    delta = self._take(seq, output, sample_row, pool, tokens[sample_row], now)
                    if not self._is_held(seq, delta):
                        deltas.append(delta)
            except Exception:
                deltas.append(self._fail_row(seq, now))
        return deltas

    def _add_scores(self, row: Row, output: StepOutput, first_row: int) -> None:
        """Add the logprobs of prompt tokens that a row computed. Rows may go beyond the prompt."""
        seq = row.seq
        count = min(row.num_scored, seq.num_prompt - 1 - row.start)
        if count > 0:
            seq.prompt_scores += scores(seq, output, first_row, first_row + count)

    def _fail_row(self, seq: Sequence, now: float) -> TokenDelta:
        log.exception("the step output of request %s could not be applied", seq.request_id)
        error = InferenceError("The engine failed on this request.")
        if seq.finish_reason is None:
            return self.fail(seq, error, now)
        # The sequence has already left the queues, but its final delta was not sent.
        return refusal(seq.request_id, seq.choice, error)

    def retry_row(self, row: Row) -> Row | None:
        """Schedule the same row again after a rollback, but without its draft. Returns None if the
        sequence has ended, has advanced or was preempted meanwhile.
        """
        seq = row.seq
        if seq.life != row.life:
            return None
        length = row.length - len(row.draft)
        if seq.num_computed != row.start or row.start + length > len(seq.tokens):
            return None
        return self._grant(seq, length)

    def _is_crowded(self, budget: int) -> bool:
        """Whether prompts in progress could use up the whole budget, so that none of it would be
        left for waiting sequences.
        """
        if not self._free_slots or not len(self._waiting):
            return False
        return sum(seq.num_uncomputed for seq in self._running) >= budget

    def _top_up(self, rows: list[Row], budget: int) -> None:
        """Make the rows of prompts in progress longer, with what was kept for waiting sequences and
        not used.
        """
        for index, row in enumerate(rows):
            seq, end = row.seq, row.start + row.length
            if budget <= 0:
                return
            if row.samples or seq.is_scoring or seq.images:
                continue
            count = min(seq.num_uncomputed, budget, max(0, seq.room - end), self._room(rows))
            count = self.kv.row_length(seq, row.start, row.length + count) - row.length
            if count > 0:
                grown = self._grant(seq, count)
                rows[index] = row._replace(length=row.length + count, samples=grown.samples)
                budget -= count

    def _schedule_running(
        self, budget: int, due: Mapping[Sequence, int], *, pauses: bool
    ) -> list[Row]:
        rows: list[Row] = []
        running, index = self._running, 0
        shares = prefill_shares(running, budget, due)
        new_row = tuple.__new__  # the fastest way to build a named tuple
        while index < len(running):
            seq = running[index]
            index += 1
            ahead = len(seq.tokens) + seq.num_sampling
            start = seq.num_computed
            end = seq.num_prompt + seq.max_tokens
            if pauses and start >= seq.num_prompt:
                continue
            if ahead == start + 1 and ahead < end and start < seq.room:
                # The fast path for most rows of most steps: decode one token whose block has room.
                seq.num_computed = ahead
                seq.num_sampling += 1
                rows.append(new_row(Row, (seq, start, 1, True, seq.slot, seq.life, 0, ())))
                budget -= 1
                continue
            if ahead >= end or ahead <= start:
                continue  # the sequence's last token is being sampled, or a draft is verified
            # Leave one token of the budget to each later row, so that every running sequence gets a
            # row.
            count = min(ahead - start, budget - (len(running) - index))
            if shares:
                count = min(count, shares.get(seq, count))
            count = self.kv.row_length(seq, start, count)
            if seq.probe is not None:
                count = min(count, seq.probe.max_row)
            if seq.is_scoring:
                count = min(count, num_scorable(rows))
            if seq.images:
                later = len(running) - index
                count = whole_images(seq.images, start, count, self._room(rows) - later)
                if not count or (seq.is_scoring and has_scored_enough(rows, count)):
                    continue
            end = start + count
            if end > seq.room:
                while seq.slot >= 0 and not self._extend(seq, end):
                    self._preempt(running[-1])
                if seq.slot < 0:
                    break
            rows.append(self._grant(seq, count))
            budget -= count
        return rows

    def _schedule_waiting(self, rows: list[Row], budget: int, now: float, is_crowded: bool) -> None:
        """Admit waiting sequences, and add their rows. If `is_crowded`, the budget is what was kept
        for prompts that are much shorter than those in progress, and for new_tenants.
        """
        if budget <= 0 or not self._free_slots:
            self.clock.block(BUDGET if self._free_slots else SLOTS)
            return
        passing = Passing(self._running if is_crowded else ())
        for seq in self._waiting.in_order(self._step):
            if budget <= 0 or not self._free_slots:
                self.clock.block(BUDGET if self._free_slots else SLOTS)
                return
            if seq.num_sampling > 0 or self._inflight.is_held(seq):
                continue
            if not self._may_have_slot(seq):
                self.clock.block(SLOTS)
                if not passing.may_pass(seq):
                    return
                continue
            watch = seq.watch
            assert watch is not None, seq.request_id
            if self.kv.is_loading(seq):
                watch.load()
                continue
            match = self.kv.no_match if self._starts_over(seq) else self.kv.match(seq)
            num_matched = len(match.blocks)
            # Blocks that a running sequence publishes are of no use without a checkpoint.
            waits = self.kv.sharing and self.kv.states is None and not seq.starts_over
            if waits and self._inflight.hold(seq, num_matched):
                watch.hold(seq.held_by)
                continue
            max_tokens = min(budget, num_scorable(rows)) if seq.is_scoring else budget
            if seq.probe is not None:
                max_tokens = min(max_tokens, seq.probe.max_row)
            start = num_matched * self.kv.block_size
            if not passing.may_enter(seq, len(seq.tokens) - start):
                self.clock.block(BUDGET)
                if not passing.may_pass(seq):
                    return
                continue
            count = self.kv.row_length(seq, start, min(len(seq.tokens) - start, max_tokens))
            if seq.images:
                count = whole_images(seq.images, start, count, self._room(rows))
                if not count or (seq.is_scoring and has_scored_enough(rows, count)):
                    self.clock.block(BUDGET)
                    return
            if not self._admit(seq, match, start + count, now):
                self.clock.block(BLOCKS)
                if not passing.may_pass(seq, is_blocked=True):
                    return
                continue
            passing.enter(seq)
            rows.append(self._grant(seq, count))
            budget -= count

    def _may_have_slot(self, seq: Sequence) -> bool:
        """Whether a sequence may have one of the free slots. The last one is for a tenant without
        running sequences, unless all requests are of one tenant.
        """
        if len(self._free_slots) > 1 or self._max_slots == 1 or not seq.tenant:
            return True
        return all(each.tenant != seq.tenant for each in self._running)

    def _room(self, rows: list[Row]) -> int:
        """How many tokens one more row can have at most, whatever the budget is."""
        left = self._max_step_tokens - sum(row.length for row in rows)
        return min(left, self.kv.max_row)

    def _extend(self, seq: Sequence, num_tokens: int) -> bool:
        try:
            return self.kv.extend(seq, num_tokens)
        except Exception as error:
            raise SequenceFaultError(seq) from error

    def _starts_over(self, seq: Sequence) -> bool:
        """Whether a sequence must not use cached blocks. A pinned sequence must not share windowed
        blocks: if others hold them too, it can't count on the blocks that its window leaves.
        """
        return seq.starts_over or (self.kv.windows is not None and seq.is_pinned)

    def _admit(self, seq: Sequence, match: Match, num_tokens: int, now: float) -> bool:
        reserve = len(seq.tokens)
        if seq.is_pinned:
            reserve = max(reserve, seq.max_len)
        try:
            is_admitted = self.kv.admit(seq, match, len(self._running), reserve, num_tokens)
        except Exception as error:
            self.kv.release(seq)
            raise SequenceFaultError(seq) from error
        if not is_admitted:
            return False
        self._waiting.remove(seq)
        self._num_admissions += 1
        seq.slot, seq.life = self._free_slots.pop(), self._num_admissions
        seq.needs_history = True
        if seq.lacks_scores:
            seq.prompt_scores.clear()  # a preemption discarded that work, so scoring starts over
        insort(self._running, seq, key=lambda s: s.seniority)
        self._inflight.own(seq, len(match.blocks))
        assert seq.watch is not None, seq.request_id
        seq.watch.admit(seq)
        if seq.started_at is None:
            is_cache_off = not self.kv.sharing or self._starts_over(seq)
            seq.watch.look_up(seq, self.kv, self._inflight.chain(seq), is_cache_off)
            seq.started_at = now
            # If its first step samples a token, that token says the same.
            if seq.tells_begin and num_tokens < len(seq.tokens):
                self.begun.append(seq)
            self.num_started += 1
            seq.num_cached = seq.num_reused(min(seq.num_computed, seq.num_prompt))
            self.num_prompt_tokens += seq.num_prompt
            self.num_cached_tokens += seq.num_cached
            self._waiting.charge(seq)
        return True

    def _grant(self, seq: Sequence, count: int) -> Row:
        start = seq.num_computed
        samples = start + count == len(seq.tokens) + seq.num_sampling
        if self.kv.states is not None:
            self.kv.states.reserve(seq, start + count)
        num_scored = count - samples
        if num_scored and not seq.needs_logits(start, start + num_scored):
            num_scored = 0
        seq.num_computed += count
        seq.num_sampling += samples
        return Row(seq, start, count, samples, seq.slot, seq.life, num_scored)

    def _confirm_prompt(self, seq: Sequence, start: int, num_confirmed: int) -> None:
        seq.num_confirmed = num_confirmed
        if seq.watch is not None:
            seq.watch.chunk(start, num_confirmed - start)
        self.kv.commit(seq)
        if num_confirmed >= seq.num_prompt:
            self._inflight.disown(seq)

    def _take(
        self, seq: Sequence, output: StepOutput, sample_row: int, pool: int, token: int, now: float
    ) -> TokenDelta:
        """Apply the result of a row that sampled. The result is a token or, for an embedding
        request, a vector.
        """
        if seq.pools:
            assert output.hidden is not None
            self._leave(seq, "stop")
            return vector_delta(seq, output.hidden[pool], now)
        is_stop = token in seq.stop_ids and seq.num_generated >= seq.params.min_tokens
        constraint = seq.constraint
        if constraint is not None and not constraint.accept(token, is_stop):
            return self.fail(seq, constraint.error, now)
        self._append(seq, token, is_stop)
        return token_delta(seq, (token,), (output, sample_row), now)

    def _take_draft(
        self, row: Row, output: StepOutput, sample_row: int, is_finite: bool, now: float
    ) -> list[TokenDelta]:
        """Apply the result of a row with a draft: the accepted tokens, and the token after them."""
        assert self.speculation is not None
        seq, deltas = row.seq, []
        sampled = output.tokens[sample_row : sample_row + row.length].tolist()
        accepted = self.speculation.accept(row, sampled, is_finite)
        for index, token in enumerate(accepted):
            if seq.life == row.life:
                seq.num_confirmed = row.start + 1 + index
            deltas.append(self._take(seq, output, sample_row + index, 0, token, now))
            if seq.finish_reason is not None:
                break
        if deltas:
            counts = {"num_drafted": len(row.draft), "num_accepted": len(accepted) - 1}
            deltas[0] = replace(deltas[0], **counts)
        return deltas

    def _append(self, seq: Sequence, token: int, is_stop: bool) -> None:
        tokens, constraint = seq.tokens, seq.constraint
        tokens.append(token)
        self.num_generated_tokens += 1
        if is_stop or (constraint is not None and constraint.is_complete):
            self._leave(seq, "stop")
        elif len(tokens) >= seq.num_prompt + seq.max_tokens:
            self._leave(seq, "length")
