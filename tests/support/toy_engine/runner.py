"""A model without weights for tests of the runtime: its output is a hash of its KV contents.

Each KV cell holds a hash of the previous cell and its own token, read through the block table. A
block that is wrong, stale, freed too early, or written while it is shared changes the output. So
"equal to generating alone" is an exact check. If the spec has a window, the cells of the last
positions are read from a second group of blocks as well. `ToyRunner` implements the whole model
runner interface in numpy; `generate_alone` is the oracle.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from engine.runtime.model_runner import (
    FROM_DEVICE,
    NULL_BLOCK,
    SAMPLE,
    BatchInputs,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)

VOCAB = 24
NAN_TOKEN = 22  # computing it gives a non-finite row
CRASH_TOKEN = 23  # computing it raises
IMPATIENT_S = 1.0  # when a step counts as hung, in toy engines that are impatient
MAX_KEPT = 2**15  # results of each pure function below, because tests compute the same ones often


class ToyCrash(RuntimeError):
    """Raised in place of a kernel error."""


@lru_cache(MAX_KEPT)
def mix(*values: int) -> int:
    data = struct.pack(f"<{len(values)}q", *values)
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def scatter(state: int, size: int = VOCAB) -> np.ndarray:
    """A number in (0, 1) for each token, from one hash."""
    words = (np.arange(1, size + 1, dtype=np.uint64) * np.uint64(2 * state + 1)) ^ np.uint64(state)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return ((words >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32


def toy_logits(cells: Sequence[int]) -> np.ndarray:
    """Logits from all KV cells of the context; the two reserved tokens are never likely."""
    return _logits_of(tuple(cells))


@lru_cache(MAX_KEPT)
def _logits_of(cells: tuple[int, ...]) -> np.ndarray:
    logits = scatter(mix(*cells)) * 8.0
    logits[[NAN_TOKEN, CRASH_TOKEN]] = -1e9
    logits.flags.writeable = False
    return logits


def prompt_logits(prompt: Sequence[int]) -> list[np.ndarray]:
    """The logits after each of a prompt's tokens."""
    cells, parent, found = [], 1, []
    for token in prompt:
        parent = mix(parent, token)
        cells.append(parent)
        found.append(toy_logits(cells))
    return found


def prompt_logprobs(prompt: Sequence[int]) -> list[float]:
    """The logprobs of all prompt tokens but the first."""
    pairs = zip(prompt_logits(prompt), prompt[1:], strict=False)
    return [
        float(row[token] - row.max() - np.log(np.exp(row - row.max()).sum()))
        for row, token in pairs
    ]


@dataclass
class History:
    prompt: list[int]
    output: list[int]


@dataclass(frozen=True)
class Draw:
    """One row's sampling parameters, as plain values."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: frozenset[int] | None = None
    seed: int = 0
    choice: int = 0
    position: int = 0


def sample_row(logits: np.ndarray, draw: Draw, history: History) -> int:
    """Sample in the documented order: penalties, bias, mask, temperature, top-k, top-p, min-p,
    sample.
    """
    return _sampled(logits.tobytes(), draw, tuple(history.prompt), tuple(history.output))


@lru_cache(MAX_KEPT)
def _sampled(raw: bytes, draw: Draw, prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
    logits = np.frombuffer(raw).copy()
    for token in {*prompt, *output}:
        value = logits[token]
        logits[token] = value / draw.repetition if value > 0 else value * draw.repetition
    for token in set(output):
        logits[token] -= draw.presence + draw.frequency * output.count(token)
    for token, bias in draw.bias:
        logits[token] += bias
    if draw.allowed is not None:
        logits[[v for v in range(len(logits)) if v not in draw.allowed]] = -np.inf
    if draw.temperature == 0:
        return int(logits.argmax())
    logits = logits / draw.temperature
    order = np.argsort(-logits, kind="stable")
    keep = np.ones(len(logits), bool)
    if draw.top_k:
        keep[order[draw.top_k :]] = False
    probs = np.where(keep, np.exp(logits - logits.max()), 0.0)
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    keep[order[before >= draw.top_p]] = False
    keep &= probs >= draw.min_p * probs.max()
    noise = scatter(mix(draw.seed, draw.choice, draw.position), len(logits))
    scores = np.where(keep, logits - np.log(-np.log(noise)), -np.inf)
    return int(scores.argmax())


class Pending:
    def __init__(self, output: StepOutput) -> None:
        self._output: StepOutput | None = output

    def wait(self) -> StepOutput:
        output, self._output = self._output, None
        assert output is not None, "wait() was called twice"
        return output


class ToyRunner:
    """The model runner interface in numpy. A test can inspect every step before its writes with
    `on_write(inputs)`.
    """

    vocab_size = VOCAB

    def __init__(self, spec: RunnerSpec, on_write=lambda inputs: None) -> None:
        self._spec = replace(spec, vocab_size=self.vocab_size)
        self._on_write = on_write
        self.cells = np.zeros(spec.num_blocks * spec.block_size, np.int64)
        # With `has_state`, a token's hash continues its slot's state instead of the cell before it.
        self.states = np.zeros(spec.max_slots + 1 + spec.num_checkpoints, np.int64)
        self.window_cells = np.zeros(spec.num_window_blocks * spec.block_size, np.int64)
        self._last_token = [0] * spec.max_slots
        self._histories: dict[int, History] = {}
        self.num_tokens = 0
        self.closed = False

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def poison(self, blocks: list[int], cells: np.ndarray) -> None:
        """Overwrite the contents of blocks that have no holder."""
        for block in blocks:
            start = block * self._spec.block_size
            cells[start : start + self._spec.block_size] = 0xDEAD

    def forward(self, inputs: BatchInputs):
        size, has_state = self._spec.block_size, self._spec.has_state
        self._check_shapes(inputs)
        self._on_write(inputs)
        slots, starts = inputs.slots.tolist(), inputs.query_start.tolist()
        positions, writes = inputs.positions.tolist(), inputs.write_slots.tolist()
        lengths, tables = inputs.seq_lens.tolist(), inputs.block_tables.tolist()
        needed, tokens = set(inputs.logit_rows.tolist()), inputs.token_ids.tolist()
        for row, slot in enumerate(slots):
            for index in range(starts[row], starts[row + 1]):
                if tokens[index] == FROM_DEVICE:
                    tokens[index] = self._last_token[slot]
        if CRASH_TOKEN in tokens:
            if has_state:  # a failed step may have changed them
                self.states[inputs.slots] = 0xDEAD
            raise ToyCrash("a kernel failed")
        self._copy_states(inputs.state_load, inputs.slots)
        self.num_tokens += len(tokens)
        finite, logits = [], {}
        for row, table in enumerate(tables):
            first, last = starts[row], starts[row + 1]
            where = [table[p // size] * size + p % size for p in range(lengths[row])]
            cells = self.cells[where].tolist()
            for index in range(first, last):
                position = positions[index]
                assert table[0] == NULL_BLOCK or where[position] == writes[index]
                parent = cells[position - 1] if position else 1
                if has_state and position:
                    parent = int(self.states[slots[row]])
                cell = cells[position] = self.new_cell(inputs, row, index, parent, tokens[index])
                self.states[slots[row]] = cell
                self.cells[where[position]] = cell
                if inputs.window_slots is not None:
                    self.window_cells[inputs.window_slots[index]] = cell
            finite.append(NAN_TOKEN not in tokens[first:last])
            for index in needed & set(range(first, last)):
                seen = cells[: positions[index] + 1]
                if inputs.window_tables is not None:
                    self._look_through_window(seen, inputs.window_tables[row])
                logits[index] = self.logits_after(seen)
        self._copy_states(inputs.slots, inputs.state_save)
        return [logits[index] for index in inputs.logit_rows.tolist()], np.array(finite, bool)

    def new_cell(self, inputs: BatchInputs, row: int, index: int, parent: int, token: int) -> int:
        """The KV cell of a token of the step. `parent` is the cell before it."""
        return mix(parent, token)

    def logits_after(self, cells: list[int]) -> np.ndarray:
        return toy_logits(cells)

    def _copy_states(self, sources: np.ndarray | None, targets: np.ndarray | None) -> None:
        if sources is None or targets is None:
            return
        rows = np.flatnonzero((sources >= 0) & (targets >= 0))
        self.states[targets[rows]] = self.states[sources[rows]]

    def _look_through_window(self, cells: list[int], table: np.ndarray) -> None:
        """Change the cells within the window that differ in the second group of blocks."""
        size = self._spec.block_size
        for position in range(max(0, len(cells) - self._spec.window), len(cells)):
            other = int(self.window_cells[table[position // size] * size + position % size])
            if other != cells[position]:
                cells[position] = mix(cells[position], other)

    def logits(self, handle, rows: np.ndarray) -> np.ndarray:
        return np.array([handle[0][row] for row in rows], np.float32)

    def sample(self, handle, sampling: SamplingInputs) -> Pending:
        logits, finite = handle
        for h, slot in enumerate(sampling.history_slots):
            start, end = sampling.history_start[h : h + 2]
            tokens = sampling.history_tokens[start:end].tolist()
            split = int(sampling.history_num_prompt[h])
            self._histories[int(slot)] = History(tokens[:split], tokens[split:])
        tokens, appended = [], []
        for r, slot in enumerate(sampling.slots.tolist()):
            if sampling.forced[r] != SAMPLE:
                tokens.append(int(sampling.forced[r]))
                if r in sampling.host_rows:
                    self._last_token[slot] = tokens[-1]
                continue
            history = History([], [])
            if sampling.repetition[r] != 1 or sampling.presence[r] or sampling.frequency[r]:
                history = self._histories.setdefault(slot, history)
            # A slot with a draft has several rows. Each sees the tokens before its own position.
            num_output = int(sampling.position[r]) - len(history.prompt)
            seen = History(history.prompt, history.output[:num_output])
            token = sample_row(logits[r], self._draw(sampling, r), seen)
            appended.append((history, num_output, token))
            self._last_token[slot] = token
            tokens.append(token)
        for history, place, token in appended:
            history.output[place : place + 1] = [token]
        return Pending(self._output(logits, tokens, finite, sampling))

    kv_identity = "toy"

    def bytes_per_block(self, group: str) -> int:
        return 8 if group == "state" else 8 * self._spec.block_size

    def read_blocks(self, group: str, blocks):
        rows = self._rows(group)[list(blocks)].copy()
        return lambda: rows.view(np.uint8)

    def write_blocks(self, group: str, blocks, rows: np.ndarray) -> None:
        self._rows(group)[list(blocks)] = np.ascontiguousarray(rows).view(np.int64)

    def _rows(self, group: str) -> np.ndarray:
        if group == "state":
            return self.states[:, None]
        cells = self.cells if group == "full" else self.window_cells
        return cells.reshape(-1, self._spec.block_size)

    def close(self) -> None:
        self.closed = True

    def _draw(self, s: SamplingInputs, r: int) -> Draw:
        allowed = None
        if s.mask is not None:
            bits = np.unpackbits(s.mask[r].view(np.uint8), bitorder="little")
            allowed = frozenset(np.flatnonzero(bits[: self.vocab_size]).tolist())
        bias = []
        if len(s.bias_rows):
            chosen = np.flatnonzero(s.bias_rows == r)
            bias = [(int(s.bias_ids[i]), float(s.bias_values[i])) for i in chosen]
        return Draw(
            temperature=float(s.temperature[r]),
            top_k=int(s.top_k[r]),
            top_p=float(s.top_p[r]),
            min_p=float(s.min_p[r]),
            repetition=float(s.repetition[r]),
            presence=float(s.presence[r]),
            frequency=float(s.frequency[r]),
            bias=tuple(bias),
            allowed=allowed,
            seed=int(s.seed[r]),
            choice=int(s.choice[r]),
            position=int(s.position[r]),
        )

    def _output(self, logits, tokens, finite, sampling: SamplingInputs) -> StepOutput:
        top = int(sampling.num_logprobs.max(initial=-1))
        hidden = None
        if len(sampling.hidden_rows):
            hidden = np.array([logits[row] for row in sampling.hidden_rows], np.float32)
        if top < 0:
            return StepOutput(np.array(tokens, np.int32), finite, hidden=hidden)
        logprobs = np.array(
            [row - np.log(np.exp(row - row.max()).sum()) - row.max() for row in logits]
        )
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :top]
        return StepOutput(
            np.array(tokens, np.int32),
            finite,
            logprobs=logprobs[np.arange(len(tokens)), tokens].astype(np.float32),
            top_ids=order.astype(np.int32),
            top_logprobs=np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
            hidden=hidden,
        )

    def _check_shapes(self, inputs: BatchInputs) -> None:
        rows, tokens = len(inputs.slots), len(inputs.token_ids)
        assert inputs.query_start[0] == 0 and inputs.query_start[-1] == tokens
        assert len(inputs.positions) == len(inputs.write_slots) == tokens
        assert len(inputs.seq_lens) == len(inputs.block_tables) == rows
        assert len(set(inputs.slots.tolist())) == rows, "two rows have one slot"
        if rows == 1 and inputs.block_tables[0, 0] == NULL_BLOCK:
            return  # a warm-up step without a sequence
        assert len(set(inputs.write_slots.tolist())) == tokens, "two tokens go to one place"
        assert (inputs.write_slots >= self._spec.block_size).all(), "the null block is written"
        for row in range(rows):
            used = -(-int(inputs.seq_lens[row]) // self._spec.block_size)
            assert (inputs.block_tables[row, :used] != NULL_BLOCK).all(), "a hole in a table"
        self._check_windows(inputs)
        for group, shared in enumerate(inputs.prefix_blocks):
            members = np.flatnonzero(inputs.prefix_groups == group)
            tables = inputs.block_tables[members, :shared]
            assert shared >= 1 and len(members) > 1 and (tables == tables[0]).all()
            first = inputs.positions[inputs.query_start[members]]
            assert (first >= shared * self._spec.block_size).all()

    def _check_windows(self, inputs: BatchInputs) -> None:
        window, size = self._spec.window, self._spec.block_size
        if window is None:
            assert inputs.window_tables is None and inputs.window_slots is None
            return
        assert inputs.window_tables.shape == inputs.block_tables.shape
        assert len(set(inputs.window_slots.tolist())) == len(inputs.token_ids)
        assert (inputs.window_slots >= size).all(), "the null block is written"
        for row, table in enumerate(inputs.window_tables):
            first = int(inputs.positions[inputs.query_start[row]])
            needed = max(0, first - window + 1) // size, -(-int(inputs.seq_lens[row]) // size)
            assert (table[slice(*needed)] != NULL_BLOCK).all(), "a hole within the window"
