"""How many tokens a step may compute, so that nobody who is streaming waits too long for the next
one.

The limit is time, not a count: a small cost model learns what a token of prompt costs on this
machine. It applies only while somebody is decoding; otherwise a step may be as large as memory
allows.
"""

TARGET_STEP_S = 0.25
MIN_TOKENS = 64
SMOOTHING = 0.2


class StepBudget:
    """Seconds per token, learned from the steps that were large enough to tell."""

    def __init__(self, max_tokens: int, max_slots: int) -> None:
        self._max_tokens = max(max_tokens, max_slots)
        self._min_tokens = min(self._max_tokens, max_slots + MIN_TOKENS)
        self._seconds_per_token: float | None = None

    def tokens(self, num_decoding: int) -> int:
        """The budget of the next step, at least one token for each running sequence."""
        if not num_decoding or self._seconds_per_token is None:
            return self._max_tokens
        affordable = int(TARGET_STEP_S / self._seconds_per_token)
        return max(self._min_tokens, min(self._max_tokens, affordable))

    def record(self, num_tokens: int, seconds: float) -> None:
        if num_tokens < MIN_TOKENS:
            return
        cost = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = cost if known is None else known + SMOOTHING * (cost - known)
