"""Decides which models stay loaded. If the memory budget is used up, it unloads the least recently
used model. It also unloads models that were idle for too long.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import psutil

from engine.backends.base import InferenceBackend
from engine.backends.custom.base_custom import CustomBackend
from engine.core.errors import ResourceError, UnavailableError

if TYPE_CHECKING:
    from engine.routing.on_demand import OnDemand

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
# Seconds that running requests get to finish when `Residency` unloads their model. 0, because
# `Residency` unloads only idle models.
MAKE_ROOM_WAIT_S = 0.0


class Residency:
    """All models that can be unloaded, and their common memory budget. A budget of None means no
    limit.
    """

    def __init__(self, budget_bytes: int | None = None, idle_s: float | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.idle_s = idle_s
        self.members: list[OnDemand] = []
        self._loading = asyncio.Lock()
        self._unloading: set[asyncio.Task[bool]] = set()

    @property
    def resident_bytes(self) -> int:
        return sum(member.resident_bytes() for member in self.members)

    @contextlib.asynccontextmanager
    async def room_for(self, loading: "OnDemand") -> AsyncGenerator[None, None]:
        """Unload idle models until `loading` fits in the memory budget. If there is a budget, only
        one model is loaded at a time.
        """
        if self.budget_bytes is None:
            yield
            return
        async with self._loading:
            await self._make_room(loading, self.budget_bytes)
            yield

    def tick(self) -> None:
        """Unload models that have been idle for too long. Called about once a second."""
        for member in self.members:
            is_old = member.seconds_left < 0
            if is_old and member.is_loaded and not member.is_leaving and not member.is_busy:
                log.info("%s is unloaded: it was idle for %.0f s", member.name, member.idle_s)
                task = asyncio.create_task(member.unload(MAKE_ROOM_WAIT_S))
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    def forget(self, member: "OnDemand") -> None:
        self.members.remove(member)

    async def _make_room(self, loading: "OnDemand", budget: int) -> None:
        needed = loading.expected_bytes
        if needed > budget:
            raise ResourceError(
                f"{loading.name} needs about {_mib(needed)} MiB; server.memory_budget_mb and the"
                f" memory that this server may use allow {_mib(budget)}."
            )
        while self.resident_bytes + needed > budget:
            idle = [
                member
                for member in self.members
                if member is not loading
                and member.is_loaded
                and not member.is_busy
                and not member.is_leaving
            ]
            if not idle:
                raise UnavailableError(
                    f"There is no memory for {loading.name}: every loaded model is in use."
                    " Retry later.",
                    retry_after=RETRY_AFTER_S,
                )
            oldest = min(idle, key=lambda member: member.last_used)
            log.info("%s is unloaded to make room for %s", oldest.name, loading.name)
            await oldest.unload(MAKE_ROOM_WAIT_S)


def _mib(num_bytes: int) -> int:
    return round(num_bytes / 2**20)


def own_bytes(backend: InferenceBackend | None) -> int:
    """Memory of the processes of a backend, without this process."""
    if backend is None:
        return 0
    total = backend.memory_bytes()
    # `memory_bytes` of a `CustomBackend` includes this process, which is its frontend.
    if isinstance(backend, CustomBackend):
        total -= psutil.Process(os.getpid()).memory_info().rss
    return max(0, total)
