"""Builds the numpy input arrays of a step from its scheduled rows.

Each running sequence has a slot. Block tables and sampling parameters are kept in arrays that are
indexed by slot. These arrays are written only when a slot gets a new sequence, or a sequence gets a
new block. Each step gathers the entries of its slots. So a steady decode step takes only a few
array operations, however many rows it has.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import replace

import numpy as np

from engine.core.interfaces.request import SamplingParams
from engine.runtime.model_runner import (
    FROM_DEVICE,
    I32,
    I64,
    NULL_BLOCK,
    SAMPLE,
    U32,
    BatchInputs,
    Bools,
    RunnerSpec,
    SamplingInputs,
)
from engine.runtime.samplers.prompt_logprobs import with_scores
from engine.runtime.samplers.repetition import logit_biases, with_allowed
from engine.runtime.sequence import CacheExtension, Extension, Row, ScheduledBatch, Sequence, packed

NEGLIGIBLE = 1e-30
MAX_INT32 = 2**31 - 1
NO_BIASES = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))


class BatchBuilder:
    """Builds the inputs of each step. It keeps the block tables and the sampling parameters of all
    running sequences in host arrays that are indexed by slot.
    """

    def __init__(self, spec: RunnerSpec, groups: Listed[CacheExtension] = ()) -> None:
        """`groups` are those of the KV cache."""
        self._spec = spec
        self._groups = groups
        self._extended: tuple[Extension, ...] = ()  # what adds arrays to the present rows
        slots = spec.max_slots
        blocks_per_slot = -(-spec.max_seq_len // spec.block_size)
        self._tables = np.zeros((slots, blocks_per_slot), np.int32)
        self._rooms = [0] * slots  # `Sequence.room` of the sequence when its tables were copied
        # For each slot: which admission of a sequence (`Sequence.life`) the arrays describe.
        self._lives = [0] * slots
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._repetition = np.ones(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)
        self._seed = np.zeros(slots, np.int64)
        self._choice = np.zeros(slots, np.int32)
        self._num_prompt = np.zeros(slots, np.int32)
        self._num_logprobs = np.full(slots, -1, np.int32)
        self._may_bias = np.zeros(slots, bool)  # biases or masks may differ in each step
        self._on_host = np.zeros(slots, bool)
        self._has_history = [False] * slots  # whether the runner has a valid token history
        # The arrays of the last step, if it was pure decode. If the next step has the same rows,
        # its arrays are derived from them instead of being built from scratch.
        self._continued: tuple[int, ...] | None = None  # `life` of each row of that step
        self._inputs: BatchInputs | None = None
        # None means that the sampling inputs of the next step must be built from scratch.
        self._sampling: SamplingInputs | None = None

    def inputs(self, batch: ScheduledBatch) -> BatchInputs:
        rows = batch.rows
        has_grown, only_continues = False, True
        lives, rooms = self._lives, self._rooms
        for seq, _, length, samples, slot, life, num_scored, _ in rows:
            if lives[slot] != life or rooms[slot] != seq.room:
                self._sync(seq, slot, life)
                has_grown = True
            if length != 1 or not samples or num_scored:
                only_continues = False
        continued = tuple([row[5] for row in rows]) if only_continues else None
        if self._inputs is not None and continued is not None and continued == self._continued:
            inputs = self._one_further(self._inputs, rows, has_grown)
            for each in self._extended:
                inputs = each.advance_inputs(inputs, rows)
        else:
            inputs = self._from_scratch(rows)
            of_rows = [each for row in rows for each in row.seq.extensions]
            self._extended = (*self._groups, *dict.fromkeys(of_rows))
            for each in self._extended:
                inputs = each.add_inputs(inputs, rows)
            self._sampling = None
        self._inputs, self._continued = inputs, continued
        return inputs

    def forget(self) -> None:
        """Steps have failed, so that the runner's token histories are not known any more."""
        self._has_history = [False] * len(self._has_history)
        self._sampling = None

    def _one_further(
        self, last: BatchInputs, rows: tuple[Row, ...], has_grown: bool
    ) -> BatchInputs:
        """Inputs for the same rows as in the last step, each advanced by one token."""
        size = self._spec.block_size
        positions = np.array([row.start for row in rows], np.int32)
        blocks, offsets = np.divmod(positions, size)
        tables, groups, shared = last.block_tables, last.prefix_groups, last.prefix_blocks
        width = int(blocks.max()) + 1
        if has_grown or width > tables.shape[1]:
            tables = self._tables[last.slots, :width]
        if has_grown or not offsets.all():  # some row starts a new block
            groups, shared = _prefix_groups(tables, blocks.astype(np.int64))
        return replace(
            last,
            token_ids=_token_ids(rows),
            positions=positions,
            write_slots=self._tables[last.slots, blocks].astype(np.int64) * size + offsets,
            seq_lens=positions + np.int32(1),
            block_tables=tables,
            prefix_groups=groups,
            prefix_blocks=shared,
            rope_positions=None if last.rope_positions is None else last.rope_positions + 1,
            state_load=None,
            state_save=None,
        )

    def _from_scratch(self, rows: tuple[Row, ...]) -> BatchInputs:
        size = self._spec.block_size
        _, *columns = zip(*rows, strict=True)
        starts, counts = np.array(columns[:2], np.int64)
        samples, slots = np.array(columns[2], bool), np.array(columns[3], np.int32)
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(query_start[-1]) - (query_start[:-1] - starts)[row_of]
        places = slots[row_of], positions // size
        offsets = positions % size
        seq_lens = starts + counts
        width = max(1, -(-int(seq_lens.max(initial=1)) // size))
        tables = self._tables[slots, :width]
        groups, group_blocks = _prefix_groups(tables, starts // size)
        return BatchInputs(
            token_ids=_token_ids(rows),
            positions=positions.astype(np.int32),
            write_slots=self._tables[places].astype(np.int64) * size + offsets,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            num_prompt=self._num_prompt[slots],
            block_tables=tables,
            slots=slots,
            logit_rows=_logit_rows(query_start, samples, columns[5], columns[6]),
            adapter_ids=np.zeros(len(rows), np.int32),
            prefix_groups=groups,
            prefix_blocks=group_blocks,
        )

    def sampling(self, batch: ScheduledBatch, mask: U32 | None = None) -> SamplingInputs:
        """Sampling parameters of the step's rows. Call this only after the previous step's tokens
        are known.

        `mask` has the token masks of grammars, one for each row that samples, in the same order.
        """
        last, inputs = self._sampling, self._inputs
        if last is not None and inputs is not None and mask is None:
            return replace(last, position=inputs.seq_lens)
        sampling = self._sampling_from_scratch(batch, mask)
        is_plain = mask is None and not self._may_bias[sampling.slots].any()
        if self._continued is not None and is_plain and not len(sampling.hidden_rows):
            self._sampling = _without_history(sampling)
        return sampling

    def _sampling_from_scratch(self, batch: ScheduledBatch, mask: U32 | None) -> SamplingInputs:
        sampled = [
            (index, each)
            for index, row in enumerate(batch.rows)
            if row.samples
            for each in row.sampled
        ]
        rows = [row for _, row in sampled]
        slots = np.array([row.slot for row in rows], np.int32)
        biased = np.flatnonzero(self._may_bias[slots]).tolist()
        biases = NO_BIASES
        if biased:
            biases = logit_biases([(index, rows[index]) for index in biased])
        penalties = self._repetition[slots], self._presence[slots], self._frequency[slots]
        is_penalized = (penalties[0] != 1) | (penalties[1] != 0) | (penalties[2] != 0)
        histories = self._histories(batch, set(slots[is_penalized].tolist()))
        lengths = [0] + [len(row.seq.tokens) + len(row.draft) for row in histories]
        tokens = [token for row in histories for token in (*row.seq.token_ids, *row.draft)]
        pooled = [index for index, row in enumerate(rows) if row.seq.pools]
        for index in biased:
            rules = rows[index].seq.rules
            if rules is not None and rules.allowed is not None:
                mask = with_allowed(mask, index, rules.allowed, len(rows))
        sampling = SamplingInputs(
            sample_rows=np.array([index for index, _ in sampled], np.int32),
            slots=slots,
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            repetition=penalties[0],
            presence=penalties[1],
            frequency=penalties[2],
            bias_rows=biases[0],
            bias_ids=biases[1],
            bias_values=biases[2],
            seed=self._seed[slots],
            choice=self._choice[slots],
            position=np.array([row.start + row.length for row in rows], np.int32),
            mask=mask,
            forced=np.full(len(rows), SAMPLE, np.int32),
            hidden_rows=np.array(pooled, np.int32),
            num_logprobs=self._num_logprobs[slots],
            history_slots=np.array([row.slot for row in histories], np.int32),
            history_start=np.cumsum(lengths, dtype=np.int32),
            history_tokens=np.array(tokens, np.int32),
            history_num_prompt=np.array([row.seq.num_prompt for row in histories], np.int32),
            host_rows=np.flatnonzero(self._on_host[slots]).astype(np.int32),
        )
        has_scores = any(row.num_scored for row in batch.rows)
        return with_scores(sampling, batch) if has_scores else sampling

    def _histories(self, batch: ScheduledBatch, penalized: set[int]) -> list[Row]:
        """The rows whose token history is sent to the runner. A draft is sent with the history,
        because the penalties of a token that is sampled after it count its tokens.
        """
        found, known = [], self._has_history
        for row in batch.rows:
            if not row.samples or row.seq.finish_reason is not None:
                continue
            if (row.draft or not known[row.slot]) and row.slot in penalized:
                found.append(row)
            known[row.slot] = True
        return found

    def _sync(self, seq: Sequence, slot: int, life: int) -> None:
        """Bring the slot's arrays up to date: copy the sequence's block tables and, if the sequence
        was just admitted, its sampling parameters.
        """
        is_new = self._lives[slot] != life
        if is_new:
            self._set_params(slot, seq)
            self._tables[slot] = NULL_BLOCK
            self._has_history[slot] = False
            self._lives[slot] = life
            self._rooms[slot] = 0
        known = self._rooms[slot] // self._spec.block_size
        self._tables[slot, known : len(seq.blocks)] = seq.blocks[known:]
        for each in self._groups:
            each.sync(seq, slot, is_new)
        self._rooms[slot] = seq.room

    def _set_params(self, slot: int, seq: Sequence) -> None:
        params = seq.params
        self._on_host[slot] = params.sampled_on_host
        self._may_bias[slot] = (
            params.sampled_on_host
            or params.min_tokens > 0
            or params.dry_multiplier > 0
            or bool(params.logit_bias or params.allowed_token_ids)
            or (seq.rules is not None and bool(seq.rules.bad_words))
        )
        if params.sampled_on_host:  # the device only returns the token that the host sampled
            params = SamplingParams(temperature=0.0, logprobs=params.logprobs)
        # Samplers divide by the temperature, so a temperature near 0 would give infinite logits. It
        # is replaced by 0, which means greedy. A top-p of 0 would keep no token.
        self._temperature[slot] = params.temperature if params.temperature > NEGLIGIBLE else 0.0
        self._top_k[slot] = min(params.top_k, MAX_INT32)
        self._top_p[slot] = max(params.top_p, NEGLIGIBLE)
        self._min_p[slot] = params.min_p
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._seed[slot] = seq.seed
        self._choice[slot] = seq.choice
        self._num_prompt[slot] = seq.num_prompt
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs


def _without_history(sampling: SamplingInputs) -> SamplingInputs:
    none = np.zeros(0, np.int32)
    return replace(
        sampling,
        history_slots=none,
        history_start=np.zeros(1, np.int32),
        history_tokens=none,
        history_num_prompt=none,
    )


def _token_ids(rows: tuple[Row, ...]) -> I32:
    ids = packed()
    for seq, start, length, *_, draft in rows:
        tokens = seq.tokens
        known = length - len(draft)
        if known > 1:
            ids.extend(tokens[start : start + known])
        else:  # a decode row, whose token the host may not know yet
            ids.append(tokens[start] if start < len(tokens) else FROM_DEVICE)
        ids.extend(draft)
    return np.frombuffer(ids, np.int32)


def _logit_rows(
    query_start: I32, samples: Bools, scored: Iterable[int], drafts: Iterable[tuple[int, ...]]
) -> I32:
    """Indices of the step's tokens whose logits are needed. A row needs logits at each position
    whose next prompt token gets a logprob, and at its last position if it samples. A row with a
    draft needs logits at all positions.
    """
    # In both cases, these positions are the first ones of the row.
    more = np.array([*map(len, drafts)], np.int32) + np.array([*scored], np.int32)
    if not more.any():
        return query_start[1:][samples] - 1
    counts = more + samples
    ends = np.cumsum(counts)
    firsts = np.where(more > 0, query_start[:-1], query_start[1:] - 1)
    return np.repeat(firsts - (ends - counts), counts).astype(np.int32) + np.arange(
        ends[-1], dtype=np.int32
    )


def _prefix_groups(tables: I32, full_blocks: I64) -> tuple[I32, I32]:
    """Group the rows whose block tables begin with the same blocks, so that attention can read
    these blocks once. `full_blocks` says how many blocks of each row were full before this step.
    Only these count. Returns `prefix_groups` and `prefix_blocks` of `BatchInputs`.
    """
    groups = np.full(len(tables), -1, np.int32)
    candidates = np.flatnonzero(full_blocks > 0)
    order = candidates[np.argsort(tables[candidates, 0], kind="stable")]
    firsts = tables[order, 0]
    is_first = np.ones(len(order), bool)
    is_first[1:] = firsts[1:] != firsts[:-1]
    if is_first.all():
        return groups, np.zeros(0, np.int32)
    sizes = np.diff(np.flatnonzero(is_first), append=len(order))
    is_group = sizes > 1
    members = order[np.repeat(is_group, sizes)]
    sizes = sizes[is_group]
    starts = np.cumsum(sizes) - sizes
    groups[members] = np.repeat(np.arange(len(sizes)), sizes)
    # For each row of a group, find where its shared prefix ends. It ends at the first block that
    # differs from the group's first row, or at the end of the row's full blocks.
    limits = full_blocks[members]
    width = int(limits.max())
    differs = tables[members, :width] != np.repeat(tables[members[starts], :width], sizes, axis=0)
    ends = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    return groups, np.minimum.reduceat(np.minimum(ends, limits), starts).astype(np.int32)
