"""What an engine tells about itself: counters of steps, tiers and the KV cache."""

import math
from collections.abc import Iterator

import msgspec

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
STEP_TOKENS = tuple(2**power for power in range(15))
MAX_TIERS = 16
MAX_TIER_NAME = 64


class StepCounts(msgspec.Struct, frozen=True, array_like=True):
    """Two histograms of an engine's steps: by duration and by number of tokens. `seconds` and
    `tokens` are the sums over all steps. The last bucket of a histogram has no upper edge. The
    engine keeps these counts, because a frontend does not see every step.
    """

    by_seconds: tuple[int, ...] = (0,) * (len(STEP_SECONDS) + 1)
    by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    seconds: float = 0.0
    tokens: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(
            tuple(map(sum, zip(self.by_seconds, other.by_seconds, strict=True))),
            tuple(map(sum, zip(self.by_tokens, other.by_tokens, strict=True))),
            self.seconds + other.seconds,
            self.tokens + other.tokens,
        )


class TierStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Statistics of one tier of the prefix cache: current values and cumulative counters."""

    name: str = ""  # "host", "disk", "redis", "peers" or "outgoing"
    num_blocks: int = 0
    num_bytes: int = 0
    is_up: bool = True  # False: the tier failed, and is not read until it answers again
    hits: int = 0  # blocks that were loaded
    misses: int = 0  # lookups of a prefix that ended at this tier without a block
    bad: int = 0  # records that were damaged or foreign
    stored: int = 0  # blocks
    errors: int = 0  # failed calls
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    saved_tokens: int = 0  # prompt tokens that were loaded instead of computed


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Statistics of one engine: current values and cumulative counters."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_referenced_blocks: int = 0  # blocks that at least one sequence holds
    block_size: int = 0
    # Blocks of layers with a sliding window, if these have a pool of their own; otherwise 0.
    num_window_blocks: int = 0
    num_free_window_blocks: int = 0
    num_referenced_window_blocks: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0  # includes prompt tokens taken from the cache
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    num_evictions: int = 0
    num_nonfinite: int = 0
    num_invariant_failures: int = 0
    num_drafted_tokens: int = 0  # tokens that speculation guessed, and that steps verified
    num_accepted_tokens: int = 0  # those of them that were right
    num_model_drafted_tokens: int = 0  # drafted tokens that the draft model guessed
    num_model_accepted_tokens: int = 0  # those of them that were right
    steps: StepCounts = StepCounts()
    tiers: tuple[TierStats, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether these can be the statistics of an engine. An engine of another machine may tell
        anything.
        """
        has_lengths = len(self.steps.by_seconds) == len(STEP_SECONDS) + 1
        has_lengths &= len(self.steps.by_tokens) == len(STEP_TOKENS) + 1
        has_lengths &= len(self.tiers) <= MAX_TIERS
        return (
            has_lengths
            and all(len(tier.name) <= MAX_TIER_NAME for tier in self.tiers)
            and all(0 <= value < math.inf for value in self._numbers())
        )

    def _numbers(self) -> Iterator[float]:
        yield from (*self.steps.by_seconds, *self.steps.by_tokens)
        for struct in (self, self.steps, *self.tiers):
            for value in msgspec.structs.astuple(struct):
                if isinstance(value, int | float):
                    yield value
