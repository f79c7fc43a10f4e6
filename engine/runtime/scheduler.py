"""Decides what each step computes, by continuous batching under one token budget.

Prefill and decode are not separate phases: a row is a slice of any sequence's uncomputed tokens.
Senior sequences get their rows first, and the most junior sequence is preempted first. So a
sequence that is preempted while a step is planned has no row in that step yet. Only `update`
appends tokens, decides stops and removes finished sequences. An error that concerns one sequence
fails only that sequence.
"""

import logging
from collections.abc import Mapping

from msgspec.structs import replace

from engine.core.errors import EngineError, InferenceError
from engine.core.interfaces.request import FinishReason, GenerateRequest, TokenDelta
from engine.runtime.budget import NewTenantReserve, prefill_shares, prompts_due
from engine.runtime.kv_cache import KVCache
from engine.runtime.model_runner import StepOutput
from engine.runtime.outputs import nonfinite, refusal, token_delta, vector_delta
from engine.runtime.radix_cache import Match
from engine.runtime.samplers.prompt_logprobs import has_scored_enough, num_scorable
from engine.runtime.sequence import (
    E,
    Extension,
    Lack,
    Row,
    ScheduledBatch,
    Sequence,
    SequenceFaultError,
)
from engine.runtime.sequence_table import Passing, SequenceTable

log = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over a `KVCache`. Features attach as extensions."""

    def __init__(self, kv: KVCache, max_slots: int, max_step_tokens: int = 2**31 - 1) -> None:
        self.kv = kv
        self.table = SequenceTable(max_slots, kv.block_size)
        self.extensions: tuple[Extension, ...] = ()
        self.advancing: tuple[Extension, ...] = ()  # those that may have work of their own
        self._planning: tuple[Extension, ...] = ()  # those that may change the rows of a step
        self.step = 0  # the number of steps that were planned
        self._max_step_tokens = max_step_tokens
        self._new_tenants = NewTenantReserve()
        self.num_preemptions = self.num_nonfinite = self.num_started = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0

    def attach(self, extension: Extension) -> None:
        """Tell an extension of every sequence from now on."""
        if extension not in self.extensions:
            self.extensions += (extension,)
            self.advancing = Extension.overriding(self.extensions, "advance")
            self._planning = Extension.overriding(self.extensions, "plan")

    def extend(self, seq: Sequence, extension: Extension) -> None:
        """Let an extension shape the rows of a sequence."""
        self.attach(extension)
        seq.extensions += (extension,)

    def find(self, kind: type[E]) -> E | None:
        """The extension of a kind, if it is attached."""
        return kind.among(self.extensions)

    @property
    def has_work(self) -> bool:
        return self.table.has_sequences or any(each.has_work for each in self.advancing)

    def add(
        self, seq: Sequence, request: GenerateRequest, submitted_at: float, queued_at: float
    ) -> None:
        """Queue a sequence. The caller has checked that the sequence fits an empty KV pool."""
        assert self.kv.can_ever_fit(seq.max_len), seq.request_id
        self.table.add(seq, self.step)
        for each in (*self.extensions, *self.kv.extensions):
            each.queued(seq, request, submitted_at, queued_at)
        self.kv.read_ahead(seq)

    def abort(self, request_id: str, choice: int | None, now: float) -> list[TokenDelta]:
        """Abort one choice of a request, or all choices if `choice` is None, in any state. Unknown
        ids are ignored.
        """
        for each in self.extensions:
            each.aborted(request_id)
        return [
            self.finish(seq, "abort", now)
            for seq in self.table.choices(request_id)
            if choice in (None, seq.choice)
        ]

    def fail(self, seq: Sequence, error: EngineError, now: float) -> TokenDelta:
        return self.finish(seq, "error", now, error)

    def finish(
        self, seq: Sequence, reason: FinishReason, now: float, error: EngineError | None = None
    ) -> TokenDelta:
        """Remove a sequence, free its blocks and its slot, and return its final delta."""
        self._leave(seq, reason)
        delta = self._complete(seq, token_delta(seq, (), None, False, error), False, now)
        self.forget(seq)
        return delta

    def forget(self, seq: Sequence) -> None:
        """Let the extensions drop what they know of a sequence that has ended, or that could not
        be queued.
        """
        for each in (*self.extensions, *self.kv.extensions):
            each.ended(seq)

    def rollback(self) -> None:
        """Return to the state after the last finished step. Steps in flight are forgotten, and
        their output must not be applied. Tokens that finished steps have computed are kept.
        """
        for seq in self.table.sequences():
            seq.num_sampling = 0
            seq.num_computed = seq.num_confirmed

    def check(self) -> None:
        """Assert the invariants of queues, slots and memory."""
        self.table.check()
        self.kv.check(self.table.running)
        for each in self.extensions:
            each.check()

    def rebuild(self) -> None:
        """Reset to an empty state in which all blocks and slots are free. Allowed only when no
        sequence runs or waits.
        """
        assert not self.has_work
        self.kv.rebuild()
        self.table.reset()

    def schedule(self, budget: int, now: float, *, pauses: bool = False) -> ScheduledBatch | None:
        """The rows of the next step, with at most `budget` tokens in total. None if no sequence can
        run. With `pauses`, sequences that decode have no rows.
        """
        self.step += 1
        for each in self.extensions:
            each.planned(now)
        table, running = self.table, self.table.running
        budget, kept = self._new_tenants.room(
            budget, table.waiting.tenants() if table.free_slots else (), running
        )
        is_crowded = table.is_crowded(budget)
        prompts, due = prompts_due(running, budget - kept)
        if is_crowded:
            kept = max(kept, (budget - len(running) - sum(due.values())) // 2)
        rows, left = self._schedule_running(budget - kept, prompts, due, pauses=pauses)
        self._schedule_waiting(rows, left + kept, is_crowded)
        if is_crowded:
            self._top_up(rows, budget - sum(row.length for row in rows))
        if pauses and not rows:  # no prompt can be computed now, so that nothing is gained
            rows, _ = self._schedule_running(budget, prompts, due, pauses=False)
        for each in self._planning:
            each.plan(rows, budget)
        return ScheduledBatch(tuple(rows)) if rows else None

    def update(self, batch: ScheduledBatch, output: StepOutput, now: float) -> list[TokenDelta]:
        """Apply the output of a finished step, and return the new deltas. Rows of sequences that
        have ended meanwhile are skipped. If the output of a row cannot be applied, only the
        sequence of that row fails.
        """
        deltas: list[TokenDelta] = []
        next_row, pooled = 0, 0
        if output.captured is not None:
            lost = InferenceError("What this request captured could not be kept.")
            failed = [seq for each in self.extensions for seq in each.captured(batch, output)]
            deltas += [self.fail(seq, lost, now) for seq in failed]
        tokens, finite = output.tokens.tolist(), output.finite.tolist()
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
                causes = [each.nonfinite(seq) for each in seq.extensions]
                error = next((each for each in causes if each is not None), nonfinite())
                deltas.append(self.fail(seq, error, now))
                continue
            try:
                # A `life` of 0 means that the sequence was preempted after this step was launched.
                if num_scored and seq.life in (life, 0):
                    for each in seq.extensions:
                        each.scored(row, output, sample_row - num_scored)
                if draft:
                    deltas += self._take_draft(row, output, sample_row, finite[index], now)
                    continue
                # After a preemption, the computed blocks no longer belong to the sequence.
                if life == seq.life:
                    if seq.num_confirmed < seq.num_prompt:
                        deltas += self._confirm_prompt(seq, start, start + length, samples, now)
                    else:
                        seq.num_confirmed = start + length
                if samples:
                    delta = self._take(seq, output, sample_row, pool, tokens[sample_row], now)
                    if delta is not None:
                        deltas.append(delta)
            except Exception:
                deltas.append(self._fail_row(seq, now))
        return deltas

    def _fail_row(self, seq: Sequence, now: float) -> TokenDelta:
        log.exception("the step output of request %s could not be applied", seq.request_id)
        error = InferenceError("The engine failed on this request.")
        if seq.finish_reason is None:
            return self.fail(seq, error, now)
        # The sequence has already left the queues, but its final delta was not sent.
        self.forget(seq)
        return refusal(seq.request_id, seq.choice, error)

    def retry_row(self, row: Row) -> Row | None:
        """Schedule the same row again after a rollback, but without its draft. Returns None if the
        sequence has ended, has advanced or was preempted meanwhile.
        """
        seq = row.seq
        length = row.length - len(row.draft)
        is_where_it_was = seq.life == row.life and seq.num_computed == row.start
        if not is_where_it_was or row.start + length > len(seq.tokens):
            return None
        return self._grant(seq, length)

    def _top_up(self, rows: list[Row], budget: int) -> None:
        """Make the rows of prompts in progress longer, with what was kept for waiting sequences and
        not used.
        """
        for index, row in enumerate(rows):
            seq, end = row.seq, row.start + row.length
            if budget <= 0:
                return
            if row.samples or seq.extensions:
                continue
            count = min(seq.num_uncomputed, budget, max(0, seq.room - end), self._room(rows))
            count = self.kv.row_length(seq, row.start, row.length + count) - row.length
            if count > 0:
                grown = self._grant(seq, count)
                rows[index] = row._replace(length=row.length + count, samples=grown.samples)
                budget -= count

    def _schedule_running(
        self, budget: int, prompts: list[Sequence], due: Mapping[Sequence, int], *, pauses: bool
    ) -> tuple[list[Row], int]:
        """The rows of running sequences, and what they leave of the budget."""
        rows: list[Row] = []
        running, index = self.table.running, 0
        shares = prefill_shares(prompts, len(running), budget, due) if prompts else {}
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
            if seq.extensions:
                room = self._room(rows) - (len(running) - index)
                count = self._shaped_length(seq, start, count, rows, room)
                if not count:
                    continue
            end = start + count
            if end > seq.room:
                while seq.slot >= 0 and not self._extend(seq, end):
                    self._preempt(running[-1])
                if seq.slot < 0:
                    break
            rows.append(self._grant(seq, count))
            budget -= count
        return rows, budget

    def _schedule_waiting(self, rows: list[Row], budget: int, is_crowded: bool) -> None:
        """Admit waiting sequences, and add their rows. If `is_crowded`, the budget is what was kept
        for prompts that are much shorter than those in progress, and for new tenants.
        """
        table, kv = self.table, self.kv
        if budget <= 0 or not table.free_slots:
            self._block("budget" if table.free_slots else "slots")
            return
        passing = Passing(table.running if is_crowded else ())
        for seq in table.waiting.in_order(self.step):
            if budget <= 0 or not table.free_slots:
                self._block("budget" if table.free_slots else "slots")
                return
            if seq.num_sampling > 0 or table.inflight.is_held(seq):
                continue
            if not table.may_have_slot(seq):
                self._block("slots")
                if not passing.may_pass(seq):
                    return
                continue
            if kv.is_loading(seq):
                self._hold(seq, None)
                continue
            match = kv.no_match if self._starts_over(seq) else kv.match(seq)
            num_matched = len(match.blocks)
            waits = kv.sharing and kv.publishes_at_once and not seq.starts_over
            if waits and table.inflight.hold(seq, num_matched):
                self._hold(seq, seq.queue.held_by)
                continue
            start = num_matched * kv.block_size
            if not passing.may_enter(seq, len(seq.tokens) - start):
                self._block("budget")
                if not passing.may_pass(seq):
                    return
                continue
            count = kv.row_length(seq, start, min(len(seq.tokens) - start, budget))
            if seq.extensions:
                count = self._shaped_length(seq, start, count, rows, self._room(rows))
                if not count:
                    self._block("budget")
                    return
            if not self._admit(seq, match, start + count):
                self._block("blocks")
                if not passing.may_pass(seq, is_blocked=True):
                    return
                continue
            passing.enter(seq)
            rows.append(self._grant(seq, count))
            budget -= count

    def _shaped_length(
        self, seq: Sequence, start: int, count: int, rows: list[Row], room: int
    ) -> int:
        """How many of the next `count` tokens of a sequence with extensions this step computes. At
        most `room`, whatever the budget is.
        """
        is_scoring = seq.is_scoring
        if is_scoring:
            count = min(count, num_scorable(rows))
        for each in seq.extensions:
            count = each.row_length(seq, start, count, room)
        return 0 if is_scoring and has_scored_enough(rows, count) else count

    def _hold(self, seq: Sequence, owner: Sequence | None) -> None:
        for each in self.extensions:
            each.held(seq, owner)

    def _block(self, lack: Lack) -> None:
        for each in self.extensions:
            each.blocked(lack)

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
        """Whether a sequence must not use cached blocks."""
        return seq.starts_over or any(each.starts_over(seq) for each in self.kv.extensions)

    def _admit(self, seq: Sequence, match: Match, num_tokens: int) -> bool:
        reserve = max(len(seq.tokens), seq.max_len if seq.is_pinned else 0)
        try:
            is_admitted = self.kv.admit(seq, match, self.table.num_running, reserve, num_tokens)
        except Exception as error:
            self.kv.release(seq)
            raise SequenceFaultError(seq) from error
        if not is_admitted:
            return False
        self.table.admit(seq, len(match.blocks))
        is_first = not seq.queue.num_preemptions
        uses_cache = self.kv.sharing and not self._starts_over(seq)
        chain = self.table.inflight.chain(seq)
        for each in self.extensions:
            each.admitted(seq, is_first, chain, uses_cache)
        if is_first:
            self.num_started += 1
            seq.num_cached = self.kv.num_reused(seq, min(seq.num_computed, seq.num_prompt))
            self.num_prompt_tokens += seq.num_prompt
            self.num_cached_tokens += seq.num_cached
            self.table.waiting.charge(seq)
        return True

    def _grant(self, seq: Sequence, count: int) -> Row:
        start = seq.num_computed
        samples = start + count == len(seq.tokens) + seq.num_sampling
        for each in self.kv.extensions:
            each.granted(seq, start + count)
        num_scored = count - samples if seq.extensions else 0
        if num_scored and not seq.needs_logits(start, start + num_scored):
            num_scored = 0
        seq.num_computed += count
        seq.num_sampling += samples
        return Row(seq, start, count, samples, seq.slot, seq.life, num_scored)

    def _confirm_prompt(
        self, seq: Sequence, start: int, end: int, samples: bool, now: float
    ) -> list[TokenDelta]:
        """A step has computed prompt tokens. Returns what the client is told of it."""
        seq.num_confirmed = end
        told = [each.confirmed(seq, start, samples, now) for each in self.extensions]
        self.kv.commit(seq)
        if end >= seq.num_prompt:
            self.table.inflight.disown(seq)
        return [delta for delta in told if delta is not None]

    def _take(
        self, seq: Sequence, output: StepOutput, sample_row: int, pool: int, token: int, now: float
    ) -> TokenDelta | None:
        """Apply the result of a row that sampled. The result is a token or, for an embedding
        request, a vector. Returns None if an extension holds the delta back.
        """
        if seq.pools:
            assert output.hidden is not None
            self._leave(seq, "stop")
            return self._end(seq, vector_delta(seq, output.hidden[pool]), True, now)
        tokens, rules = seq.tokens, seq.rules
        num_generated = len(tokens) - seq.num_prompt
        is_stop = token in seq.stop_ids and num_generated >= seq.params.min_tokens
        constraint = None if rules is None else rules.constraint
        if constraint is not None and not constraint.accept(token, is_stop):
            return self.fail(seq, constraint.error, now)
        tokens.append(token)
        self.num_generated_tokens += 1
        if is_stop or (constraint is not None and constraint.is_complete):
            self._leave(seq, "stop")
        elif num_generated + 1 >= seq.max_tokens:
            self._leave(seq, "length")
        is_first = num_generated == seq.queue.num_resumed
        delta = token_delta(seq, (token,), (output, sample_row), is_first)
        if seq.finish_reason is not None:
            return self._end(seq, delta, is_first, now)
        return self._complete(seq, delta, True, now) if is_first else delta

    def _take_draft(
        self, row: Row, output: StepOutput, sample_row: int, is_finite: bool, now: float
    ) -> list[TokenDelta]:
        """Apply the result of a row with a draft: the accepted tokens, and the token after them. If
        the row gave non-finite values, none count: the draft may be the reason.
        """
        seq, draft = row.seq, row.draft
        sampled = output.tokens[sample_row : sample_row + row.length].tolist()
        count = row.num_right(sampled) if is_finite else 0
        for each in self.extensions:
            each.verified(row, count, is_finite)
        num_taken = count + 1 if is_finite else 0
        if seq.life == row.life:
            seq.num_computed -= row.length - num_taken
        deltas: list[TokenDelta] = []
        for index, token in enumerate(sampled[:num_taken]):
            if seq.life == row.life:
                seq.num_confirmed = row.start + 1 + index
            delta = self._take(seq, output, sample_row + index, 0, token, now)
            if delta is not None:
                deltas.append(delta)
            if seq.finish_reason is not None:
                break
        if deltas:
            deltas[0] = replace(deltas[0], num_drafted=len(draft), num_accepted=count)
        return deltas

    def _complete(self, seq: Sequence, delta: TokenDelta, is_first: bool, now: float) -> TokenDelta:
        for each in (*self.extensions, *self.kv.extensions):
            delta = each.complete(seq, delta, is_first, now)
        return delta

    def _end(
        self, seq: Sequence, delta: TokenDelta, is_first: bool, now: float
    ) -> TokenDelta | None:
        """Complete the last delta of a sequence that has left. None if it is held back."""
        delta = self._complete(seq, delta, is_first, now)
        is_held = any(each.holds_back(seq, delta) for each in seq.extensions)
        self.forget(seq)
        return None if is_held else delta

    def _preempt(self, seq: Sequence) -> None:
        """Release everything that the sequence holds and queue it again."""
        for each in self.extensions:
            each.preempted(seq)
        self.kv.release(seq)
        self.table.preempt(seq)
        self.num_preemptions += 1

    def _leave(self, seq: Sequence, reason: FinishReason) -> None:
        is_running = seq.slot >= 0
        self.table.leave(seq, reason)
        if is_running:
            self.kv.release(seq)
