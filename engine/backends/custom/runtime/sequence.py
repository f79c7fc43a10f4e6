"""One choice of a request, as the engine sees it.

The scheduler's queues, not a field, say whether a sequence waits, runs or has ended. Only
`Scheduler` and `KVCache` modify sequences.
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
    """Token ids as an int32 array. Raises OverflowError for an id that is no 32-bit integer."""
    return array("i", token_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a choice, and how many of them have been computed.

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
    namespace: str  # root in the prefix cache
    tenant: str  # for fair sharing
    priority: int
    arrival: int  # seniority; unchanged by preemption
    submitted_at: float
    deadline: float | None
    constraint: Constraint | None = None  # the grammar state of its output
    pools: bool = False  # returns an embedding instead of tokens
    scores_prompt: bool = False
    # Logprobs of tokens[1:], so far.
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    submitted_step: int = 0  # the scheduler's step number; aging counts from it
    slot: int = -1  # fixed while running
    life: int = 0  # number of its current admission; 0 while it waits
    blocks: list[int] = field(default_factory=list)  # append-only while running
    num_computed: int = 0  # tokens whose KV is written once all launched steps have run
    num_confirmed: int = 0  # tokens whose KV finished steps have written, with finite values
    num_sampling: int = 0  # tokens sampled on the device that the host does not know yet
    num_preemptions: int = 0
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    # The running sequence that is about to publish our next block.
    held_by: "Sequence | None" = None
    held_until: int = 0  # `held_by` has published it once it confirms this many tokens
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
        """Whether prompt logprobs are wanted: then a step must compute every prompt position."""
        return self.scores_prompt and len(self.prompt_scores) < self.num_prompt - 1

    @property
    def max_len(self) -> int:
        """Max number of tokens that need KV. The last generated token never does."""
        return self.num_prompt + self.max_tokens - 1


class Row(NamedTuple):
    """Tokens start .. start + length - 1 of a sequence, to be computed in one step.

    `life` identifies the admission, so a row of an earlier one can be recognized. It is a tuple for
    speed: each step creates hundreds.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool
    slot: int
    life: int
    num_scored: int = 0  # how many of its tokens get a prompt logprob


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)
