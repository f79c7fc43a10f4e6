"""Results of interpretability requests, kept in memory for a while, by id and tenant."""

import time
from collections import OrderedDict
from dataclasses import dataclass

from engine.core.config_storage import InterpSettings
from engine.core.errors import NotFoundError, PayloadTooLargeError
from engine.core.interp.results import Result


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    data: bytes
    expires_at: float


class ResultStore:
    """Keeps results until their time is over. A tenant that stores too much loses its oldest."""

    def __init__(self, settings: InterpSettings) -> None:
        self._settings = settings
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # oldest first

    def put(self, result_id: str, tenant: str, data: bytes) -> float:
        """Returns the seconds for which the result is kept."""
        room = self._settings.max_stored_mb * 2**20
        if len(data) > room:
            raise PayloadTooLargeError(
                f"interp: the results have {len(data):,} bytes, and a tenant may store {room:,}."
            )
        self._expire()
        own = [(name, kept) for name, kept in self._kept.items() if kept.tenant == tenant]
        used = len(data) + sum(len(kept.data) for _, kept in own)
        for name, kept in own:
            if used <= room:
                break
            used -= len(kept.data)
            del self._kept[name]
        seconds = self._settings.result_ttl_s
        self._kept[result_id] = _Kept(tenant, data, time.monotonic() + seconds)
        return seconds

    def get(self, result_id: str, tenant: str) -> bytes:
        self._expire()
        kept = self._kept.get(result_id)
        if kept is None or kept.tenant != tenant:  # the same answer, so ids can't be probed
            raise NotFoundError("There is no such result, or its time is over.", param="id")
        return kept.data

    def find(self, result_id: str, tenant: str) -> Result:
        return Result(self.get(result_id, tenant))

    def delete(self, result_id: str, tenant: str) -> None:
        self.get(result_id, tenant)
        del self._kept[result_id]

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
