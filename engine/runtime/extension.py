"""The seam between the core of the runtime and the features that only some models and requests use.

The core is `Scheduler`, `KVCache` and `BatchBuilder`. It knows requests, tokens, rows, slots and
blocks. A feature is an `Extension` with its own state, by sequence. The core calls its hooks, and
knows no more of it. A feature that no request has used is not attached, and costs nothing.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from engine.core.errors import EngineError
from engine.core.interfaces.request import CachedPrefixes, GenerateRequest, TokenDelta
from engine.core.interfaces.stats import EngineStats
from engine.runtime.model_runner import BatchInputs, ModelRunner, StepOutput

if TYPE_CHECKING:
    from engine.runtime.groups.aux_block_state import AuxBlockState
    from engine.runtime.kv_cache import KVCache
    from engine.runtime.sequence import Row, ScheduledBatch, Tokens
    from engine.runtime.sequence import Sequence as Seq

E = TypeVar("E", bound="Extension")
Lack = Literal["slots", "budget", "blocks"]  # what the rest of the waiting queue lacks


class Extension:
    """A feature of the scheduler. Every hook does nothing unless a feature needs it.

    The scheduler's extensions are told of every sequence, and ignore those that they do not know.
    The extensions of a sequence (`Sequence.extensions`) also shape its rows and their arrays.
    """

    # Which drafts may be verified for its sequences
    drafts: Literal["any", "lookup", "none"] = "any"

    # The life of a sequence

    def queued(
        self, seq: "Seq", request: GenerateRequest, submitted_at: float, queued_at: float
    ) -> None:
        """A sequence begins to wait. `submitted_at` is when its request came."""

    def held(self, seq: "Seq", owner: "Seq | None") -> None:
        """A waiting sequence waits for blocks that `owner` computes. None: for those of a tier."""

    def admitted(self, seq: "Seq", is_first: bool, chain: list[int], uses_cache: bool) -> None:
        """A sequence has got a slot and blocks, for the first time or after a preemption. `chain`
        are the hashes of the prompt's blocks.
        """

    def confirmed(self, seq: "Seq", start: int, samples: bool, now: float) -> TokenDelta | None:
        """A step has computed prompt tokens from `start` to `Sequence.num_confirmed`. Returns what
        the client is told of it, if anything.
        """
        return None

    def verified(self, row: "Row", num_accepted: int, is_finite: bool) -> None:
        """A step has verified the draft of a row."""

    def preempted(self, seq: "Seq") -> None:
        """A sequence is about to lose its slot and its blocks."""

    def complete(self, seq: "Seq", delta: TokenDelta, is_first: bool, now: float) -> TokenDelta:
        """Add to the first delta of a sequence with a token, or to its last one."""
        return delta

    def holds_back(self, seq: "Seq", delta: TokenDelta) -> bool:
        """Whether the extension keeps the last delta of a sequence, and sends it later."""
        return False

    def ended(self, seq: "Seq") -> None:
        """A sequence has ended, and its last delta is made. Safe to call twice."""

    def aborted(self, request_id: str) -> None:
        """A client has aborted a request, or choices of it. Its sequences may have ended before."""

    # The steps of the engine

    def planned(self, now: float) -> None:
        """A step is going to be planned."""

    def blocked(self, lack: Lack) -> None:
        """The rest of the waiting queue can't be scheduled in this step."""

    def plan(self, rows: "list[Row]", budget: int) -> None:
        """Change the rows of a step before it is launched. All have at most `budget` tokens."""

    def captured(self, batch: "ScheduledBatch", output: StepOutput) -> "list[Seq]":
        """Take the activations that a step has captured. Returns the sequences that fail."""
        return []

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do."""
        return False

    def advance(self, runner: ModelRunner) -> list[TokenDelta]:
        """Do a part of the work that is left after sequences have ended."""
        return []

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """Add what the extension counts to the statistics of the engine."""
        return stats

    def check(self) -> None:
        """Assert the invariants of the extension."""

    # The rows of its sequences

    def row_length(self, seq: "Seq", start: int, count: int, room: int) -> int:
        """How many of the next `count` tokens one row may compute. 0: none in this step. More than
        `count`, but at most `room`, if they can only be computed together.
        """
        return count

    def needs_logits(self, seq: "Seq", start: int, end: int) -> bool:
        """Whether the logits of positions from `start` to `end` - 1 are needed, although they
        sample nothing.
        """
        return False

    def starts_over(self, seq: "Seq") -> bool:
        """Whether cached blocks can't be used, because results of their positions are missing."""
        return False

    def scored(self, row: "Row", output: StepOutput, first: int) -> None:
        """A row has computed logits of prompt positions. Their results begin at `first`."""

    def known_ids(self, seq: "Seq", ids: list[int]) -> list[int]:
        """Token ids of a sequence as they are in its prompt, if `Sequence.tokens` has others."""
        return ids

    def nonfinite(self, seq: "Seq") -> EngineError | None:
        """The error for a sequence whose logits are not numbers, if this extension is the cause."""
        return None

    def add_inputs(self, inputs: BatchInputs, rows: "tuple[Row, ...]") -> BatchInputs:
        """Add the extension's arrays to those of a step."""
        return inputs

    def advance_inputs(self, inputs: BatchInputs, rows: "tuple[Row, ...]") -> BatchInputs:
        """The same for a step with the rows of the step before, each advanced by one token."""
        return inputs


class CacheExtension(Extension):
    """A feature of the KV cache: a group of layers with its own memory, or tiers below the pool."""

    # The entries of cached blocks in the extension's own pool, if it has one
    column: "AuxBlockState | None" = None
    # Whether blocks of a running sequence are of use to others as soon as they are computed
    publishes_at_once: bool = True

    identity: bytes = b""  # what decides the bytes of blocks that other engines may load
    max_row: int = sys.maxsize  # the most tokens of a sequence that a step may compute

    # Its own memory

    def resume(self, seq: "Seq", entries: list[int], num_blocks: int, reserve: int) -> None:
        """Let a sequence start after a cached prefix of `num_blocks` blocks. The last of them have
        `entries` in the column. The sequence never lacks room for `reserve` tokens.
        """

    def extend(self, seq: "Seq", num_tokens: int, spare: int) -> bool:
        """Give a sequence room for `num_tokens` tokens. Returns False if fewer than `spare` blocks
        would remain.
        """
        return True

    def room(self, seq: "Seq", room: int) -> int:
        """For how many tokens a sequence has memory, of `room` tokens that have blocks."""
        return room

    def granted(self, seq: "Seq", end: int) -> None:
        """The next row of a sequence ends before position `end`."""

    def entries(self, seq: "Seq", num_blocks: int) -> list[int]:
        """The entries of the first blocks of a sequence in the column."""
        return []

    def committed(self, seq: "Seq", num_blocks: int | None = None) -> None:
        """The first blocks of a running sequence are published. None: it is computed again from
        its cached prefix.
        """

    def release(self, seq: "Seq") -> None:
        """Drop what a sequence holds. Safe to call twice."""

    def sync(self, seq: "Seq", slot: int, is_new: bool) -> None:
        """The block table of a running sequence has grown. `is_new`: it has just got its slot."""

    def evict(self) -> int:
        """Drop what no sequence uses. Returns the number of freed entries."""
        return 0

    def reset(self) -> None:
        """Forget everything. No sequence holds anything."""

    def check_held(self, sequences: "Sequence[Seq]") -> None:
        """Assert that the extension's memory agrees with what the sequences hold."""

    # Blocks below the pool

    def read_ahead(self, seq: "Seq", cache: "KVCache") -> None:
        """Begin to load blocks for a sequence that begins to wait."""

    def is_loading(self, seq: "Seq", cache: "KVCache") -> bool:
        """Whether a waiting sequence should wait for blocks. Those that have come are put into the
        cache.
        """
        return False

    def is_reading(self, seq: "Seq") -> bool:
        """Whether blocks are being loaded for a sequence."""
        return False

    def num_reused(self, seq: "Seq", num_found: int) -> int:
        """How many of the prompt tokens that were found in the cache count as cached."""
        return num_found

    def published(self, seq: "Seq", cache: "KVCache", count: int, is_end: bool) -> None:
        """The first `count` blocks of a sequence are in the cache. `is_end`: it runs no longer."""

    def inserted(self, seq: "Seq", tokens: "Tokens", blocks: list[int]) -> None:
        """These blocks are in the prefix cache now. Some may have been there before."""

    def news(self) -> CachedPrefixes | None:
        """A message about the cache to send now, if there is one."""
        return None

    def close(self) -> None:
        """The engine ends."""


def overriding(extensions: Iterable[Extension], hook: str) -> tuple[Extension, ...]:
    """The extensions that do something in a hook. Each step calls it for these alone."""
    default = getattr(Extension, hook)
    return tuple(each for each in extensions if getattr(type(each), hook) is not default)


def found(extensions: Iterable[Extension], kind: type[E]) -> E | None:
    """The extension of a kind, if there is one."""
    return next((each for each in extensions if isinstance(each, kind)), None)
