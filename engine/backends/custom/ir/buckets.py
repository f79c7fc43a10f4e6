"""Plans by size class: a step runs under the smallest plan that has room for it."""

from bisect import bisect_left
from collections.abc import Callable

from engine.backends.custom.ir.plan import Capacity, ExecutionPlan

_SMALL = (1, 8, 64, 512)
_GROWTH = 4


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """1, 8, 64, 512, then four times as many again and again; the last is `max_tokens`."""
    if max_tokens < 1:
        raise ValueError(f"a step has at least one token, found {max_tokens}")
    sizes = [size for size in _SMALL if size < max_tokens]
    size = _SMALL[-1] * _GROWTH
    while size < max_tokens:
        sizes.append(size)
        size *= _GROWTH
    return (*sizes, max_tokens)


class PlanCache:
    """Makes each bucket's plan when it is first asked for."""

    def __init__(
        self, make: Callable[[Capacity], ExecutionPlan], max_tokens: int, max_logits: int
    ) -> None:
        self._make = make
        self._buckets = token_buckets(max_tokens)
        self._max_logits = max_logits
        self._plans: dict[int, ExecutionPlan] = {}

    def capacities(self) -> tuple[Capacity, ...]:
        return tuple(Capacity(size, min(size, self._max_logits)) for size in self._buckets)

    def get(self, tokens: int, logits: int) -> ExecutionPlan:
        """The plan for a step of this size."""
        most = self._buckets[-1]
        if not 1 <= tokens <= most or not 0 <= logits <= min(tokens, self._max_logits):
            raise ValueError(
                f"a step of {tokens} tokens and {logits} logits is not within "
                f"{most} tokens and {self._max_logits} logits"
            )
        index = bisect_left(self._buckets, tokens)
        if index not in self._plans:
            self._plans[index] = self._make(self.capacities()[index])
        return self._plans[index]
