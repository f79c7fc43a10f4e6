"""What each tenant has been given, in tokens: the one who got least is next.

Counts are relative: a tenant that comes back starts at the count of those who were served last, so
that nobody saves up turns by staying away, and none is punished for what it had while nobody else
wanted anything. An answer is charged by a guess when it begins and put right when it ends.
"""

from collections.abc import Collection

from engine.backends.custom.runtime.sequence import Sequence

# What an answer is taken for until it ends; asking for more is no reason to wait longer.
GUESSED_TOKENS = 256
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


def _guess(seq: Sequence) -> int:
    return seq.num_prompt - seq.num_cached + min(seq.max_tokens, GUESSED_TOKENS)
