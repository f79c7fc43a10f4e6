"""Measures what sequences wait for and what their steps do, at a cost that does not grow with the
number of sequences.

The `EngineClock` adds up the seconds of all steps by kind, and the seconds of the waiting queue by
what stopped it. A `RequestTiming` reads the clock when its sequence is queued, scheduled, decoded
and ended. The differences belong to the sequence.
"""

from bisect import bisect_left
from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from engine.core.interfaces.request import GenerateRequest, TokenDelta
from engine.core.interfaces.timeline import (
    BATCH_EDGES,
    MAX_CHUNKS,
    MAX_PAUSES,
    WAITS,
    DecodeWork,
    Pause,
    PrefillChunk,
    PromptDivergence,
    Timeline,
)
from engine.runtime.sequence import Extension, Lack

if TYPE_CHECKING:
    from engine.runtime.kv_cache import KVCache
    from engine.runtime.scheduler import Scheduler
    from engine.runtime.sequence import Sequence, Tokens

STEP, SLOTS, BUDGET, BLOCKS, TURN, PRIORITY, PREFIX, TIER = range(len(WAITS))
LACKS: dict[Lack, int] = {"slots": SLOTS, "budget": BUDGET, "blocks": BLOCKS}
# A sequence looks among this many latest admissions for sequences that overtook it.
MAX_ADMISSIONS = 256
MAX_STEPS = 128
# Hashes of recently computed prompt blocks to keep. They tell evicted prefixes from new ones.
MAX_SEEN = 16384
SHOWN_TOKENS = 8  # tokens of a prompt that a `PromptDivergence` shows
MAX_BRANCHES = 64  # branches of a node in which the nearest prefix is searched


def _summed(one: DecodeWork, other: DecodeWork, sign: int = 1) -> DecodeWork:
    """The sum of two works, or their difference with `sign` -1."""
    by_rows = zip_longest(one.by_rows, other.by_rows, fillvalue=0)
    return DecodeWork(
        one.num_steps + sign * other.num_steps,
        one.num_rows + sign * other.num_rows,
        one.seconds + sign * other.seconds,
        one.num_mixed + sign * other.num_mixed,
        one.mixed_s + sign * other.mixed_s,
        one.mask_s + sign * other.mask_s,
        tuple(a + sign * b for a, b in by_rows),
    )


class AdmissionRecord(NamedTuple):
    arrival: int
    tenant: str
    priority: int
    at: float
    waits: tuple[float, ...]


class StepRecord(NamedTuple):
    began_at: float
    ended_at: float
    num_rows: int
    num_tokens: int
    num_prompt_tokens: int


class EngineClock:
    """Totals over all steps of an engine, and over the time in which sequences waited."""

    def __init__(self) -> None:
        self._waits = [0.0] * len(WAITS)
        self._blocked_by = STEP
        self._since: float | None = None  # up to when `_waits` is counted
        self.now = 0.0  # when the current step was planned
        self.admissions: deque[AdmissionRecord] = deque(maxlen=MAX_ADMISSIONS)
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._seen: dict[int, None] = {}
        self._num_steps = self._num_rows = self._num_mixed = 0
        self._seconds = self._mixed_s = self._mask_s = 0.0
        self._by_rows = [0] * (len(BATCH_EDGES) + 1)

    def plan(self, now: float) -> None:
        """A step is planned. Unless `block` is called, nothing but the step delays the queue."""
        self._count(now)
        self.now = now
        self._blocked_by = STEP

    def block(self, reason: int) -> None:
        """The rest of the queue can't be scheduled in this step, because of `reason`."""
        self._blocked_by = reason

    @property
    def blocked_by(self) -> str:
        return WAITS[self._blocked_by]

    def waits(self, now: float) -> tuple[float, ...]:
        """The seconds that the queue has waited until now, by reason. They are counted from the
        first call on.
        """
        if self._since is None:
            self._since = now
        waits = list(self._waits)
        if now > self._since:
            waits[self._blocked_by] += now - self._since
        return tuple(waits)

    def masked(self, seconds: float) -> None:
        """A step waited this long for grammar masks."""
        self._mask_s += seconds

    def step(self, began_at: float, now: float, lengths: list[int], num_drafting: int = 0) -> None:
        """A step has ended. `lengths` are the numbers of tokens of its rows. `num_drafting` of all
        tokens are in rows with drafts.
        """
        num_rows, num_tokens = len(lengths), sum(lengths)
        num_prompt = num_tokens - lengths.count(1) - num_drafting
        seconds = now - began_at
        self._num_steps += 1
        self._num_rows += num_rows
        self._seconds += seconds
        if num_prompt:
            self._num_mixed += 1
            self._mixed_s += seconds
        self._by_rows[bisect_left(BATCH_EDGES, num_rows)] += 1
        self.steps.append(StepRecord(began_at, now, num_rows, num_tokens, num_prompt))

    def work(self) -> DecodeWork:
        """The totals of all steps so far."""
        return DecodeWork(
            self._num_steps,
            self._num_rows,
            self._seconds,
            self._num_mixed,
            self._mixed_s,
            self._mask_s,
            tuple(self._by_rows),
        )

    def num_seen(self, chain: list[int], first: int) -> int:
        """How many blocks of a prompt, from block `first` on, were computed before. `chain` are the
        hashes of its blocks, which are remembered.
        """
        seen, count = self._seen, first
        while count < len(chain) and chain[count] in seen:
            count += 1
        for key in chain:
            seen.pop(key, None)  # so that it moves to the end
            seen[key] = None
        while len(seen) > MAX_SEEN:
            del seen[next(iter(seen))]
        return count - first

    def _count(self, now: float) -> None:
        if self._since is not None:
            self._waits[self._blocked_by] += now - self._since
        self._since = now


class RequestTiming:
    """The times of one sequence."""

    __slots__ = (
        "_admitted",
        "_base",
        "_chunks",
        "_clock",
        "_decoding",
        "_leader",
        "_led_since",
        "_loading_at",
        "_num_before",
        "_paused_work",
        "_pauses",
        "_preempted",
        "_prompt_done",
        "divergence",
        "is_cache_off",
        "first_token_at",
        "num_evicted",
        "queued_at",
        "started_at",
        "submitted_at",
    )

    def __init__(
        self,
        clock: EngineClock,
        num_before: int,
        now: float,
        leader: "RequestTiming | None",
        submitted_at: float = 0.0,
    ) -> None:
        """`leader` is that of a running sequence that computes the same prefix, if there is one.
        `now` is when its grammar was compiled and its images were encoded.
        """
        self.submitted_at = submitted_at
        self.queued_at = now
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self._clock = clock
        self._num_before = num_before
        self._base = clock.waits(now)
        self._leader = leader
        self._led_since = self._base
        self._loading_at: float | None = None
        self._admitted: tuple[tuple[float, ...], int] | None = None
        self._chunks: list[PrefillChunk] = []
        self._pauses: list[Pause] = []
        self._preempted: tuple[float, int] | None = None
        # The totals that do not belong to the sequence: all up to its first token, and those of the
        # steps in which it was paused, or was computed again after a pause.
        self._decoding: DecodeWork | None = None
        self._paused_work = DecodeWork()  # the totals when it was preempted
        # What `EngineClock.waits` returned when the prompt was computed
        self._prompt_done: tuple[float, ...] | None = None
        self.num_evicted = 0
        self.is_cache_off = False
        self.divergence: PromptDivergence | None = None

    def hold(self, leader: "RequestTiming | None") -> None:
        """The sequence waits for another one that computes the same prefix."""
        if self._leader is None:
            self._leader, self._led_since = leader, self._clock.waits(self._clock.now)

    def load(self) -> None:
        """The sequence waits for blocks from a tier of the cache."""
        if self._loading_at is None:
            self._loading_at = self._clock.now

    def admit(self, seq: "Sequence") -> None:
        """The sequence was admitted. The first time, this computes what it waited for."""
        now = self._clock.now
        if self._admitted is None:
            self.started_at = now
            self._admitted = self._waited(seq, now)
            self._leader = None
            self._clock.admissions.append(
                AdmissionRecord(seq.arrival, seq.tenant, seq.priority, now, self._clock.waits(now))
            )
        elif self._preempted is not None:
            self._resume(now)

    def look_up(self, seq: "Sequence", kv: "KVCache", chain: list[int], is_cache_off: bool) -> None:
        """Find out why the cache does not have the whole prompt. `chain` are the hashes of the
        prompt's blocks. Called after the first admission.
        """
        self.is_cache_off = is_cache_off
        if is_cache_off or not kv.publishes_at_once:
            return
        # The block of the last prompt token is never taken from the cache.
        chain = chain[: (seq.num_prompt - 1) // kv.block_size]
        self.num_evicted = self._clock.num_seen(chain, seq.num_matched) * kv.block_size
        if seq.num_matched < len(chain):
            self.divergence = divergence(kv, seq.namespace, seq.tokens[: seq.num_prompt])

    def preempt(self, num_lost: int) -> None:
        self._preempted = self._clock.now, num_lost
        self._paused_work = self._clock.work()

    def chunk(self, start: int, count: int) -> None:
        """The last step computed `count` tokens of the prompt. If there are too many chunks, the
        last ones are joined.
        """
        step = self._clock.steps[-1] if self._clock.steps else None
        if step is None:
            return
        began_at = step.began_at
        if self._decoding is not None:
            self._decoding = _summed(self._decoding, _work_of(step))
        if len(self._chunks) == MAX_CHUNKS:
            last = self._chunks.pop()
            began_at, start, count = last.began_at, last.start, start + count - last.start
        self._chunks.append(
            PrefillChunk(began_at, step.ended_at, start, count, step.num_rows, step.num_tokens)
        )

    def first_token(self, now: float) -> None:
        self.first_token_at = now
        self._decoding = self._clock.work()
        if self._preempted is not None:  # the step of the token was launched before the pause
            self._paused_work = self._decoding
        self._prompt_done = self._clock.waits(now)

    def timeline(self, seq: "Sequence", now: float) -> Timeline:
        """Everything that was measured. Called when the sequence has ended."""
        waits, num_overtaken = self._admitted or self._waited(seq, now)
        num_pauses = len(self._pauses)
        if self._preempted is not None:
            self._pauses.append(Pause(self._preempted[0], None, self._preempted[1]))
            num_pauses += 1
        return Timeline(
            choice=seq.choice,
            submitted_at=self.submitted_at,
            queued_at=self.queued_at,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            ended_at=now,
            finish_reason=seq.finish_reason or "",
            waits=waits,
            has_grammar=seq.rules is not None and seq.rules.constraint is not None,
            num_before=self._num_before,
            num_overtaken=num_overtaken,
            num_prompt=seq.num_prompt,
            num_cached=seq.num_cached,
            num_evicted=self.num_evicted,
            is_cache_off=self.is_cache_off,
            divergence=self.divergence,
            num_generated=seq.num_generated,
            num_resumed=seq.queue.num_resumed,
            chunks=tuple(self._chunks),
            pauses=tuple(self._pauses[:MAX_PAUSES]),
            num_pauses=max(num_pauses, seq.queue.num_preemptions),
            decode=self._decoded(),
        )

    def _resume(self, now: float) -> None:
        assert self._preempted is not None
        at, num_lost = self._preempted
        self._preempted = None
        if self._decoding is not None:
            paused = _summed(self._clock.work(), self._paused_work, -1)
            self._decoding = _summed(self._decoding, paused)
        if len(self._pauses) == MAX_PAUSES:  # join the last two, so that no time is missing
            last = self._pauses.pop()
            at, num_lost = last.at, last.num_lost + num_lost
        self._pauses.append(Pause(at, now, num_lost))

    def _waited(self, seq: "Sequence", now: float) -> tuple[tuple[float, ...], int]:
        """The seconds of waiting by reason, and how many sequences overtook this one. From the
        first overtaking on, the sequence waited for its turn.
        """
        overtaking = [
            each
            for each in self._clock.admissions
            if each.arrival > seq.arrival
            and each.at < now
            and (each.tenant != seq.tenant or each.priority < seq.priority)
        ]
        until = overtaking[0].waits if overtaking else self._clock.waits(now)
        waits = [max(0.0, after - b) for after, b in zip(until, self._base, strict=True)]
        if self._leader is not None and seq.num_matched:
            self._take_prefix_wait(waits, until, self._leader)
        if self._loading_at is not None:
            # While blocks are loaded, nothing else stops the sequence.
            moved = min(now - self._loading_at, waits[STEP])
            waits[STEP] -= moved
            waits[TIER] += moved
        if overtaking:
            is_urgent = any(each.priority < seq.priority for each in overtaking)
            rest = now - self.queued_at - sum(waits)
            waits[PRIORITY if is_urgent else TURN] += max(0.0, rest)
        return tuple(waits), len(overtaking)

    def _take_prefix_wait(
        self, waits: list[float], until: tuple[float, ...], leader: "RequestTiming"
    ) -> None:
        """Move the time in which `leader` computed the prefix for this sequence to the reason
        PREFIX. But if there was no slot, this sequence could not have run anyway.
        """
        done = leader._prompt_done
        for reason in (STEP, BUDGET, BLOCKS):
            end = until[reason] if done is None else min(done[reason], until[reason])
            moved = min(max(end - self._led_since[reason], 0.0), waits[reason])
            waits[reason] -= moved
            waits[PREFIX] += moved

    def _decoded(self) -> DecodeWork:
        if self._decoding is None:
            return DecodeWork()
        until = self._clock.work() if self._preempted is None else self._paused_work
        return _summed(until, self._decoding, -1)


def _work_of(step: StepRecord) -> DecodeWork:
    seconds, is_mixed = step.ended_at - step.began_at, step.num_prompt_tokens > 0
    by_rows = [0] * (len(BATCH_EDGES) + 1)
    by_rows[bisect_left(BATCH_EDGES, step.num_rows)] = 1
    mixed_s = seconds if is_mixed else 0.0
    return DecodeWork(1, step.num_rows, seconds, int(is_mixed), mixed_s, 0.0, tuple(by_rows))


class RequestTimings(Extension):
    """Measures all sequences of a scheduler, and completes their first and last deltas."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.clock = EngineClock()
        self._kv, self._table = scheduler.kv, scheduler.table
        self._of: dict[Sequence, RequestTiming] = {}

    def submitted_at(self, seq: "Sequence") -> float:
        return self._of[seq].submitted_at

    def planned(self, now: float) -> None:
        self.clock.plan(now)

    def blocked(self, lack: Lack) -> None:
        self.clock.block(LACKS[lack])

    def queued(
        self, seq: "Sequence", request: GenerateRequest, submitted_at: float, queued_at: float
    ) -> None:
        leader = self._table.inflight.leader(seq)
        self._of[seq] = RequestTiming(
            self.clock,
            self._table.num_waiting - 1,
            queued_at,
            None if leader is None else self._of[leader],
            submitted_at,
        )

    def held(self, seq: "Sequence", owner: "Sequence | None") -> None:
        if owner is None:
            self._of[seq].load()
        else:
            self._of[seq].hold(self._of[owner])

    def admitted(self, seq: "Sequence", is_first: bool, chain: list[int], uses_cache: bool) -> None:
        timing = self._of[seq]
        timing.admit(seq)
        if is_first:
            timing.look_up(seq, self._kv, chain, not uses_cache)

    def confirmed(
        self, seq: "Sequence", start: int, samples: bool, now: float
    ) -> TokenDelta | None:
        self._of[seq].chunk(start, seq.num_confirmed - start)
        return None

    def preempted(self, seq: "Sequence") -> None:
        self._of[seq].preempt(seq.num_computed)

    def complete(
        self, seq: "Sequence", delta: TokenDelta, is_first: bool, now: float
    ) -> TokenDelta:
        timing, queue_s, prefill_s = self._of[seq], 0.0, 0.0
        if is_first:
            if delta.vector is None:
                timing.first_token(now)
            started_at = now if timing.started_at is None else timing.started_at
            queue_s, prefill_s = started_at - timing.submitted_at, now - started_at
        has_timeline = delta.finish_reason is not None and delta.vector is None
        timeline = timing.timeline(seq, now) if has_timeline else None
        return replace(delta, queue_s=queue_s, prefill_s=prefill_s, timeline=timeline)

    def ended(self, seq: "Sequence") -> None:
        self._of.pop(seq, None)


def divergence(kv: "KVCache", namespace: str, tokens: "Tokens") -> PromptDivergence | None:
    """Where a prompt leaves the cached prefix that shares most tokens with it. Looks at the newest
    branches only. None if nothing is cached in the namespace, or if the whole prompt is.
    """
    node = kv.radix.root(namespace)
    if node is None:
        return None
    size, done, common = kv.block_size, 0, 0
    for node, common in kv.radix.walk(namespace, tokens):  # noqa: B007
        done += common * size
    rest = tokens[done : done + size + SHOWN_TOKENS]
    following = [each.tokens for each in [*node.children.values()][-MAX_BRANCHES:]]
    if common < len(node.blocks):
        following = [node.tokens[common * size :]]
    best = max(following, key=lambda each: _num_common(each, rest), default=rest[:0])
    shared = _num_common(best, rest)
    own, cached = rest[shared : shared + SHOWN_TOKENS], best[shared : shared + SHOWN_TOKENS]
    return PromptDivergence(done + shared, tuple(own), tuple(cached)) if own else None


def _num_common(first: "Tokens", second: "Tokens") -> int:
    """How many leading tokens are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    end = min(len(first), len(second))
    return next((index for index, (a, b) in pairs if a != b), end)
