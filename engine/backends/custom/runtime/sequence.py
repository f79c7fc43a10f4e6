"""A sequence: one choice of a request, with its scheduling state.

No field says whether a sequence waits or runs: that depends on which of the scheduler's queues
holds it. Only `Scheduler` and `KVCache` modify sequences.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.backends.custom.runtime.grammar import Constraint
from engine.core.interfaces.request import FinishReason, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array  # `array` takes no type parameter before Python 3.12


def packed(token_ids: Iterable[int] = ()) -> Tokens:
    """Token ids as an int32 array. Raises OverflowError if an id does not fit 32 bits."""
    return array("i", token_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one choice, and for how many of them the KV cache has been computed.

    num_confirmed <= num_computed <= len(tokens) + num_sampling, and num_confirmed <= len(tokens).
    """

    request_id: str
    choice: int
    tokens: Tokens  # the prompt, then every sampled token that the host knows
    num_prompt: int
    max_tokens: int  # at least 1, limited to the context length
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    namespace: str  # sequences share cached prefixes only within a namespace
    tenant: str  # the client that fair scheduling charges for the tokens
    priority: int
    arrival: int  # order of arrival: lower is more senior; unchanged by preemption
    submitted_at: float
    deadline: float | None
    constraint: Constraint | None = None  # the position in the grammar that the output follows
    pools: bool = False  # returns an embedding instead of tokens
    scores_prompt: bool = False
    # Logprobs of the prompt tokens from the second on, as far as they are computed.
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    # The scheduler's step number at submission. Priority aging counts from this step.
    submitted_step: int = 0
    slot: int = -1  # index into the runner's per-slot state, fixed while running; -1 while waiting
    life: int = 0  # number of the current admission, unique for every admission; 0 while waiting
    blocks: list[int] = field(default_factory=list)  # block table; append-only while running
    num_computed: int = 0  # tokens whose KV is written once all launched steps have run
    num_confirmed: int = 0  # tokens whose KV finished steps have written, with finite values
    num_sampling: int = 0  # tokens sampled on the device that the host does not know yet
    num_preemptions: int = 0
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    # The running sequence that will soon publish this sequence's next block to the prefix cache.
    # This sequence waits for it.
    held_by: "Sequence | None" = None
    held_until: int = 0  # the wait ends when `held_by` has confirmed this many tokens
    needs_history: bool = True  # the runner has no valid token history for the slot
    started_at: float | None = None
    first_token_at: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) + self.num_sampling - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_scoring(self) -> bool:
        """Whether prompt logprobs are still missing. Then every prompt position must be computed,
        so the prefix cache can't be used.
        """
        return self.scores_prompt and len(self.prompt_scores) < self.num_prompt - 1

    @property
    def max_len(self) -> int:
        """Max number of tokens whose keys and values are stored. Those of the last generated token
        are never needed.
        """
        return self.num_prompt + self.max_tokens - 1


class Row(NamedTuple):
    """Tokens start .. start + length - 1 of a sequence, to be computed in one step.

    `life` identifies the sequence's admission, so that a row from before a preemption can be
    recognized. The class is a tuple for speed: a step creates hundreds of rows.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool
    slot: int
    life: int
    num_scored: int = 0  # number of positions whose next prompt token gets a logprob


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)
