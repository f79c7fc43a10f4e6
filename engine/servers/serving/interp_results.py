"""Results of interpretability requests, kept in memory for a while, by id and tenant."""

import contextlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from engine.core.config_storage import InterpSettings
from engine.core.errors import NotFoundError, PayloadTooLargeError, RateLimitError
from engine.core.interp.results import InterpResult

SHARES = 4
MAX_RESULTS = 1024  # of one tenant


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    data: bytes
    expires_at: float


class ResultStore:
    """Keeps results until their time is over. A tenant that stores too much loses its oldest. Those
    of all tenants together have room for `SHARES` tenants that store as much as they may; what
    others stored is never deleted to make room. Threads may call it.
    """

    def __init__(self, settings: InterpSettings) -> None:
        self._settings = settings
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # oldest first
        self._lock = threading.RLock()

    def put(self, result_id: str, tenant: str, data: bytes) -> float:
        """Returns the seconds for which the result is kept."""
        room = self._settings.max_stored_mb * 2**20
        if len(data) > room:
            raise PayloadTooLargeError(
                f"interp: the results have {len(data):,} bytes, and a tenant may store {room:,}"
                " (interp.max_stored_mb)."
            )
        seconds = self._settings.result_ttl_s
        with self._lock:
            self._expire()
            own = [(name, kept) for name, kept in self._kept.items() if kept.tenant == tenant]
            others = self.num_bytes - sum(len(kept.data) for _, kept in own)
            room = min(room, SHARES * room - others)
            if len(data) > room:
                raise RateLimitError(
                    "interp: the stored results of all tenants fill their memory; try again later.",
                    retry_after=self._seconds_to_next_end(),
                )
            used = len(data) + sum(len(kept.data) for _, kept in own)
            for number, (name, kept) in enumerate(own):
                if used <= room and len(own) - number < MAX_RESULTS:
                    break
                used -= len(kept.data)
                del self._kept[name]
            self._kept[result_id] = _Kept(tenant, data, time.monotonic() + seconds)
        return seconds

    def _seconds_to_next_end(self) -> float:
        ends = (kept.expires_at for kept in self._kept.values())
        return max(0.0, min(ends) - time.monotonic())

    def get(self, result_id: str, tenant: str) -> bytes:
        with self._lock:
            self._expire()
            kept = self._kept.get(result_id)
        if kept is None or kept.tenant != tenant:  # the same answer, so ids can't be probed
            raise NotFoundError("There is no such result, or its time is over.", param="id")
        return kept.data

    def find(self, result_id: str, tenant: str) -> InterpResult:
        return InterpResult(self.get(result_id, tenant))

    def delete(self, result_id: str, tenant: str) -> None:
        with self._lock:
            self.get(result_id, tenant)
            del self._kept[result_id]

    def discard(self, result_id: str, tenant: str) -> None:
        """Delete a result, if it is there."""
        with contextlib.suppress(NotFoundError):
            self.delete(result_id, tenant)

    @property
    def num_bytes(self) -> int:
        return sum(len(kept.data) for kept in self._kept.values())

    def _expire(self) -> None:
        now = time.monotonic()
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if kept.expires_at > now:
                break
            del self._kept[name]
