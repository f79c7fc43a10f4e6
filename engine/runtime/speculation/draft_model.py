"""A draft model: a small model that guesses the next tokens of sequences.

The small model has a runner of its own, with a KV cache of its own. For each sequence that it
guesses for, it has a copy of the sequence, whose keys and values are in that cache. A guess is
sampled with the parameters and the random numbers of its sequence. So two models with similar
logits sample the same token in most cases, also at a high temperature.
"""

import time
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np

from engine.core.interfaces.request import SamplingParams
from engine.runtime.batch import BatchBuilder
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.dummy_batch import idle_inputs, warm_up
from engine.runtime.model_runner import ModelRunner, PendingTokens, Warmable
from engine.runtime.sequence import Row, ScheduledBatch, Sequence, packed

# A copy that lacks more tokens than this is brought up to date by prefill.
MAX_LAG = 16
PROBE_TOKENS = 64  # tokens of the prefill that is timed when the model was loaded
# Steps with one token that are timed then. With fewer, one slow step at the start of serving would
# make the model look expensive for long.
NUM_PROBES = 8


# Index in the list of drafts, copy of the sequence, number of tokens to guess
_Group = list[tuple[int, Sequence, int]]


@dataclass(slots=True, eq=False)
class _Copy:
    """A sequence as the draft model has it. After the first `num_known` tokens, which are those of
    the sequence, come the tokens that were guessed last.
    """

    own: Sequence
    num_known: int = 0


class DraftModel:
    """Guesses tokens with the model of a runner. Its copies of sequences have slots and blocks of
    that runner until `end` is called.
    """

    def __init__(self, runner: ModelRunner, max_tokens: int) -> None:
        """`max_tokens` is the max number of tokens per step."""
        spec = runner.spec
        self._runner = runner
        self._spec = spec
        self._budget = StepBudget.of(spec, max_tokens)
        self._builder = BatchBuilder(spec)
        self._pool = BlockPool(spec.num_blocks)
        self._free_slots = list(range(spec.max_slots))
        self._copies: dict[Sequence, _Copy] = {}
        self._num_lives = 0
        self._is_closed = False

    def warm(self) -> None:
        """Prepare the runner, and measure what a token costs."""
        if isinstance(self._runner, Warmable):
            self._runner.warm()
        num_tokens = min(PROBE_TOKENS, self._spec.max_seq_len)
        nothing = np.zeros(0, np.int32)
        for _ in range(2):  # the first step of a size may take longer
            began_at = time.monotonic()
            handle = self._runner.forward(idle_inputs(self._spec, (num_tokens,)))
            self._runner.logits(handle, nothing)
            seconds = time.monotonic() - began_at
        self._budget.record(0, num_tokens, seconds)
        warm_up(self._runner)
        for _ in range(NUM_PROBES):
            began_at = time.monotonic()
            warm_up(self._runner)
            self._budget.record(1, 0, time.monotonic() - began_at)

    def lag(self, seq: Sequence) -> int | None:
        """How many tokens of a sequence the model has not computed yet. None if it can't guess for
        the sequence.
        """
        copy = self._copies.get(seq)
        if copy is None:
            suits = all(each.drafts == "any" for each in seq.extensions)
            can_begin = self._free_slots and suits
            fits = len(seq.tokens) // self._spec.block_size < self._pool.num_free
            return len(seq.tokens) if can_begin and fits else None
        return len(seq.tokens) - min(copy.own.num_computed, self._num_right(seq, copy))

    def prompt_s(self, num_tokens: int) -> float:
        """The expected seconds to compute this many tokens of a prompt."""
        return self._budget.prompt_s(num_tokens) or 0.0

    def token_s(self, num_sequences: int) -> float:
        """The expected seconds of one guessed token, in steps with this many sequences."""
        return (self._budget.step_s(num_sequences, num_sequences) or 0.0) / num_sequences

    def draft(self, wanted: Listed[tuple[Sequence, int]]) -> list[list[int] | None]:
        """Guess up to the given number of tokens for each sequence. Nothing is guessed for a
        sequence whose prompt is not computed yet: a part of it is computed instead. None means that
        the model can't guess for the sequence any more.
        """
        room = self._budget.tokens(len(wanted), len(wanted))
        drafts: list[list[int] | None] = [None] * len(wanted)
        rows: list[Row] = []
        going: _Group = []
        for index, (seq, count) in enumerate(wanted):
            own = self._updated(seq, count)
            if own is None:
                continue
            drafts[index] = []
            if (length := min(len(own.tokens) - own.num_computed, room)) > 0:
                row = self._row(own, length)
                rows.append(row)
                room -= length
                if row.samples:
                    going.append((index, own, count))
        if not rows:
            return drafts
        self._run(rows, going, drafts)
        for index, own, _ in going:
            own.tokens.extend(drafts[index] or ())
            own.num_sampling = 0
            own.num_computed = min(own.num_computed, len(own.tokens))
        return drafts

    def _run(self, rows: list[Row], going: _Group, drafts: list[list[int] | None]) -> None:
        """Launch the first step with these rows, then one step for each further token, and append
        the tokens of all steps to the drafts. A step reads the tokens of the step before it on the
        device.
        """
        began_at = time.monotonic()
        waits = [self._launch(rows).wait]
        num_prompt_tokens = sum(row.length for row in rows if row.length > MAX_LAG)
        if num_prompt_tokens:  # its time is measured apart from that of the other steps
            output = waits[0]()
            now = time.monotonic()
            self._budget.record(len(going), num_prompt_tokens, now - began_at)
            waits, began_at = [lambda: output], now
        groups = [going]
        while group := [each for each in groups[-1] if each[2] > len(groups)]:
            waits.append(self._launch([self._row(own, 1) for _, own, _ in group]).wait)
            groups.append(group)
        outputs = [wait() for wait in waits]
        num_timed = len(outputs) - (num_prompt_tokens > 0)
        if num_timed and going:
            self._budget.record(len(going), 0, (time.monotonic() - began_at) / num_timed)
        sampling = [index for index, row in enumerate(rows) if row.samples]
        finite = [outputs[0].finite[sampling], *(each.finite for each in outputs[1:])]
        broken: set[int] = set()  # drafts that end before a token that follows from NaN
        for group, output, is_finite in zip(groups, outputs, finite, strict=True):
            told = zip(group, output.tokens.tolist(), is_finite.tolist(), strict=True)
            for (index, _, _), token, is_right in told:
                draft = drafts[index]
                if not is_right:
                    broken.add(index)
                if draft is not None and index not in broken:
                    draft.append(token)

    def end(self, seq: Sequence) -> None:
        """Forget a sequence."""
        if (copy := self._copies.pop(seq, None)) is not None:
            self._pool.drop(copy.own.blocks)
            self._free_slots.append(copy.own.slot)

    def close(self) -> None:
        """Free the model and its KV cache. The second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._runner.close()

    def check(self) -> None:
        """Assert that slots and blocks belong to one copy each."""
        slots = [copy.own.slot for copy in self._copies.values()]
        assert sorted(slots + self._free_slots) == list(range(self._spec.max_slots)), slots
        self._pool.check((copy.own.blocks for copy in self._copies.values()), ())

    def _num_right(self, seq: Sequence, copy: _Copy) -> int:
        """How many first tokens of a copy are those of its sequence."""
        count, tokens = copy.num_known, copy.own.tokens
        while count < min(len(tokens), len(seq.tokens)) and tokens[count] == seq.tokens[count]:
            count += 1
        return count

    def _updated(self, seq: Sequence, count: int) -> Sequence | None:
        """The copy of a sequence, with its tokens and with blocks for `count` more. None if there
        is no room for it, or if it has a token that the draft model does not have.
        """
        copy = self._copies.get(seq) or self._new_copy(seq)
        if copy is None:
            return None
        own, num_right = copy.own, self._num_right(seq, copy)
        added = seq.tokens[num_right:]
        del own.tokens[num_right:]
        own.tokens.extend(added)
        own.num_computed = min(own.num_computed, num_right)
        copy.num_known = len(own.tokens)
        end = len(own.tokens) + count
        num_missing = -(-end // self._spec.block_size) - len(own.blocks)
        is_known = max(added, default=0) < self._spec.vocab_size
        if end > self._spec.max_seq_len or num_missing > self._pool.num_free or not is_known:
            self.end(seq)
            return None
        if num_missing > 0:
            own.blocks += self._pool.take(num_missing)
            own.room = len(own.blocks) * self._spec.block_size
        return own

    def _new_copy(self, seq: Sequence) -> _Copy | None:
        if not self._free_slots:
            return None
        asked = seq.params
        params = SamplingParams(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            seed=seq.seed,
        )
        self._num_lives += 1
        own = Sequence(
            request_id=seq.request_id,
            choice=seq.choice,
            tokens=packed(),
            num_prompt=seq.num_prompt,
            max_tokens=seq.max_tokens,
            params=params,
            stop_ids=frozenset(),
            namespace=seq.namespace,
            tenant=seq.tenant,
            priority=seq.priority,
            arrival=seq.arrival,
            slot=self._free_slots.pop(),
            life=self._num_lives,
        )
        copy = self._copies[seq] = _Copy(own)
        return copy

    def _row(self, own: Sequence, length: int) -> Row:
        start = own.num_computed
        own.num_computed += length
        samples = own.num_computed == len(own.tokens) + own.num_sampling
        own.num_sampling += samples
        return Row(own, start, length, samples, own.slot, own.life)

    def _launch(self, rows: list[Row]) -> PendingTokens:
        batch = ScheduledBatch(tuple(rows))
        handle = self._runner.forward(self._builder.inputs(batch))
        return self._runner.sample(handle, self._builder.sampling(batch))
