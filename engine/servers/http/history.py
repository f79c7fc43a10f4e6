"""Keeps the records of the last generation requests, so that they can be explained."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.servers.http.request_log import RequestRecord


class RequestHistory:
    """The records of the last requests that have ended. Records have no text of a request."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=0)

    @property
    def is_on(self) -> bool:
        return self._records.maxlen != 0

    def resize(self, max_records: int) -> None:
        self._records = deque(self._records, maxlen=max_records)

    def add(self, record: "RequestRecord") -> None:
        self._records.append(record)

    def newest(self, tenant: str | None) -> "Iterator[RequestRecord]":
        """The records, newest first. If `tenant` is given, only those of its requests."""
        return (each for each in reversed(self._records) if tenant in (None, each.tenant))

    def find(self, request_id: str, tenant: str | None) -> "RequestRecord | None":
        """The newest record with this id, which is the id of the HTTP request or of the answer."""
        for each in self.newest(tenant):
            if request_id in (each.request_id, each.completion_id):
                return each
        return None
