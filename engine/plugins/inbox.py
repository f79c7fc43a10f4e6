"""Events from one task to another, in order: bounded by what the request may generate."""

import asyncio

from engine.core.interfaces.backend import Event


class Inbox:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._is_closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._wake.set()

    def close(self) -> None:
        """There will be no more."""
        self._is_closed = True
        self._wake.set()

    async def take(self) -> list[Event]:
        """All that has come; empty at the end."""
        while not self._events and not self._is_closed:
            self._wake.clear()
            await self._wake.wait()
        taken, self._events = self._events, []
        return taken
