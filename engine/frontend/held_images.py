"""Counts the pixels that open requests keep. A request keeps them until it ends, because it may
have to continue in a new engine.
"""

import time
from collections.abc import Iterable

from engine.core.errors import RateLimitError
from engine.core.forecast import WaitForecast
from engine.core.interfaces.request import ImageInput
from engine.core.memory import memory_room

MAX_HELD_BYTES = 512 * 2**20
TENANT_SHARE = 0.5  # of these bytes, for the requests of one tenant
# A request with images is refused if it would leave less than so many times its own pixels.
FREE_TIMES = 2


class HeldImages:
    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, tuple[str, int]] = {}  # tenant and bytes, by request id
        self._num_released = 0
        self._forecast = WaitForecast()

    def take(self, request_id: str, tenant: str, images: Iterable[ImageInput]) -> None:
        """Count the images of a request. Raises `RateLimitError` if there is no room for them."""
        num_bytes = sum(len(image.pixels) for image in images)
        own = sum(each for holder, each in self._held.values() if holder == tenant)
        whole = sum(each for _, each in self._held.values())
        if (
            own + num_bytes > TENANT_SHARE * self._max_bytes
            or whole + num_bytes > self._max_bytes
            or FREE_TIMES * num_bytes > memory_room().plannable
        ):
            raise RateLimitError(
                f"Running requests hold {whole // 2**20} MiB of images, of which {own // 2**20} MiB"
                " are of your requests; there is no room for more. Try again later.",
                retry_after=self._seconds_to_next_end(),
            )
        self._held[request_id] = (tenant, num_bytes)
        self._observe()

    def release(self, request_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
        if self._held.pop(request_id, None) is not None:
            self._num_released += 1
            self._observe()

    def _observe(self) -> None:
        self._forecast.observe(time.monotonic(), len(self._held), self._num_released)

    def _seconds_to_next_end(self) -> float:
        self._observe()
        return self._forecast.seconds(0)
