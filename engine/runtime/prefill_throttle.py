"""The sizes of steps on a GPU: how many prompt tokens a step computes, and whether decode waits.

A large step with prefill takes ten times as long as a decode step, and every stream waits for it.
So while most sequences decode, prefill is spread over many steps of about the same duration. In a
burst, in which at least as many sequences start as decode, prefill comes first instead: steps are
large, and the few that decode pause. So each of them has one long gap between two tokens, and
not one for each large step. A long burst lets them go on, one token in each large step.

Long gaps are counted, not timed: only the cost model (`budget.py`) measures times.
"""

from typing import NamedTuple

import msgspec

from engine.runtime.budget import StepBudget
from engine.runtime.scheduler import Scheduler

# Prefill may take this part of decode's time. A mixed step then takes less than two decode steps.
EVEN_SHARE = 0.8
MIN_FILL = 0.6  # the part of that which is enough
# If requests need more prefill than that to go on at their rate, it may take this many times
# decode's time. Then nearly every step has prefill, and the steps are still even.
MAX_SHARE = 3.0
SLACK = 1.1  # prefill is computed faster than it is needed by this factor, so that none piles up
MEMORY = 1.0 - 1.0 / 1024  # the weight of older steps in the rate of requests, per step
# A chunk of a prompt attends to all tokens before it, so many small chunks of prompts of this
# length would take much longer than a large one. If prompts are that long, steps are large.
LONG_PROMPT = 2048
MAX_PAUSE_S = 0.5  # of decode in a burst
# Of all gaps between two tokens, this part may be long. It is less than a hundredth, because
# the 99th percentile is to be that of an even step.
LONG_GAPS = 0.008
FIRST_CREDIT, MAX_CREDIT, MIN_CREDIT = 64.0, 128.0, -1024.0  # in gaps


class Demand(msgspec.Struct, frozen=True):
    """What the sequences of an engine need next. The last two numbers only grow."""

    num_running: int = 0
    num_decoding: int = 0
    num_starting: int = 0  # sequences whose prompt is not computed, and that have a slot or get one
    num_prompt_tokens: int = 0  # of all sequences whose prompt is not computed
    num_started_tokens: int = 0  # prompt tokens of all sequences that were ever admitted
    num_new_tokens: int = 0  # all tokens that were ever generated


def demand_of(scheduler: Scheduler) -> Demand:
    table, waiting = scheduler.table, scheduler.table.waiting
    starting = [seq for seq in table.running if seq.num_computed < seq.num_prompt]
    return Demand(
        num_running=table.num_running,
        num_decoding=table.num_decoding,
        num_starting=len(starting) + min(len(waiting), len(table.free_slots)),
        num_prompt_tokens=waiting.num_prompt_tokens
        + sum(seq.num_prompt - seq.num_computed for seq in starting),
        num_started_tokens=scheduler.num_prompt_tokens - scheduler.num_cached_tokens,
        num_new_tokens=scheduler.num_generated_tokens,
    )


class StepPlan(NamedTuple):
    num_tokens: int  # the token budget
    pauses: bool = False  # whether sequences that decode have no row in the step


class PrefillThrottle:
    """Plans the size of each step. `sizes` are the numbers of tokens to which the runner pads steps
    with prefill, in ascending order.
    """

    def __init__(self, budget: StepBudget, sizes: tuple[int, ...] = ()) -> None:
        self._budget = budget
        self._sizes = sizes
        self._credit = FIRST_CREDIT  # long gaps that are left; below zero after a large burst
        self._last = Demand()
        # Decayed sums over recent steps: prompt tokens of sequences that started, generated tokens
        self._prompt_tokens = self._new_tokens = 0.0
        self._is_burst = False
        self._burst_tokens = 0  # prompt tokens of the present burst that are not computed
        self._pause_s = 0.0  # how long decode may still pause
        self._num_paused = 0

    def plan(self, demand: Demand) -> StepPlan:
        """The plan of the next step."""
        self._learn(demand)
        largest = self._budget.tokens(0, 0)
        if not demand.num_decoding:
            return StepPlan(largest)
        even = self._even(demand)
        if self._is_in_burst(demand, even):
            return StepPlan(largest, self._pauses(demand, min(largest, demand.num_prompt_tokens)))
        is_long = demand.num_prompt_tokens > LONG_PROMPT * demand.num_starting
        return StepPlan(largest if is_long else even)

    def _is_in_burst(self, demand: Demand, even: int) -> bool:
        """Whether the next step is one of a burst. A burst begins if at least as many sequences
        start as decode, or if there are enough long gaps left. Decode may pause while prompts
        arrive; then the burst lasts until all prompts are computed that had arrived when at least
        as many sequences started as decoded.
        """
        num_decoding, num_tokens = demand.num_decoding, demand.num_prompt_tokens
        starts = num_decoding <= demand.num_starting
        if not self._is_burst:
            may_begin = starts or num_decoding <= self._credit
            self._is_burst = may_begin and even - num_decoding < num_tokens
            self._pause_s, self._num_paused = MAX_PAUSE_S if starts else 0.0, 0
            self._burst_tokens = num_tokens
        elif starts:
            self._burst_tokens = num_tokens
        goes_on = num_tokens > 0 and (self._pause_s > 0 or self._burst_tokens > 0)
        self._is_burst = self._is_burst and goes_on
        return self._is_burst

    def _pauses(self, demand: Demand, num_tokens: int) -> bool:
        """Whether decode pauses in the next step of a burst, which computes `num_tokens`."""
        self._burst_tokens -= num_tokens
        pauses = self._pause_s > 0
        self._pause_s -= self._budget.prompt_s(num_tokens) or 0.0
        # A sequence that pauses has one long gap, however many steps it takes.
        known = self._num_paused if pauses else 0
        self._credit = max(MIN_CREDIT, self._credit - max(0, demand.num_decoding - known))
        self._num_paused = max(known, demand.num_decoding)
        return pauses

    def _even(self, demand: Demand) -> int:
        """The tokens of a step that takes about as long as the others."""
        num_decoding, needed = demand.num_decoding, 0
        decode_s = self._budget.decode_s(num_decoding)
        affordable = self._budget.prompt_tokens(EVEN_SHARE * decode_s)
        if self._new_tokens:
            num_sequences = num_decoding + demand.num_starting
            rate = SLACK * num_sequences * self._prompt_tokens / self._new_tokens
            # After days without a request, the sums are so small that the quotient may be infinite.
            needed = int(min(rate, self._budget.prompt_tokens(MAX_SHARE * decode_s)))
        least = max(num_decoding + needed, self._budget.least(demand.num_running))
        tokens = max(num_decoding + affordable, least)
        # A step takes as long as one of the size to which it is padded. The next smaller size is
        # taken, unless it is much smaller.
        least = max(least, num_decoding + int(MIN_FILL * affordable))
        smaller = [size for size in self._sizes if least <= size <= tokens]
        larger = (size for size in self._sizes if size >= tokens)
        return min(smaller[-1] if smaller else next(larger, tokens), self._budget.tokens(0, 0))

    def _learn(self, demand: Demand) -> None:
        last, self._last = self._last, demand
        started = demand.num_started_tokens - last.num_started_tokens
        self._prompt_tokens = MEMORY * self._prompt_tokens + started
        new = demand.num_new_tokens - last.num_new_tokens
        self._new_tokens = MEMORY * self._new_tokens + new
        self._credit = min(MAX_CREDIT, self._credit + LONG_GAPS * new)
