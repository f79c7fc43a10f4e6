"""The sequences of an engine: who runs, who waits, and who holds which slot.

A sequence is added once. Then it waits, runs, may be preempted and wait again, and leaves exactly
once. Only this module moves sequences between these states. The scheduler owns the table, and
gives and takes the blocks of sequences.
"""

from bisect import insort
from collections.abc import Iterator

import msgspec

from engine.core.interfaces.request import FinishReason
from engine.runtime.queue import InflightPrefixes, WaitingQueue
from engine.runtime.sequence import Sequence


class Demand(msgspec.Struct, frozen=True):
    """What the sequences of an engine need next. The last two numbers only grow."""

    num_running: int = 0
    num_decoding: int = 0
    num_starting: int = 0  # sequences whose prompt is not computed, and that have a slot or get one
    num_prompt_tokens: int = 0  # of all sequences whose prompt is not computed
    num_started_tokens: int = 0  # prompt tokens of all sequences that were ever admitted
    num_new_tokens: int = 0  # all tokens that were ever generated


class SequenceTable:
    """The waiting and running sequences, with their slots."""

    def __init__(self, max_slots: int, block_size: int) -> None:
        self.max_slots = max_slots
        self._block_size = block_size
        # For each request id, the choices of the request that have not ended.
        self._requests: dict[str, list[Sequence]] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # most senior first
        self.inflight = InflightPrefixes(block_size)
        self.free_slots = list(range(max_slots - 1, -1, -1))
        self._resumed: list[Sequence] = []  # see `is_catching_up`
        self._num_admissions = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_decoding(self) -> int:
        """The number of running sequences that decode and need more tokens. A long step increases
        the inter-token latency of these sequences.
        """
        return sum(
            [
                seq.num_prompt <= seq.num_computed < seq.num_prompt + seq.max_tokens - 1
                for seq in self.running
            ]
        )

    def demand(self, num_started_tokens: int, num_new_tokens: int) -> Demand:
        waiting = self.waiting
        starting = [seq for seq in self.running if seq.num_computed < seq.num_prompt]
        return Demand(
            num_running=len(self.running),
            num_decoding=self.num_decoding,
            num_starting=len(starting) + min(len(waiting), len(self.free_slots)),
            num_prompt_tokens=waiting.num_prompt_tokens
            + sum(seq.num_prompt - seq.num_computed for seq in starting),
            num_started_tokens=num_started_tokens,
            num_new_tokens=num_new_tokens,
        )

    @property
    def is_catching_up(self) -> bool:
        """Whether a sequence of an engine that died has not generated a token here yet."""
        if self._resumed:
            self._resumed = [seq for seq in self._resumed if seq.must_catch_up]
        return bool(self._resumed)

    def is_crowded(self, budget: int) -> bool:
        """Whether prompts in progress could use up the whole budget, so that none of it would be
        left for waiting sequences.
        """
        if not self.free_slots or not len(self.waiting):
            return False
        return sum(seq.num_uncomputed for seq in self.running) >= budget

    def may_have_slot(self, seq: Sequence) -> bool:
        """Whether a sequence may have one of the free slots. The last one is for a tenant without
        running sequences, unless all requests are of one tenant.
        """
        if len(self.free_slots) > 1 or self.max_slots == 1 or not seq.tenant:
            return True
        return all(each.tenant != seq.tenant for each in self.running)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def choices(self, request_id: str) -> list[Sequence]:
        """The choices of a request that have not ended."""
        return list(self._requests.get(request_id, ()))

    def add(self, seq: Sequence, step: int) -> None:
        """Queue a sequence in this step."""
        seq.queue.submitted_step = step
        self._requests.setdefault(seq.request_id, []).append(seq)
        self.inflight.add(seq)
        self.waiting.add(seq)
        if seq.queue.num_resumed:
            self._resumed.append(seq)

    def admit(self, seq: Sequence, num_matched: int) -> None:
        """Give a waiting sequence a slot. Its first `num_matched` blocks are cached."""
        self.waiting.remove(seq)
        self._num_admissions += 1
        seq.slot, seq.life = self.free_slots.pop(), self._num_admissions
        insort(self.running, seq, key=lambda s: s.seniority)
        self.inflight.own(seq, num_matched)

    def preempt(self, seq: Sequence) -> None:
        """Take the slot of a running sequence, and queue it again."""
        self._stop(seq)
        seq.queue.num_preemptions += 1
        self.waiting.add(seq)

    def leave(self, seq: Sequence, reason: FinishReason) -> None:
        """Remove a sequence that runs or waits."""
        assert seq.finish_reason is None, (seq.request_id, seq.finish_reason)
        seq.finish_reason = reason
        has_started = seq.has_started
        if seq.slot >= 0:
            self._stop(seq)
        else:
            self.waiting.remove(seq)
        if has_started:
            self.waiting.settle(seq)
        self.inflight.remove(seq)
        choices = self._requests[seq.request_id]
        choices.remove(seq)
        if not choices:
            del self._requests[seq.request_id]

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.inflight.disown(seq)
        self.free_slots.append(seq.slot)
        seq.slot, seq.life = -1, 0

    def check(self) -> None:
        """Assert the invariants of queues and slots."""
        slots = [seq.slot for seq in self.running]
        assert sorted(slots + self.free_slots) == list(range(self.max_slots)), slots
        assert all(seq.life > 0 for seq in self.running)
        assert all(seq.life == 0 and seq.slot < 0 and not seq.blocks for seq in self.waiting)
        live = list(self.sequences())
        assert all(seq.finish_reason is None for seq in live)
        indexed = [seq for choices in self._requests.values() for seq in choices]
        assert len(indexed) == len(live) and set(indexed) == set(live), "the index of requests"
        self.inflight.check(self.running, self.waiting)

    def reset(self) -> None:
        """Free all slots. Allowed only when no sequence runs or waits."""
        assert not self.running and not len(self.waiting)
        self._requests.clear()
        self.inflight = InflightPrefixes(self._block_size)
        self.free_slots = list(range(self.max_slots - 1, -1, -1))
