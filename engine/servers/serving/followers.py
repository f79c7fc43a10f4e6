"""Counts the streams that tell clients of work that goes on without them.

Such a stream holds no place among the requests, and may say nothing for hours. So without a limit,
one tenant could take all connections of the server, which closes only idle ones.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar
from weakref import WeakKeyDictionary

from engine.core.errors import RateLimitError

Part = TypeVar("Part")

MAX_FOLLOWERS = 64  # open streams of one tenant


class Place:
    """The place of one stream."""


class Followers:
    def __init__(self) -> None:
        # Weak: a stream whose client has gone before its first part is never read.
        self._tenants: WeakKeyDictionary[Place, str] = WeakKeyDictionary()

    def follow(self, tenant: str, source: AsyncIterator[Part]) -> AsyncGenerator[Part, None]:
        """The parts of `source`. They count as a stream of the tenant until their end. Raises if
        the tenant has too many.
        """
        if list(self._tenants.values()).count(tenant) >= MAX_FOLLOWERS:
            raise RateLimitError(
                f"You follow {MAX_FOLLOWERS} jobs or responses already. Close a stream.",
                retry_after=None,
            )
        place = Place()
        self._tenants[place] = tenant
        return self._parts(place, source)

    async def _parts(self, place: Place, source: AsyncIterator[Part]) -> AsyncGenerator[Part, None]:
        try:
            async for part in source:
                yield part
        finally:
            self._tenants.pop(place, None)
