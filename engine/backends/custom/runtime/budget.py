"""How many tokens a step may compute, so that nobody who is streaming waits too long for the next
one.

The limit is time, not a count. A small model of cost is learned from the steps themselves: what a
step costs that only continues, by how many sequences it continues, and what each token of a prompt
adds to it. It applies only while somebody streams; otherwise a step may be as large as memory
allows.
"""

TARGET_STEP_S = 0.025
MIN_TOKENS = 16  # of prompts, in every step: they go on, however slow the machine is
PROMPT_SHARE = 2.0  # of the time that continuing takes, where that is more than the target leaves
SMOOTHING = 0.2
# A step that was interrupted tells nothing; one that is slower for good is believed step by step.
MAX_SURPRISE = 4.0


class StepBudget:
    """Knows no more than what it was told of finished steps."""

    def __init__(self, max_tokens: int, max_slots: int) -> None:
        self._max_tokens = max(max_tokens, max_slots)
        # Seconds of a step that only continues so many sequences; 0: not seen yet.
        self._continuing_s = [0.0] * (max_slots + 1)
        # Of recent steps with prompts, older ones fading: what prompts added, and their tokens.
        self._prompt_s = 0.0
        self._prompt_tokens = 0.0

    def tokens(self, num_decoding: int, num_running: int) -> int:
        """The budget of the next step, at least one token for each running sequence.

        Where continuing alone takes long, prompts may take twice as long again: a third of the
        speed for a while, for those who stream, is better than no first token for the others.
        """
        if not num_decoding:
            return self._max_tokens
        continuing_s = self._seconds(num_decoding)
        spare_s = max(TARGET_STEP_S - continuing_s, PROMPT_SHARE * continuing_s)
        # Infinite when prompts have long seemed to cost nothing: bounded before it is made whole.
        affordable = spare_s * self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0
        wanted = max(num_running + MIN_TOKENS, num_decoding + affordable)
        return int(min(self._max_tokens, wanted))

    def record(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step continued `num_decoding` sequences and computed so many tokens of prompts."""
        known = self._seconds(num_decoding) if num_decoding else 0.0
        if num_prompt_tokens:
            expected = known + self._prompt_cost(num_prompt_tokens)
            added = max(0.0, _believable(seconds, expected) - known)
            self._prompt_s += added - SMOOTHING * self._prompt_s
            self._prompt_tokens += num_prompt_tokens - SMOOTHING * self._prompt_tokens
        elif self._continuing_s[num_decoding]:
            change = _believable(seconds, known) - known
            self._continuing_s[num_decoding] = known + SMOOTHING * change
        else:
            self._continuing_s[num_decoding] = seconds

    def _prompt_cost(self, num_tokens: int) -> float:
        return num_tokens * self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def _seconds(self, num_decoding: int) -> float:
        """Of a step that only continues; of the nearest number of sequences that has been seen."""
        known = self._continuing_s
        if known[num_decoding]:
            return known[num_decoding]
        seen = [count for count, seconds in enumerate(known) if seconds]
        return known[min(seen, key=lambda count: abs(count - num_decoding))] if seen else 0.0


def _believable(seconds: float, expected: float) -> float:
    return min(seconds, MAX_SURPRISE * expected) if expected else seconds
