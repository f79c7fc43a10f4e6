"""What each tenant has been given, in tokens: the one who got least is next.

Counts are relative: a tenant that comes back starts at the count of those who were served last, so
that nobody saves up turns by staying away, and none is punished for what it had while nobody else
wanted anything. An answer is charged by a guess when it begins and put right when it ends.
"""

from collections.abc import Collection
from collections.abc import Sequence as Listed

from engine.backends.custom.runtime.sequence import Sequence

# What an answer is taken for until it ends; asking for more is no reason to wait longer.
GUESSED_TOKENS = 256
# Of a step: enough for a question behind a text that is cached.
NEWCOMER_TOKENS = 64
# Tenants that are remembered without waiting; past it they are taken for newcomers.
MAX_REMEMBERED = 1024


class FairShare:
    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self._clock = 0  # the count at which whoever was admitted last stood

    def given(self, tenant: str) -> int:
        return self._given.get(tenant, self._clock)

    def begin(self, tenant: str) -> None:
        """The tenant had nothing waiting, and has now."""
        self._given[tenant] = max(self.given(tenant), self._clock)

    def end(self, waiting: Collection[str]) -> None:
        """A tenant has nothing waiting any more; `waiting` are those who have."""
        if not waiting:
            self._clock = max([self._clock, *self._given.values()])
            self._given.clear()
        elif len(self._given) > len(waiting) + MAX_REMEMBERED:
            self._given = {tenant: self._given[tenant] for tenant in waiting}

    def charge(self, seq: Sequence) -> None:
        before = self.given(seq.tenant)
        self._clock = max(self._clock, before)
        self._given[seq.tenant] = before + _guess(seq)

    def settle(self, seq: Sequence) -> None:
        actual = seq.num_prompt - seq.num_cached + seq.num_generated
        self._given[seq.tenant] = self.given(seq.tenant) + actual - _guess(seq)


class Newcomers:
    """Keeps a part of a step for a tenant that has nothing running: it would have to wait for all
    the prompts that others have begun. Every other such step has no room for prompts but these, so
    that it ends soon; prompts already begun go on in the rest.
    """

    def __init__(self) -> None:
        self._was_short = False

    def room(
        self, budget: int, waiting: Collection[str], running: Listed[Sequence]
    ) -> tuple[int, int]:
        """The step's tokens, and how many of them no sequence that is running gets for a prompt;
        `waiting` are tenants of whom somebody could be admitted.
        """
        kept = self._kept(budget, waiting, running)
        if kept and not self._was_short:
            budget = min(budget, len(running) + kept)
        self._was_short = bool(kept) and not self._was_short
        return budget, kept

    def _kept(self, budget: int, waiting: Collection[str], running: Listed[Sequence]) -> int:
        if not waiting:
            return 0
        present = {seq.tenant for seq in running}
        has_newcomers = any(tenant not in present for tenant in waiting)
        has_rivals = any(tenant in present for tenant in waiting) or any(
            seq.num_uncomputed > 1 for seq in running
        )
        if not (has_newcomers and has_rivals):
            return 0
        return max(0, min(NEWCOMER_TOKENS, (budget - len(running)) // 2))


def _guess(seq: Sequence) -> int:
    return seq.num_prompt - seq.num_cached + min(seq.max_tokens, GUESSED_TOKENS)
