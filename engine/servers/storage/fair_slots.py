"""A limited number of slots for work that the server does for its tenants in the background."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.core.forecast import may_take


class FairSlots:
    """Like a semaphore, but no tenant takes all slots, and a free one goes to the tenant that has
    the fewest. So a tenant whose work is slow, or much, does not stop the work of others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot. The caller must release it."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._hand_out()
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # the slot came at the same time
                self.release(tenant)
            raise

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(tenant)

    def release(self, tenant: str) -> None:
        self._held[tenant] -= 1
        assert self._held[tenant] >= 0, tenant
        if not self._held[tenant]:
            del self._held[tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        while able := [tenant for tenant in self._waiting if self._may_take(tenant)]:
            tenant = min(able, key=self._held.__getitem__)
            waiter = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not waiter.done():  # else its task was cancelled
                self._held[tenant] += 1
                waiter.set_result(None)

    def _may_take(self, tenant: str) -> bool:
        return may_take(tenant, self._held[tenant], self._held.total(), self._most)
