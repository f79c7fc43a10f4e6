"""Drives a `ModelRunner` without the runtime: the test decides each step."""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.runtime.model_runner import (
    FROM_DEVICE,
    SAMPLE,
    BatchInputs,
    ModelRunner,
    SamplingInputs,
    StepOutput,
)


@dataclass(eq=False)
class Track:
    """A sequence as the driver sees it: `num_computed` of its tokens lie in `blocks`."""

    slot: int
    tokens: list[int]
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)  # 0 where a block was freed
    num_computed: int = 0
    # The last token was drawn but the driver pretends not to know it.
    in_flight: bool = False
    # The checkpoint that the next step's state comes from, or goes to.
    load: int = -1
    save: int = -1


def ragged(values: ListOf[ListOf[int]], width: int) -> np.ndarray:
    table = np.zeros((len(values), width), np.int32)
    for row, items in zip(table, values, strict=True):
        row[: len(items)] = items
    return table


def sampling_inputs(
    rows: ListOf[int], slots: ListOf[int], positions: ListOf[int], **changes: Any
) -> SamplingInputs:
    """Greedy and plain, but for the fields that are given, as lists or arrays."""
    count = len(rows)
    defaults: dict[str, tuple[type, Any]] = {
        "temperature": (np.float32, [0.0] * count),
        "top_k": (np.int32, [0] * count),
        "top_p": (np.float32, [1.0] * count),
        "min_p": (np.float32, [0.0] * count),
        "repetition": (np.float32, [1.0] * count),
        "presence": (np.float32, [0.0] * count),
        "frequency": (np.float32, [0.0] * count),
        "bias_rows": (np.int32, []),
        "bias_ids": (np.int32, []),
        "bias_values": (np.float32, []),
        "seed": (np.int64, [0] * count),
        "choice": (np.int32, [0] * count),
        "num_logprobs": (np.int32, [-1] * count),
        "forced": (np.int32, [SAMPLE] * count),
        "hidden_rows": (np.int32, []),
        "history_slots": (np.int32, []),
        "history_start": (np.int32, [0]),
        "history_tokens": (np.int32, []),
        "history_num_prompt": (np.int32, []),
        "host_rows": (np.int32, []),
    }
    fields = {
        name: np.asarray(changes.pop(name, default), kind)
        for name, (kind, default) in defaults.items()
    }
    mask = changes.pop("mask", None)
    assert not changes, changes
    return SamplingInputs(
        sample_rows=np.asarray(rows, np.int32),
        slots=np.asarray(slots, np.int32),
        position=np.asarray(positions, np.int32),
        mask=mask,
        **fields,
    )


class RunnerDriver:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._size = runner.spec.block_size
        self._next_block = 1
        self.free_window_blocks = list(range(1, runner.spec.num_window_blocks))
        self._next_slot = 0

    def add(self, tokens: ListOf[int], prefix: Track | None = None, shared: int = 0) -> Track:
        """A new sequence; its first `shared` blocks are those of `prefix`, already computed."""
        track = Track(self._next_slot, list(tokens), len(tokens))
        self._next_slot += 1
        if prefix is not None:
            track.blocks = prefix.blocks[:shared]
            track.num_computed = shared * self._size
        return track

    def inputs(self, work: ListOf[tuple[Track, int]]) -> BatchInputs:
        """Each track computes its next `count` tokens."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths, logit_rows = [0], [], []
        for track, count in work:
            end = track.num_computed + count
            while len(track.blocks) * self._size < end:
                track.blocks.append(self._next_block)
                self._next_block += 1
            self._slide(track, end)
            span = range(track.num_computed, end)
            ids += track.tokens[span.start : end]
            if track.in_flight and end == len(track.tokens):
                ids[-1] = FROM_DEVICE
            positions += span
            slots += [track.blocks[p // self._size] * self._size + p % self._size for p in span]
            starts.append(starts[-1] + count)
            lengths.append(end)
            if end == len(track.tokens):
                logit_rows.append(starts[-1] - 1)
        rows = len(work)
        tables = ragged([track.blocks for track, _ in work], max(len(t.blocks) for t, _ in work))
        windowed = None
        if self.runner.spec.window is not None:
            windowed = ragged([track.window_blocks for track, _ in work], tables.shape[1])
        return BatchInputs(
            token_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            write_slots=np.array(slots, np.int64),
            query_start=np.array(starts, np.int32),
            seq_lens=np.array(lengths, np.int32),
            num_prompt=np.array([track.num_prompt for track, _ in work], np.int32),
            block_tables=tables,
            slots=np.array([track.slot for track, _ in work], np.int32),
            logit_rows=np.array(logit_rows, np.int32),
            adapter_ids=np.zeros(rows, np.int32),
            prefix_groups=np.full(rows, -1, np.int32),
            prefix_blocks=np.zeros(0, np.int32),
            state_load=self._checkpoints([track.load for track, _ in work]),
            state_save=self._checkpoints([track.save for track, _ in work]),
            window_tables=windowed,
            window_slots=None if windowed is None else self._slots(windowed, starts, positions),
        )

    def _slide(self, track: Track, end: int) -> None:
        """Free the windowed blocks that the window has left, and allocate those up to `end`."""
        window = self.runner.spec.window
        if window is None:
            return
        for index in range(max(0, track.num_computed - window + 1) // self._size):
            if block := track.window_blocks[index]:
                self.free_window_blocks.append(block)
                track.window_blocks[index] = 0
        while len(track.window_blocks) * self._size < end:
            track.window_blocks.append(self.free_window_blocks.pop())

    def _slots(self, tables: np.ndarray, starts: ListOf[int], positions: ListOf[int]) -> np.ndarray:
        at = np.array(positions)
        row_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return tables[row_of, at // self._size].astype(np.int64) * self._size + at % self._size

    def _checkpoints(self, numbers: list[int]) -> np.ndarray | None:
        """Indices of states: the checkpoints follow the slots and the spare slot."""
        spec = self.runner.spec
        if not spec.has_state or max(numbers) < 0:
            return None
        return np.array([n + spec.max_slots + 1 if n >= 0 else -1 for n in numbers], np.int32)

    def step(self, work: ListOf[tuple[Track, int]], **sampling: Any) -> StepOutput:
        """One step; a track whose last token was computed gets one more."""
        handle = self.runner.forward(self.inputs(work))
        for track, count in work:
            track.num_computed += count
        sampled = [
            (row, track)
            for row, (track, _) in enumerate(work)
            if track.num_computed == len(track.tokens)
        ]
        output = self.runner.sample(
            handle,
            sampling_inputs(
                [row for row, _ in sampled],
                [track.slot for _, track in sampled],
                [len(track.tokens) for _, track in sampled],
                **sampling,
            ),
        ).wait()
        for (_, track), token in zip(sampled, output.tokens, strict=True):
            track.tokens.append(int(token))
        return output

    def generate(self, tracks: ListOf[Track], num_tokens: int, chunk: int = 1 << 30) -> list[list]:
        """Greedy tokens of each track, all in one batch, prompts at most `chunk` tokens a step."""
        while any(len(t.tokens) - t.num_prompt < num_tokens for t in tracks):
            self.step(
                [
                    (t, min(chunk, len(t.tokens) - t.num_computed))
                    for t in tracks
                    if len(t.tokens) - t.num_prompt < num_tokens
                ]
            )
        return [t.tokens[t.num_prompt :] for t in tracks]
