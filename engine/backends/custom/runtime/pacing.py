"""Even steps on a GPU: how many prompt tokens a step computes beside decode.

A large step with prefill takes ten times as long as a decode step, and every stream waits for it.
So while most sequences decode, prefill is spread over many steps of about the same duration. If
most sequences start, as in a burst of requests, the few that decode may wait: steps are large. The
first tokens of the burst are held until all its prompts are computed. Then its sequences start
together, and none of them waits for the prefill of the others.

Every limit is a number of steps, rows or tokens. Only the cost model (`budget.py`) has times.
"""

from dataclasses import dataclass

from engine.backends.custom.runtime.budget import StepBudget
from engine.backends.custom.runtime.roster import Demand

# Prefill may take this part of decode's time. A mixed step then takes less than two decode steps.
EVEN_SHARE = 0.8
# If requests need more prefill than that to go on at their rate, it may take this many times
# decode's time. Then nearly every step has prefill, and the steps are still even.
MAX_SHARE = 3.0
SLACK = 1.1  # prefill is computed faster than it is needed by this factor, so that none piles up
MEMORY = 1.0 - 1.0 / 1024  # the weight of older steps in the rate of requests, per step
# Of all gaps between two tokens, this part may be long. It is less than a hundredth, because
# the 99th percentile is to be that of an even step.
LONG_GAPS = 0.004
FIRST_CREDIT, MAX_CREDIT = 64.0, 256.0  # in gaps
# First tokens are held for at most this many steps, and until no prompt has arrived or advanced for
# QUIET_STEPS steps.
MAX_HOLDS = 32
QUIET_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The token budget of a step, and whether the sequences that start are held: they compute their
    prompts, except for the last token.
    """

    tokens: int
    holds: bool = False


class Pacing:
    """Plans the size of each step. `sizes` are the numbers of tokens to which the runner pads steps
    with prefill, in ascending order.
    """

    def __init__(self, budget: StepBudget, sizes: tuple[int, ...] = ()) -> None:
        self._budget = budget
        self._sizes = sizes
        self._credit = FIRST_CREDIT  # long gaps that are left
        self._num_holds = 0  # steps since first tokens are held; 0: none are
        self._num_quiet = 0
        self._last = Demand()
        # Decayed sums over recent steps: prompt tokens of sequences that started, generated tokens
        self._prompt_tokens = self._new_tokens = 0.0

    def plan(self, demand: Demand) -> StepPlan:
        self._learn(demand)
        num_decoding, largest = demand.num_decoding, self._budget.tokens(0, 0)
        even = self._even(demand)
        if not self._holds(demand, even, largest):
            self._num_holds = 0
            return StepPlan(even if num_decoding else largest)
        self._num_holds += 1
        if self._must_release(demand, largest):
            self._num_holds = 0
            return StepPlan(min(largest, even + demand.num_starting) if num_decoding else largest)
        if num_decoding > self._credit:
            return StepPlan(even, holds=True)
        self._credit -= num_decoding
        return StepPlan(largest, holds=True)

    def _holds(self, demand: Demand, even: int, largest: int) -> bool:
        """Whether first tokens are held, or will be from this step on."""
        if not demand.num_starting or not demand.is_uniform:
            return False
        if self._num_holds:
            return True
        if not demand.num_decoding:
            return demand.num_prompt_tokens > largest
        is_burst = demand.num_decoding <= min(demand.num_starting, self._credit)
        return is_burst and demand.num_prompt_tokens > even - demand.num_decoding

    def _must_release(self, demand: Demand, largest: int) -> bool:
        if self._num_holds > MAX_HOLDS:
            return True
        if demand.num_decoding:
            return self._num_quiet >= QUIET_STEPS
        # If nothing decodes, a step that computes no prompt would be empty.
        return self._num_quiet > 0 or demand.num_prompt_tokens <= largest

    def _even(self, demand: Demand) -> int:
        """The tokens of a step that takes about as long as the others."""
        num_decoding = demand.num_decoding
        decode_s = self._budget.decode_s(num_decoding)
        affordable = self._budget.prompt_tokens(EVEN_SHARE * decode_s)
        if self._new_tokens:
            num_sequences = num_decoding + demand.num_starting
            needed = SLACK * num_sequences * self._prompt_tokens / self._new_tokens
            most = self._budget.prompt_tokens(MAX_SHARE * decode_s)
            affordable = max(affordable, min(int(needed), most))
        tokens = max(num_decoding + affordable, self._budget.least(demand.num_running))
        # A step takes as long as one of the size to which it is padded.
        padded = next((size for size in self._sizes if size >= tokens), tokens)
        return min(padded, self._budget.tokens(0, 0))

    def _learn(self, demand: Demand) -> None:
        last, self._last = self._last, demand
        self._credit = min(MAX_CREDIT, self._credit + LONG_GAPS * demand.num_decoding)
        started = demand.num_started_tokens - last.num_started_tokens
        self._prompt_tokens = MEMORY * self._prompt_tokens + started
        new = demand.num_new_tokens - last.num_new_tokens
        self._new_tokens = MEMORY * self._new_tokens + new
        has_arrived = demand.num_arrived > last.num_arrived
        has_advanced = demand.num_prompt_tokens < last.num_prompt_tokens
        self._num_quiet = 0 if has_arrived or has_advanced else self._num_quiet + 1
