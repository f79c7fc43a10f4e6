"""One choice of one request while the engine works on it.

Where a sequence is (waiting, running, gone) is told by the scheduler's queues, not by a field here.
Only `Scheduler` and `KVCache` change one.
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
    Tokens = array  # before Python 3.12 it takes no parameter


def packed(token_ids: Iterable[int] = ()) -> Tokens:
    """Raises OverflowError for what is no 32-bit number."""
    return array("i", token_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and how far their keys and values have been computed.

    num_confirmed <= num_computed <= len(tokens) + num_sampling, and num_confirmed <= len(tokens).
    """

    request_id: str
    choice: int
    tokens: Tokens  # prompt, then every sampled token that the host knows
    num_prompt: int
    max_tokens: int  # at least 1, and no more than the context has room for
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    namespace: str  # prefix-cache root
    tenant: str  # whose share of the engine it takes
    priority: int
    arrival: int  # seniority; kept through preemption
    submitted_at: float
    deadline: float | None
    constraint: Constraint | None = None  # what its output must match
    pools: bool = False  # ends with a vector instead of a first token
    scores_prompt: bool = False
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)  # of tokens[1:], so far
    submitted_step: int = 0  # of the scheduler; aging counts from here
    slot: int = -1  # permanent while running
    life: int = 0  # number of the admission that it runs under; 0 while it waits
    blocks: list[int] = field(default_factory=list)  # append-only while running
    num_computed: int = 0  # tokens whose keys and values launched steps write
    num_confirmed: int = 0  # of those: written by finished steps, and finite
    num_sampling: int = 0  # sampled on the device, not yet known to the host
    num_preemptions: int = 0
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    held_by: "Sequence | None" = None  # a running sequence about to publish our next block
    held_until: int = 0  # ... which it has done when it has confirmed this many tokens
    needs_history: bool = True  # the runner's token history for the slot is missing or stale
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
        """Every prompt position must be computed by a step: none may come from the cache."""
        return self.scores_prompt and len(self.prompt_scores) < self.num_prompt - 1

    @property
    def max_len(self) -> int:
        """Positions whose keys and values can ever be needed; the last token's never are."""
        return self.num_prompt + self.max_tokens - 1


class Row(NamedTuple):
    """Tokens start .. start + length - 1 of a sequence; `life` tells a row of an earlier admission
    apart. A tuple, because hundreds are made and taken apart in every step.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool
    slot: int
    life: int
    num_scored: int = 0  # of its tokens: the next one is known, and its probability wanted


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)
