"""Even steps on a GPU: how many prompt tokens a step computes beside decode.

A large step with prefill takes ten times as long as a decode step, and every stream waits for it.
So while most sequences decode, prefill is spread over many steps of about the same duration. If
most sequences start, as in a burst of requests, the few that decode may wait: steps are large, as
long as few gaps between tokens are long.

Long gaps are counted, not timed: only the cost model (`budget.py`) measures times.
"""

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


class Pacing:
    """Plans the size of each step. `sizes` are the numbers of tokens to which the runner pads steps
    with prefill, in ascending order.
    """

    def __init__(self, budget: StepBudget, sizes: tuple[int, ...] = ()) -> None:
        self._budget = budget
        self._sizes = sizes
        self._credit = FIRST_CREDIT  # long gaps that are left
        self._last = Demand()
        # Decayed sums over recent steps: prompt tokens of sequences that started, generated tokens
        self._prompt_tokens = self._new_tokens = 0.0

    def tokens(self, demand: Demand) -> int:
        """The token budget of the next step."""
        self._learn(demand)
        num_decoding, largest = demand.num_decoding, self._budget.tokens(0, 0)
        if not num_decoding:
            return largest
        even = self._even(demand)
        is_burst = num_decoding <= min(demand.num_starting, self._credit)
        if not is_burst or demand.num_prompt_tokens <= even - num_decoding:
            return even
        self._credit -= num_decoding
        return largest

    def _even(self, demand: Demand) -> int:
        """The tokens of a step that takes about as long as the others."""
        num_decoding = demand.num_decoding
        decode_s = self._budget.decode_s(num_decoding)
        affordable = self._budget.prompt_tokens(EVEN_SHARE * decode_s)
        if self._new_tokens:
            num_sequences = num_decoding + demand.num_starting
            needed = SLACK * num_sequences * self._prompt_tokens / self._new_tokens
            most = self._budget.prompt_tokens(MAX_SHARE * decode_s)
            # After days without a request, the sums are so small that the quotient may be infinite.
            affordable = max(affordable, int(min(needed, most)))
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
