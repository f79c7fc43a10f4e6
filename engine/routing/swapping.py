"""What becomes of a backend that was replaced by another while it had open requests."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from engine.backends.custom.base_custom import CustomBackend

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Swapped:
    """What became of the open requests when their backend was replaced."""

    replaced: CustomBackend
    num_moved: int  # requests that continue in the new backend
    num_left: int  # requests that finish in the old one


class ReplacedBackends:
    """Backends that were replaced. Each ends when it has no open requests left."""

    def __init__(self) -> None:
        # Each backend with the task that waits for its last request.
        self._retiring: dict[CustomBackend, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[CustomBackend]:
        return iter(self._retiring)

    def hand_over(self, old: CustomBackend, new: CustomBackend) -> Swapped:
        """Let requests of `old` continue in `new`. If they would not have the same result there,
        they finish in `old`.
        """
        num_moved = old.hand_over(new)
        num_left = old.num_open if num_moved is None else 0
        self._retiring[old] = asyncio.create_task(self._retire(old))
        return Swapped(old, num_moved or 0, num_left)

    async def stop(self) -> None:
        for old, retiring in list(self._retiring.items()):
            retiring.cancel()
            await old.stop()

    async def _retire(self, old: CustomBackend) -> None:
        while old.num_open:
            await asyncio.sleep(POLL_S)
        await old.stop()
        del self._retiring[old]
