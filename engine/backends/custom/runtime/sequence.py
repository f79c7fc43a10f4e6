"""A sequence is one choice of a request, with its scheduling state.

Whether a sequence waits or runs is not a field of it. The scheduler has a queue of waiting
sequences and a list of running sequences.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.backends.custom.runtime.grammar import Constraint
from engine.backends.custom.runtime.images import PlacedImage
from engine.backends.custom.runtime.model_runner import U32
from engine.backends.custom.runtime.samplers.repetition import Breakers
from engine.core.interfaces.request import FinishReason, SamplingParams, TokenLogprobs

# After this many preemptions, a sequence is admitted only with all blocks that it can ever need.
MAX_PREEMPTIONS = 4

if TYPE_CHECKING:
    from engine.backends.custom.runtime.tiers.mover import ReadJob

    Tokens = array[int]
else:
    Tokens = array  # `array` takes no type parameter before Python 3.12


def packed(token_ids: Iterable[int] = ()) -> Tokens:
    """Token ids as an int32 array. Raises OverflowError if an id does not fit 32 bits."""
    return array("i", token_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one choice, and for how many of them keys and values have been computed.

    num_confirmed <= num_computed <= len(tokens) + num_sampling, and num_confirmed <= len(tokens).
    """

    request_id: str
    choice: int
    # The prompt, then every sampled token that the host knows. Tokens of images are negative (see
    # images.py).
    tokens: Tokens
    num_prompt: int
    max_tokens: int  # max number of generated tokens; at least 1
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    namespace: str  # sequences share cached prefixes only within a namespace
    tenant: str  # the owner of the API key; fair scheduling charges the tokens to this tenant
    priority: int
    arrival: int  # order of arrival, unchanged by preemption; a lower number is more senior
    submitted_at: float
    deadline: float | None
    constraint: Constraint | None = None  # the grammar that the output follows, if any
    pools: bool = False  # True: the result is an embedding instead of tokens
    images: tuple[PlacedImage, ...] = ()
    allowed: U32 | None = None  # the mask of `params.allowed_token_ids`
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: Breakers = field(default_factory=dict)
    # Mirostat's limit for the surprise of the next token, after each generated token
    surprise_limits: list[float] = field(default_factory=list)
    scores_prompt: bool = False
    reports_progress: bool = False  # a delta tells how much of the prompt each step computed
    # The logprobs of prompt tokens that are computed so far. They start with the second token.
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    # The scheduler's step number at submission. Priority aging counts from this step.
    submitted_step: int = 0
    slot: int = -1  # index into the runner's per-sequence state, fixed while running; -1: waiting
    life: int = 0  # a number that identifies the current admission; 0 while waiting
    blocks: list[int] = field(default_factory=list)  # block table; append-only while running
    # The block table of the layers with a sliding window, if they have their own block pool. It is
    # also append-only. Blocks that the window has left are freed, and replaced by NULL_BLOCK.
    window_blocks: list[int] = field(default_factory=list)
    num_window_freed: int = 0  # number of leading places of `window_blocks` that are NULL_BLOCK
    # Checkpoints of states that the sequence holds, by the index of the block at whose end they are
    checkpoints: dict[int, int] = field(default_factory=dict)
    num_matched: int = 0  # number of blocks that came from the prefix cache at admission
    reserved: int = 0  # tokens for which admission guaranteed room
    room: int = 0  # tokens for which every block table has blocks
    num_computed: int = 0  # tokens whose KV finished or launched steps write
    num_confirmed: int = 0  # tokens whose KV finished steps have written, with finite values
    num_sampling: int = 0  # tokens that launched steps sample and that the host does not know yet
    num_preemptions: int = 0
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    # The running sequence that this sequence waits for, because it will soon publish a block that
    # this sequence needs.
    held_by: "Sequence | None" = None
    held_until: int = 0  # the wait ends when `held_by` has confirmed this many tokens
    # With cache tiers: the content keys of the first blocks, the job that loads blocks while the
    # sequence waits, how often tiers were asked, and how many tokens came from which tier.
    keys: list[bytes] = field(default_factory=list)
    load: "ReadJob | None" = None
    num_asked: int = 0
    loaded_from: dict[str, int] = field(default_factory=dict)
    needs_history: bool = True  # True: the runner has no valid token history for the slot
    started_at: float | None = None
    first_token_at: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens, with the tokens of images as they are in the prompt."""
        if not self.images:
            return self.tokens.tolist()
        image_token = self.images[0].token_id
        return [image_token if token < 0 else token for token in self.tokens]

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) + self.num_sampling - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_scoring(self) -> bool:
        """Whether prompt logprobs are still missing. If so, every prompt position must be computed,
        and the prefix cache cannot be used.
        """
        return self.scores_prompt and len(self.prompt_scores) < self.num_prompt - 1

    @property
    def max_len(self) -> int:
        """The max number of tokens whose keys and values are stored. The key and value of the last
        generated token are never needed.
        """
        return self.num_prompt + self.max_tokens - 1

    @property
    def is_pinned(self) -> bool:
        """Whether the sequence must not be preempted again."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def seniority(self) -> tuple[bool, int, int]:
        """A key that sorts running sequences, most senior first."""
        return (not self.is_pinned, self.priority, self.arrival)


class Row(NamedTuple):
    """The tokens start .. start + length - 1 of a sequence, to be computed in one step.

    `life` is the sequence's `life` when the row was made. It differs later if the sequence was
    preempted meanwhile. The class is a tuple for speed, because a step creates hundreds of rows.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool
    slot: int
    life: int
    num_scored: int = 0  # number of prompt tokens whose logprob this row computes


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)


class SequenceFaultError(Exception):
    """Planning a step failed because of the sequence `seq`. `__cause__` is the original error."""

    def __init__(self, seq: Sequence) -> None:
        super().__init__(seq.request_id)
        self.seq = seq
