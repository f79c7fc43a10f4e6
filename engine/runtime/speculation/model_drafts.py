"""Decides for which sequences the draft model guesses, and how many tokens.

A guess of the draft model costs time before the step that verifies it. The draft model may have to
compute the prompt first. So it guesses only where that is expected to save time, and only if an
account has the time that this takes. Guesses that were right add to the account, and so does each
step: a small share of its time, which shrinks while guesses are wrong. So a useless draft model
costs no more than this share.
"""

import time
from dataclasses import dataclass

from engine.runtime.budget import StepBudget
from engine.runtime.sequence import Sequence
from engine.runtime.speculation.draft_model import MAX_LAG, DraftModel
from engine.runtime.speculation.drafts import MARGIN, MEMORY

# Before anything was verified, this share of the guesses is expected to be right, and this counts
# as so many guesses.
PRIOR_CHANCE, PRIOR_GUESSES = 0.7, 8.0
# A new sequence is expected to have the chances of all others, which count as so many guesses.
SHARED_GUESSES = 4.0
# If the draft model does not guess, the chances return to those before anything was verified, and
# its measured cost counts less: by this share with each step. So it is tried again.
FORGETTING = 0.0001
# If a draft takes longer than this many times what was expected, no more than that is charged. Such
# a draft may have waited for a kernel that was compiled.
MAX_SURPRISE = 4.0
ALLOWANCE = 0.01  # the share of the time of all steps that the draft model may lose
# With each draft that costs more than it saves, the allowance shrinks to this part of it, but not
# below MIN_ALLOWANCE. A draft that pays restores it.
BACK_OFF = 0.8
MIN_ALLOWANCE = 0.0005
FIRST_TOKENS = 4.0  # the account begins with the time of so many generated tokens
# The account has at most the time of this many steps. If half of that is there, any prompt may be
# computed, however long it takes.
MAX_SAVED_STEPS = 200.0
USUAL_OUTPUT = 128.0  # tokens of a sequence, before any has ended


class Rate:
    """The share of guesses that were right. Older guesses have exponentially less weight."""

    def __init__(self, chance: float, num_guesses: float) -> None:
        self._hits, self._guesses = chance * num_guesses, num_guesses

    @property
    def chance(self) -> float:
        return self._hits / self._guesses

    def add(self, num_right: int, has_wrong: bool) -> None:
        weight = MEMORY ** (num_right + has_wrong)
        self._hits = weight * self._hits + num_right
        self._guesses = weight * self._guesses + num_right + has_wrong

    def forget(self) -> None:
        self._hits += FORGETTING * (PRIOR_CHANCE * PRIOR_GUESSES - self._hits)
        self._guesses += FORGETTING * (PRIOR_GUESSES - self._guesses)


@dataclass(frozen=True, slots=True)
class Offer:
    """How many tokens to guess, what that costs, and how much it is expected to save. The unit is
    the time that a generated token takes now.
    """

    count: int
    price: float  # of one token: to guess it, and to verify it
    gain: float


NOTHING = Offer(0, 0.0, 0.0)


class ModelDrafts:
    """The draft model, with what is known about its guesses and its cost."""

    def __init__(self, model: DraftModel, budget: StepBudget) -> None:
        """`budget` knows the times of the steps that verify drafts."""
        self._model = model
        self._budget = budget
        self._shared = Rate(PRIOR_CHANCE, PRIOR_GUESSES)
        self._rates: dict[Sequence, Rate] = {}
        self._saved_s: float | None = None  # the account, in seconds; None before the first step
        self._promised_s = 0.0  # what the offers for the next step may cost
        self._allowance = ALLOWANCE
        self._step_s = self._token_s = 0.0  # what a step and a generated token take now
        self._trust = 1.0  # in the measured cost of guesses
        self._num_drafting = 1  # sequences in the last draft
        self._usual_output = USUAL_OUTPUT
        self.draft_s = 0.0  # seconds of the last draft

    def begin(self, num_decoding: int) -> bool:
        """Begin to plan a step with this many decode rows. Returns whether guesses may pay, and
        whether the account has the time of one.
        """
        step_s = self._budget.step_s(num_decoding, num_decoding)
        if not step_s:
            return False
        self._step_s, self._token_s = step_s, step_s / num_decoding
        self._trust *= 1 - FORGETTING
        self._promised_s = 0.0
        if self._saved_s is None:
            self._saved_s = FIRST_TOKENS * self._token_s
        self._add(self._allowance * step_s)
        if self._saved_s < self._trust * self._model.token_s(self._num_drafting):
            self._shared.forget()
            return False
        return True

    def _add(self, seconds: float) -> None:
        assert self._saved_s is not None
        self._saved_s = min(self._saved_s + seconds, MAX_SAVED_STEPS * self._step_s)

    def _affordable(self, prompt_s: float, each_s: float) -> int:
        """How many guesses that take `each_s` seconds the account can pay, after a prompt."""
        assert self._saved_s is not None
        left_s = self._saved_s - self._promised_s
        if left_s < MAX_SAVED_STEPS / 2 * self._step_s:
            left_s -= prompt_s
        return max(0, int(left_s / each_s))

    def offer(self, seq: Sequence, price: float, credit: float, limit: int) -> Offer:
        """The best guess for a sequence, of at most `limit` tokens. `price` is the price of
        verifying a token.
        """
        lag = self._model.lag(seq)
        if lag is None or limit <= 0:
            return NOTHING
        own_s = self._trust * self._model.token_s(self._num_drafting)
        each = price + own_s / self._token_s
        chance = (self._rates.get(seq) or self._shared).chance
        prompt_s = self._model.prompt_s(lag) if lag > MAX_LAG else 0.0
        each_s = each * self._token_s
        limit = min(limit, int(credit / each), self._affordable(prompt_s, each_s))
        count, right = 0, 0.0
        while count < limit and chance ** (count + 1) >= MARGIN * each:
            count += 1
            right += chance**count
        gain = right - count * each
        if count and prompt_s:
            left = min(seq.max_tokens - seq.num_generated, self._usual_output)
            if left * gain / (1 + right) * self._token_s < prompt_s:
                count = 0
        if not count:
            self._shared.forget()
            return NOTHING
        self._promised_s += prompt_s + count * each_s
        return Offer(count, each, gain)

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[list[int] | None]:
        """Guess tokens for these sequences (see `DraftModel.draft`)."""
        lags = [self._model.lag(seq) or 0 for seq, _ in wanted]
        expected_s = self._model.prompt_s(sum(lag for lag in lags if lag > MAX_LAG))
        counts = [count for _, count in wanted]
        expected_s += max(counts) * len(counts) * self._model.token_s(len(counts))
        began_at = time.monotonic()
        drafts = self._model.draft(wanted)
        self.draft_s = time.monotonic() - began_at
        self._add(-min(self.draft_s, MAX_SURPRISE * expected_s))
        self._trust = 1.0
        self._num_drafting = max(1, sum(bool(each) for each in drafts))
        return drafts

    def verified(self, seq: Sequence, num_drafted: int, num_accepted: int, price: float) -> None:
        """A draft was verified. `price` is the price of verifying a token."""
        guess_s = num_drafted * self._model.token_s(self._num_drafting)
        saved_s = (num_accepted - num_drafted * price) * self._token_s
        self._add(saved_s)
        pays = saved_s >= guess_s
        self._allowance = ALLOWANCE if pays else max(MIN_ALLOWANCE, BACK_OFF * self._allowance)
        if seq not in self._rates:
            self._rates[seq] = Rate(self._shared.chance, SHARED_GUESSES)
        for rate in (self._shared, self._rates[seq]):
            rate.add(num_accepted, num_accepted < num_drafted)

    def end(self, seq: Sequence) -> None:
        """A sequence has ended."""
        self._rates.pop(seq, None)
        self._model.end(seq)
        self._usual_output += 0.1 * (seq.num_generated - self._usual_output)

    def close(self) -> None:
        self._model.close()

    def check(self) -> None:
        self._model.check()
