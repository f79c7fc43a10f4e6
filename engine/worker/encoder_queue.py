"""The waiting requests of an encoder.

As in the queue of other engines, a priority below 0 orders only the requests of its own tenant, and
one above 0 lets those of all tenants go first. Otherwise the tenant that has received the fewest
tokens is next.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.core.forecast import may_take
from engine.core.interfaces.request import GenerateRequest


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A queued request. Those of one tenant are sorted by priority, then by arrival."""

    priority: int
    arrival: int
    request: GenerateRequest
    submitted_at: float
    deadline: float
    begin_by: float


class EncoderQueue:
    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._lines: dict[str, list[Waiting]] = {}  # a heap for each tenant
        self._given: dict[str, int] = {}  # tokens of each tenant that waits
        self._clock = 0  # what the last tenant had been given; new tenants start with it
        self._num_waiting = 0
        self.num_taken = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            yield from line

    def has_place(self, tenant: str) -> bool:
        """Whether one more request of the tenant may wait."""
        return may_take(tenant, len(self._lines.get(tenant, ())), len(self), self._max_queued)

    def add(self, waiting: Waiting) -> None:
        tenant = waiting.request.tenant
        if tenant not in self._lines:
            self._lines[tenant] = []
            self._given[tenant] = self._clock
        heapq.heappush(self._lines[tenant], waiting)
        self._num_waiting += 1

    def first(self) -> Waiting:
        """The request that is next."""
        return self._lines[self._next_tenant()][0]

    def take(self) -> Waiting:
        """Remove the request that is next, and charge its tenant."""
        tenant = self._next_tenant()
        line = self._lines[tenant]
        waiting = heapq.heappop(line)
        self._clock = max(self._clock, self._given[tenant])
        self._given[tenant] += len(waiting.request.prompt)
        self._num_waiting -= 1
        self.num_taken += 1
        if not line:
            del self._lines[tenant], self._given[tenant]
        return waiting

    def remove(self, is_unwanted: Callable[[Waiting], bool]) -> list[Waiting]:
        """Remove and return all requests that are no longer wanted."""
        removed = [each for each in self if is_unwanted(each)]
        for each in removed:
            tenant = each.request.tenant
            line = self._lines[tenant]
            line.remove(each)
            heapq.heapify(line)
            if not line:
                del self._lines[tenant], self._given[tenant]
        self._num_waiting -= len(removed)
        return removed

    def _next_tenant(self) -> str:
        def place(tenant: str) -> tuple[int, int, int]:
            first = self._lines[tenant][0]
            return (max(first.priority, 0), self._given[tenant], first.arrival)

        return min(self._lines, key=place)
