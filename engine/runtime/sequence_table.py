"""The sequences of an engine: who runs, who waits, and who holds which slot.

A sequence is added once. Then it waits, runs, may be preempted and wait again, and leaves exactly
once. Only this module moves sequences between these states.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.request import FinishReason, TokenDelta
from engine.runtime.insight.request_timing import EngineClock, RequestTiming
from engine.runtime.kv_cache import KVCache
from engine.runtime.outputs import token_delta
from engine.runtime.queue import InflightPrefixes, NewTenantReserve, WaitingQueue
from engine.runtime.sequence import Sequence
from engine.runtime.speculation.drafts import Speculation

if TYPE_CHECKING:
    from engine.runtime.interp.reports import Reports


class Demand(msgspec.Struct, frozen=True):
    """What the sequences of an engine need next. The last two numbers only grow."""

    num_running: int = 0
    num_decoding: int = 0
    num_starting: int = 0  # sequences whose prompt is not computed, and that have a slot or get one
    num_prompt_tokens: int = 0  # of all sequences whose prompt is not computed
    num_started_tokens: int = 0  # prompt tokens of all sequences that were ever admitted
    num_new_tokens: int = 0  # all tokens that were ever generated


class SequenceTable:
    """The waiting and running sequences, with their slots and blocks."""

    def __init__(self, kv: KVCache, max_slots: int, max_step_tokens: int = 2**31 - 1) -> None:
        self.kv = kv
        self._max_slots = max_slots
        self._max_step_tokens = max_step_tokens
        # For each request id, the choices of the request that have not ended.
        self._requests: dict[str, list[Sequence]] = {}
        self._waiting = WaitingQueue()
        self._new_tenants = NewTenantReserve()
        self._running: list[Sequence] = []  # most senior first
        self._resumed: list[Sequence] = []  # see `is_catching_up`
        self._inflight = InflightPrefixes(kv.block_size)
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._step = self._num_admissions = 0
        self.speculation: Speculation | None = None  # None: steps verify no drafts
        self.has_adapters = False  # whether any sequence has had a LoRA adapter
        self.begun: list[Sequence] = []  # those whose requests are to be told that they have begun
        # Results of requests that read activations, while they are being made
        self.reports: Reports | None = None
        self.clock = EngineClock()
        self.num_preemptions = 0
        self.num_nonfinite = 0
        self.num_started = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    @property
    def running(self) -> Listed[Sequence]:
        """The running sequences, most senior first."""
        return self._running

    @property
    def waiting(self) -> WaitingQueue:
        return self._waiting

    @property
    def step(self) -> int:
        """The number of steps that were planned."""
        return self._step

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running) or len(self._waiting) > 0 or bool(self.reports)

    @property
    def num_decoding(self) -> int:
        """The number of running sequences that decode and need more tokens. A long step increases
        the inter-token latency of these sequences.
        """
        return sum(
            seq.num_prompt <= seq.num_computed < seq.num_prompt + seq.max_tokens - 1
            for seq in self._running
        )

    @property
    def demand(self) -> Demand:
        waiting = self._waiting
        starting = [seq for seq in self._running if seq.num_computed < seq.num_prompt]
        return Demand(
            num_running=len(self._running),
            num_decoding=self.num_decoding,
            num_starting=len(starting) + min(len(waiting), len(self._free_slots)),
            num_prompt_tokens=waiting.num_prompt_tokens
            + sum(seq.num_prompt - seq.num_computed for seq in starting),
            num_started_tokens=self.num_prompt_tokens - self.num_cached_tokens,
            num_new_tokens=self.num_generated_tokens,
        )

    @property
    def is_catching_up(self) -> bool:
        """Whether a sequence of an engine that died has not generated a token here yet."""
        if self._resumed:
            self._resumed = [seq for seq in self._resumed if seq.must_catch_up]
        return bool(self._resumed)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting

    def probed(self) -> Iterator[Sequence]:
        """The sequences that read or change activations, also those whose results are being
        made.
        """
        yield from (seq for seq in self.sequences() if seq.probe is not None)
        if self.reports is not None:
            yield from self.reports.sequences()

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. The caller has checked that the sequence fits an empty KV pool."""
        assert self.kv.can_ever_fit(seq.max_len), seq.request_id
        seq.submitted_step = self._step
        self._requests.setdefault(seq.request_id, []).append(seq)
        self._inflight.add(seq)
        leader = self._inflight.leader(seq)
        seq.watch = RequestTiming(self.clock, len(self._waiting), seq.queued_at, leader)
        self._waiting.add(seq)
        if seq.num_resumed:
            self._resumed.append(seq)
        if self.speculation is not None:
            self.speculation.begin(seq)
        self.kv.read_ahead(seq)

    def abort(self, request_id: str, choice: int | None, now: float) -> list[TokenDelta]:
        """Abort one choice of a request, or all choices if `choice` is None, in any state. Unknown
        ids are ignored.
        """
        if self.reports:
            self.reports.drop(request_id)
        return [
            self.finish(seq, "abort", now)
            for seq in list(self._requests.get(request_id, ()))
            if choice in (None, seq.choice)
        ]

    def fail(self, seq: Sequence, error: EngineError, now: float) -> TokenDelta:
        return self.finish(seq, "error", now, error)

    def finish(
        self, seq: Sequence, reason: FinishReason, now: float, error: EngineError | None = None
    ) -> TokenDelta:
        """Remove a sequence, free its blocks and its slot, and return its final delta."""
        self._leave(seq, reason)
        return token_delta(seq, (), None, now, error)

    def _is_held(self, seq: Sequence, delta: TokenDelta) -> bool:
        """Whether the delta is the last one of a sequence whose results have to be made first."""
        probe = seq.probe
        if probe is None or delta.finish_reason not in ("stop", "length") or not probe.reads:
            return False
        if self.reports is None:
            from engine.runtime.interp.reports import Reports

            self.reports = Reports()
        self.reports.hold(seq, delta)
        return True

    def rollback(self) -> None:
        """Return to the state after the last finished step. Steps in flight are forgotten, and
        their output must not be applied. Tokens that finished steps have computed are kept.
        """
        for seq in self.sequences():
            seq.num_sampling = 0
            seq.num_computed = seq.num_confirmed
            seq.needs_history = True

    def check(self) -> None:
        """Assert the invariants of queues, slots and memory."""
        slots = [seq.slot for seq in self._running]
        assert sorted(slots + self._free_slots) == list(range(self._max_slots)), slots
        assert all(seq.life > 0 for seq in self._running)
        assert all(seq.life == 0 and seq.slot < 0 and not seq.blocks for seq in self._waiting)
        live = list(self.sequences())
        assert all(seq.finish_reason is None for seq in live)
        indexed = [seq for choices in self._requests.values() for seq in choices]
        assert len(indexed) == len(live) and set(indexed) == set(live), "the index of requests"
        self._inflight.check(self._running, self._waiting)
        self.kv.check(self._running)
        if self.speculation is not None and self.speculation.model is not None:
            self.speculation.model.check()

    def rebuild(self) -> None:
        """Reset to an empty state in which all blocks and slots are free. Allowed only when no
        sequence runs or waits.
        """
        assert not self.has_work
        self.kv.rebuild()
        self._requests.clear()
        self._inflight = InflightPrefixes(self.kv.block_size)
        self._free_slots = list(range(self._max_slots - 1, -1, -1))

    def _preempt(self, seq: Sequence) -> None:
        """Release everything that the sequence holds and queue it again."""
        if seq.watch is not None:
            seq.watch.preempt(seq.num_computed)
        self._stop_running(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(seq)

    def _leave(self, seq: Sequence, reason: FinishReason) -> None:
        assert seq.finish_reason is None, (seq.request_id, seq.finish_reason)
        seq.finish_reason = reason
        if seq.slot >= 0:
            self._stop_running(seq)
        else:
            self._waiting.remove(seq)
            self.kv.stop_loading(seq)
        if seq.started_at is not None:
            self._waiting.settle(seq)
        self._inflight.remove(seq)
        if self.speculation is not None:
            self.speculation.end(seq)
        choices = self._requests[seq.request_id]
        choices.remove(seq)
        if not choices:
            del self._requests[seq.request_id]

    def _stop_running(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._inflight.disown(seq)
        self.kv.release(seq)
        self._free_slots.append(seq.slot)
        seq.slot, seq.life = -1, 0
