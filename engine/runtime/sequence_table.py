"""The sequences of an engine: who runs, who waits, who holds which slot, and who is admitted next.

A sequence is added once. Then it waits, runs, may be preempted and wait again, and leaves exactly
once. Only `SequenceTable` moves sequences between these states. The scheduler owns the table, and
gives and takes the blocks of sequences.

The waiting queue decides which sequence is admitted next. A priority below 0 orders only the
sequences of its own tenant. One above 0 is a rank: the sequence lets those of all tenants with a
lower rank go first. Within a rank, the tenant that has received the fewest tokens is next
(`FairShare`). Sequences of the same tenant and priority are admitted in order of arrival.
Priorities age: a waiting sequence gains one level every AGING_STEPS steps. So urgent requests delay
other requests only for a bounded time.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from engine.core.interfaces.request import FinishReason
from engine.runtime.sequence import Sequence, packed

# When a sequence is admitted, its tenant is charged at most this many output tokens. When the
# sequence ends, the charge is corrected to the real count. So requests with a high max_tokens do
# not have to wait longer.
GUESSED_TOKENS = 256
# Charges of tenants without waiting sequences are remembered. If there are more such tenants than
# this, all their charges are dropped, and they count as new tenants.
MAX_REMEMBERED = 1024
# A prompt is much shorter than another one if it has at most this part of its tokens.
MUCH_SHORTER = 2
# Waiting sequences that one step passes at most, to find one that it can admit.
MAX_PASSED = 8
AGING_STEPS = 1024


class FairShare:
    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self._clock = 0  # the charge of the last admitted tenant; new tenants start with it

    def given(self, tenant: str) -> int:
        return self._given.get(tenant, self._clock)

    def given_at_begin(self, tenant: str) -> int:
        """What a tenant without waiting sequences counts as given when its first one comes."""
        return max(self.given(tenant), self._clock)

    def begin(self, tenant: str) -> None:
        """Called when a tenant's first sequence starts to wait."""
        self._given[tenant] = self.given_at_begin(tenant)

    def end(self, waiting: Collection[str]) -> None:
        """Called when a tenant's last waiting sequence has left the queue. `waiting` are the
        tenants that still have waiting sequences.
        """
        if not waiting:
            self._clock = max([self._clock, *self._given.values()])
            self._given.clear()
        elif len(self._given) > len(waiting) + MAX_REMEMBERED:
            self._given = {tenant: self._given[tenant] for tenant in waiting}

    def charge(self, seq: Sequence) -> None:
        before = self.given(seq.tenant)
        self._clock = max(self._clock, before)
        self._given[seq.tenant] = before + _guess(seq)

    def settle(self, seq: Sequence) -> None:
        actual = seq.num_prompt - seq.num_cached + seq.num_generated
        self._given[seq.tenant] = self.given(seq.tenant) + actual - _guess(seq)


class Passing:
    """Decides which waiting sequences may go before others whose turn it is.

    Prompts in progress, the `running` ones that are not computed, use up a step. Then a sequence is
    admitted beside them only if its prompt is much shorter than what each of them has left, or if
    its tenant has none running. So a short prompt does not wait for a long one, and only a few are
    in progress at a time. Those in progress go on, so nobody is passed for ever. A sequence that
    finds too few free blocks is passed as well, but only until those that went before it have got
    as many tokens as it has itself.
    """

    def __init__(self, running: Iterable[Sequence]) -> None:
        left = [seq.num_uncomputed for seq in running if seq.num_uncomputed > 1]
        self._limit = min(left) // MUCH_SHORTER if left else None
        self._present = {seq.tenant for seq in running}
        self._num_passed = 0
        self._blocked: list[Sequence] = []

    def may_enter(self, seq: Sequence, num_new: int) -> bool:
        """Whether a sequence with `num_new` tokens to compute may be admitted now."""
        is_new_tenant = seq.tenant not in self._present
        return self._limit is None or is_new_tenant or num_new <= self._limit

    def may_pass(self, seq: Sequence, *, is_blocked: bool = False) -> bool:
        """Whether the next sequence may be tried, although this one can't be admitted. It is
        blocked if there are too few free blocks for it.
        """
        self._num_passed += 1
        if is_blocked and (seq.is_pinned or seq.queue.num_passed >= len(seq.tokens)):
            return False
        if is_blocked:
            self._blocked.append(seq)
        return self._num_passed <= MAX_PASSED

    def enter(self, seq: Sequence) -> None:
        """Note that a sequence was admitted."""
        for each in self._blocked:
            each.queue.num_passed += _guess(seq)


def _guess(seq: Sequence) -> int:
    return seq.num_prompt - seq.num_cached + min(seq.max_tokens, GUESSED_TOKENS)


def _urgency(seq: Sequence) -> tuple[int, int]:
    """A key that sorts the sequences of one tenant and rank. All of them age at the same rate, so
    their order does not depend on the present step.
    """
    return (seq.priority * AGING_STEPS + seq.queue.submitted_step, seq.arrival)


class WaitingQueue:
    """The waiting sequences. There is a queue for each rank and tenant.

    The place of a sequence follows from its submission, so a preempted sequence keeps its
    seniority.
    """

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, list[Sequence]]] = {}  # by rank and tenant
        self._share = FairShare()
        self._num_waiting: dict[str, int] = {}  # number of waiting sequences per tenant
        self.num_prompt_tokens = 0  # of all waiting sequences

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def __iter__(self) -> Iterator[Sequence]:
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    def tenants(self) -> Set[str]:
        """The tenants that have waiting sequences."""
        return self._num_waiting.keys()

    def counts(self) -> Mapping[str, int]:
        """The number of waiting sequences of each tenant."""
        return self._num_waiting

    def add(self, seq: Sequence) -> None:
        tenant = seq.tenant
        if tenant not in self._num_waiting:
            self._share.begin(tenant)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1
        self.num_prompt_tokens += seq.num_prompt
        line = self._lines.setdefault(seq.rank, {}).setdefault(tenant, [])
        insort(line, seq, key=_urgency)

    def remove(self, seq: Sequence) -> None:
        lines = self._lines[seq.rank]
        lines[seq.tenant].remove(seq)
        if not lines[seq.tenant]:
            del lines[seq.tenant]
            if not lines:
                del self._lines[seq.rank]
        self._num_waiting[seq.tenant] -= 1
        self.num_prompt_tokens -= seq.num_prompt
        if not self._num_waiting[seq.tenant]:
            del self._num_waiting[seq.tenant]
            self._share.end(self._num_waiting)

    def charge(self, seq: Sequence) -> None:
        """Charge the tenant for a sequence that is admitted for the first time. The charge is an
        estimate of its tokens.
        """
        self._share.charge(seq)

    def settle(self, seq: Sequence) -> None:
        """Replace the estimated charge of an ended sequence by its actual number of tokens."""
        self._share.settle(seq)

    def in_order(self, step: int) -> Iterator[Sequence]:
        """Yields all waiting sequences, in the order in which this step should admit them.

        The caller may remove each yielded sequence. An admission is charged to its tenant at once,
        which affects the order of the sequences that follow.
        """
        turns = {rank: _Turns(lines, self._share) for rank, lines in self._lines.items()}

        def aged(rank: int) -> tuple[int, int]:
            first = turns[rank].oldest()
            return (_aged(first, step), first.arrival)

        while turns:
            rank = min(turns, key=aged) if len(turns) > 1 else next(iter(turns))
            yield turns[rank].next()
            if not turns[rank].advance():
                del turns[rank]

    def num_before(self, tenant: str, priority: int, step: int) -> int:
        """How many waiting sequences will be admitted before one that this tenant queues now, if
        no other sequence follows.
        """
        rank = max(priority, 0)
        lines = self._lines.get(rank, {})
        own = lines.get(tenant, [])
        count = bisect_right(own, priority * AGING_STEPS + step, key=lambda s: _urgency(s)[0])
        share = self._share
        given = share.given if tenant in self._num_waiting else share.given_at_begin
        level = given(tenant) + sum(map(_charge, own[:count]))
        for other, line in lines.items():
            theirs = share.given(other)
            for seq in line if other != tenant else ():
                if not seq.has_started and theirs > level:
                    break
                theirs += _charge(seq)
                count += 1
        for other_rank, others in self._lines.items():
            if other_rank != rank:
                aged = (_aged(seq, step) <= rank for line in others.values() for seq in line)
                count += sum(aged)
        return count


def _aged(seq: Sequence, step: int) -> int:
    """The rank of a waiting sequence, less the levels that it has gained."""
    return seq.rank - (step - seq.queue.submitted_step) // AGING_STEPS


def _charge(seq: Sequence) -> int:
    """What the tenant will be charged when the sequence is admitted. A preempted sequence was
    charged at its first admission.
    """
    return 0 if seq.has_started else _guess(seq)


class _Turns:
    """Iterates over the sequences of one rank in fair order: call `next`, then `advance`."""

    def __init__(self, lines: dict[str, list[Sequence]], share: FairShare) -> None:
        self._share = share
        # Each tenant's list is reversed, so that its next sequence is at the end.
        self._left = {tenant: line[::-1] for tenant, line in lines.items()}
        self._by_share = [self._place(tenant) for tenant in self._left]
        self._by_age = [(line[-1].arrival, tenant) for tenant, line in self._left.items()]
        heapq.heapify(self._by_share)
        heapq.heapify(self._by_age)

    def oldest(self) -> Sequence:
        while True:
            arrival, tenant = self._by_age[0]
            line = self._left.get(tenant)
            if line and line[-1].arrival == arrival:
                return line[-1]
            heapq.heappop(self._by_age)  # this entry is outdated: its sequence was already yielded

    def next(self) -> Sequence:
        return self._left[self._by_share[0][-1]][-1]

    def advance(self) -> bool:
        """Move past the sequence that `next` returned. Returns False if it was the last one."""
        tenant = self._by_share[0][-1]
        line = self._left[tenant]
        line.pop()
        if line:
            heapq.heapreplace(self._by_share, self._place(tenant))
            heapq.heappush(self._by_age, (line[-1].arrival, tenant))
        else:
            heapq.heappop(self._by_share)
            del self._left[tenant]
        return bool(self._left)

    def _place(self, tenant: str) -> tuple[bool, int, int, str]:
        """The heap key of a tenant. A tenant whose next sequence was preempted goes first, because
        that sequence was already charged at its first admission.
        """
        first = self._left[tenant][-1]
        return (not first.has_started, self._share.given(tenant), first.arrival, tenant)


class InflightPrefixes:
    """Knows which prompt blocks running sequences are computing and will publish to the prefix
    cache. A waiting sequence with the same prefix can wait for these blocks instead of computing
    them again.

    The hash of a prompt block covers all blocks before it, too. A dictionary maps the hash to the
    running sequence that computes the block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._width = block_size * packed().itemsize  # bytes per block of token ids
        self._owners: dict[int, Sequence] = {}
        self._owned: dict[Sequence, list[int]] = {}
        self._chains: dict[Sequence, list[int]] = {}
        # Namespace, prompt and hashes of the sequence that was added last. The next sequence often
        # has the same prefix. Then the hashes of this prefix are reused.
        self._latest: tuple[str, bytes, list[int]] = ("", b"", [])

    def add(self, seq: Sequence) -> None:
        """Hash the prompt blocks of a sequence that starts to wait. The hashes are kept until the
        sequence is removed.
        """
        data, width = seq.tokens[: seq.num_prompt].tobytes(), self._width
        namespace, latest, known = self._latest
        common = _common_blocks(data, latest, width) if namespace == seq.namespace else 0
        chain = known[:common]
        parent = chain[-1] if chain else hash(seq.namespace)
        for start in range(common * width, len(data) - width + 1, width):
            parent = hash((parent, data[start : start + width]))
            chain.append(parent)
        self._chains[seq] = chain
        self._latest = seq.namespace, data, chain

    def chain(self, seq: Sequence) -> list[int]:
        """The hashes of a sequence's prompt blocks."""
        return self._chains[seq]

    def leader(self, seq: Sequence) -> Sequence | None:
        """A running sequence that is computing a prompt block of `seq`."""
        if not self._owners:
            return None
        return next((self._owners[key] for key in self._chains[seq] if key in self._owners), None)

    def remove(self, seq: Sequence) -> None:
        """Remove everything that is stored for a sequence that has ended."""
        self.disown(seq)
        self._chains.pop(seq, None)

    def own(self, seq: Sequence, first_block: int) -> None:
        """Register that the sequence computes its prompt blocks from `first_block` on."""
        new = self._chains[seq][first_block:]
        self._owned[seq] = [key for key in new if self._owners.setdefault(key, seq) is seq]

    def disown(self, seq: Sequence) -> None:
        """Remove a sequence as the owner of prompt blocks. Called when the sequence no longer
        runs, or when all its full prompt blocks are in the prefix cache.
        """
        for key in self._owned.pop(seq, ()):
            del self._owners[key]

    def hold(self, seq: Sequence, num_matched: int) -> bool:
        """Whether a running sequence is computing the first uncached prompt block of `seq`, which
        is block `num_matched`. If so, this marks `seq` to wait for that sequence.
        """
        chain = self._chains[seq]
        # The last prompt token is always computed, so its block can't come from the cache.
        if (num_matched + 1) * self._block_size >= len(seq.tokens) or num_matched >= len(chain):
            return False
        owner = self._owners.get(chain[num_matched])
        until = (num_matched + 1) * self._block_size
        if owner is None or owner.num_confirmed >= until:
            return False
        seq.queue.held_by, seq.queue.held_until = owner, until
        return True

    def is_held(self, seq: Sequence) -> bool:
        """Whether `seq` still waits for the sequence that `hold` found."""
        owner = seq.queue.held_by
        if owner is not None and owner.slot >= 0 and owner.num_confirmed < seq.queue.held_until:
            return True
        seq.queue.held_by = None
        return False

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Assert that hashes are kept exactly for the sequences that run or wait, and that only
        running sequences own blocks.
        """
        running = set(running)
        assert self._chains.keys() == running | set(waiting), (
            "a chain without its sequence, or the reverse"
        )
        assert running.issuperset(self._owned), (
            "a block is awaited from a sequence that does not run"
        )
        owners = {key: seq for seq, keys in self._owned.items() for key in keys}
        assert owners == self._owners, "owners"


def _common_blocks(data: bytes, other: bytes, width: int) -> int:
    """How many leading blocks of `width` bytes are equal in `data` and `other`."""
    most = min(len(data), len(other)) // width
    return bisect_left(
        range(1, most + 1), True, key=lambda count: data[: count * width] != other[: count * width]
    )


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
    def has_sequences(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

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
        assert not self.has_sequences
        self._requests.clear()
        self.inflight = InflightPrefixes(self._block_size)
        self.free_slots = list(range(self.max_slots - 1, -1, -1))
